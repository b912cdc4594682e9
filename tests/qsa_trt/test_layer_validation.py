"""The comparison of recorded layers with the plugin; here with a stand-in for the GPU, in tests/gpu with the plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from qsa_plugin.errors import InputError
from qsa_trt import device, layer_validation
from qsa_trt.cli import main
from qsa_trt.patching import patch_onnx
from qsa_trt.plugin_host import NodeOutputs
from qsa_trt.reference import qsa_attention
from tests.support.originals import MODELS
from tests.support.requirements import needs_onnxruntime

pytestmark = needs_onnxruntime
LM = MODELS / "qsa_lm.onnx"
SMALL: Mapping[str, Any] = {"lengths": (90, 40), "decode_steps": 2}


class StandIn:
    """A plugin host that computes in NumPy, and may be wrong in one place."""

    output_factor = 1.0
    pool_slot: tuple[int, ...] | None = None

    def __init__(self, geometry: Any, surface: str, largest: Mapping[str, tuple[int, ...]]) -> None:
        self.geometry, self.largest = geometry, largest

    def context(self) -> StandIn:
        return self

    def run(self, inputs: Mapping[str, np.ndarray]) -> NodeOutputs:
        for name, array in inputs.items():
            assert all(size <= limit for size, limit in zip(array.shape, self.largest[name], strict=True))
        with np.errstate(all="ignore"):
            result = qsa_attention(inputs, self.geometry)
        if self.pool_slot is not None:
            result.present_key_value[self.pool_slot] = 1
        output = result.attn_output
        output[0, 0, 0] = (output[0, 0, 0].astype(np.float32) * self.output_factor).astype(output.dtype)
        return NodeOutputs(output, result.present_key_value)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(device, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(layer_validation, "PluginHost", StandIn)
    monkeypatch.setattr(StandIn, "output_factor", 1.0)
    monkeypatch.setattr(StandIn, "pool_slot", None)
    return StandIn


def test_every_layer_is_compared_in_both_modes(stand_in: type[StandIn]) -> None:
    report = layer_validation.validate_layers(LM, **SMALL)
    assert report.passed and report.summary().endswith("\nPASSED")
    assert [(r.mode, r.rows) for r in report.layers] == [("prefill", 2 * 90 * 8)] * 2 + [("decode", 2 * 2 * 8)] * 2
    assert all(r.tie_rows == 0 and r.cosine > 0.999999 for r in report.layers)
    assert json.loads(report.json())["layers"][0]["bound"] == 2.0**-9


def test_one_wrong_head_fails(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "output_factor", 1.01)
    report = layer_validation.validate_layers(LM, **SMALL)
    assert not report.passed and report.summary().endswith("\nFAILED")


def test_a_write_outside_the_live_pool_fails(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "pool_slot", (0, 0, 127, 1, 0))
    report = layer_validation.validate_layers(LM, **SMALL)
    assert not report.passed and report.layers[0].pool_error == float("inf")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compute_capability", lambda: None)
    with pytest.raises(InputError, match="GPU: got none"):
        layer_validation.validate_layers(LM)


def test_an_fp32_surface_is_refused(stand_in: type[StandIn], tmp_path: Any) -> None:
    patched = patch_onnx(LM, tmp_path / "lm.onnx", dtype="fp32").output
    with pytest.raises(InputError, match="a float32 surface; expected fp16 or bf16; patch with --dtype fp16"):
        layer_validation.validate_layers(patched, **SMALL)


@pytest.mark.parametrize("lengths", ["99999999999999999999", "", "a", "3,,4", "0", [], [5, -1]])
def test_lengths_must_be_numbers(lengths: Any) -> None:
    with pytest.raises(InputError, match=r"lengths: got .*; expected numbers from 1 on"):
        layer_validation.parse_lengths(lengths)


def test_the_command_runs_it(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["validate", str(LM), "--gpu", "--lengths", "90,40", "--decode-steps", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith("\nPASSED\n")
    assert main([*arguments, "--original", str(LM)]) == 2
    assert "--original: the GPU is compared with MODEL itself" in capsys.readouterr().err
