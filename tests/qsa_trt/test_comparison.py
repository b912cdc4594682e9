"""The comparison of a causal LM with its patched form: it passes, it can fail, and it says what it cannot do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from qsa_plugin.errors import InputError, RefusedError
from qsa_trt import comparison
from qsa_trt.comparison import compare_causal_lm
from tests.support.requirements import needs_onnxruntime

pytestmark = needs_onnxruntime
MODELS = Path(__file__).parents[2] / "models"


def test_the_sample_passes_over_prefill_and_decode() -> None:
    prefill, decode = compare_causal_lm(MODELS / "qsa_lm.onnx", lengths=(90, 41, 3), decode_steps=20)
    assert (prefill.phase, prefill.rows, decode.phase, decode.rows) == ("prefill", 134, "decode", 60)
    assert prefill.passed
    assert decode.passed
    assert max(prefill.error, decode.error) > 0  # two computations, not one array twice


def test_another_rope_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong patch fails: here the baked table is turned by one position."""
    made = comparison.patch_onnx

    def wrong(*arguments: object, **options: object) -> object:
        report = made(*arguments, **options)  # type: ignore[arg-type]
        model = onnx.load(report.output)
        table = next(t for t in model.graph.initializer if t.name == "rope_rotary_cos_sin")
        half = onnx.numpy_helper.to_array(table).shape[2] // 2
        turned = np.roll(onnx.numpy_helper.to_array(table), half, axis=2)
        table.CopyFrom(onnx.numpy_helper.from_array(turned, table.name))
        onnx.save(model, report.output)
        return report

    monkeypatch.setattr(comparison, "patch_onnx", wrong)
    prefill, decode = compare_causal_lm(MODELS / "qsa_lm.onnx", lengths=(90,), decode_steps=3)
    assert not prefill.passed
    assert not decode.passed


def test_a_graph_of_another_form_is_refused() -> None:
    with pytest.raises(InputError, match="inputs attention_mask, cos, hidden_states, sin; expected a prefill graph"):
        compare_causal_lm(MODELS / "real_layer_fp16.onnx")


def test_a_model_without_qsa_is_refused() -> None:
    with pytest.raises(RefusedError):
        compare_causal_lm(MODELS / "plain_qwen3.onnx", lengths=(5,), decode_steps=1)
