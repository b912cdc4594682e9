"""`PatchedSession`: lengths, pools and pages between steps, and what it records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from qsa_plugin.contract import INPUTS, DType
from qsa_plugin.errors import InputError, MissingPackageError
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession
from qsa_trt.reference import qsa_attention
from tests.support.originals import MODELS, Original

LM = MODELS / "qsa_lm.onnx"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "lm.onnx"
    patch_onnx(LM, path, dtype="fp32")
    return path


def session(path: Path | onnx.ModelProto, **options: Any) -> PatchedSession:
    rope = Original("qsa_lm").rope(256)
    return PatchedSession(path, **({"batch": 2, "max_kv_len": 200, "rope": rope} | options))


def ids(seed: int, length: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.random.default_rng(seed).integers(0, 128, (2, length))}


def test_records_what_the_nodes_see(patched: Path) -> None:
    run = session(patched, record=True, rng=np.random.default_rng(0), fill=np.nan)
    for step, length in ((run.prefill(ids(0, 30), [30, 12]), 30), (run.decode(ids(1, 1)), 1)):
        assert set(step.outputs) == {"logits"} and len(step.calls) == 2
        for call in step.calls:
            assert set(call.inputs) == {t.name for t in INPUTS}
            expected = qsa_attention(call.inputs, call.node.geometry)
            assert call.attn_output.shape == (2, length, 8, 64)
            assert np.allclose(call.attn_output, expected.attn_output, atol=1e-5)
            same = np.isclose(call.present_key_value, expected.present_key_value, atol=1e-5, equal_nan=True)
            assert same.all()


def test_records_nothing_unless_asked(patched: Path) -> None:
    assert session(patched).prefill(ids(0, 5), [5, 5]).calls == ()


def test_lengths_and_inactive_sequences(patched: Path) -> None:
    run = session(patched, record=True)
    run.prefill(ids(0, 20), [20, 7])
    step = run.decode(ids(1, 1), active=[True, False])
    assert run.lengths.tolist() == [21, 7]
    [first, _] = step.calls
    assert first.inputs["context_lengths"].tolist() == [21, 0]
    assert first.inputs["kvcache_start_index"].tolist() == [20, 0]
    assert not first.attn_output[1].any() and first.attn_output[0].any()
    assert run.decode(ids(2, 1)).calls[0].inputs["context_lengths"].tolist() == [22, 8]


def test_page_table_hides_dead_pages(patched: Path) -> None:
    run = session(patched, record=True, rng=np.random.default_rng(4))
    table = run.prefill(ids(0, 20), [20, 0]).calls[0].inputs["kv_page_table"]
    assert (table[0, :, 0] >= 0).all() and (table[0, :, 1] == -1).all() and (table[1] == -1).all()


def test_reset_forgets(patched: Path) -> None:
    run = session(patched)
    first = run.prefill(ids(0, 40), [40, 40]).outputs["logits"]
    run.decode(ids(1, 1))
    run.reset()
    assert run.lengths.tolist() == [0, 0]
    assert all(not pool.any() for pool in run.pools.values())
    assert np.array_equal(run.prefill(ids(0, 40), [40, 40]).outputs["logits"], first)


def test_model_in_memory(patched: Path) -> None:
    a, b = (s.prefill(ids(0, 9), [9, 9]).outputs["logits"] for s in (session(patched), session(onnx.load(patched))))
    assert np.array_equal(a, b)


def test_too_long(patched: Path) -> None:
    run = session(patched, max_kv_len=10)
    run.prefill(ids(0, 10), [10, 3])
    with pytest.raises(InputError, match="length: got 11; expected at most max_kv_len 10"):
        run.decode(ids(1, 1))


def test_wrong_models(patched: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run: qsa-trt patch-onnx MODEL"):
        session(LM)
    patch_onnx(LM, tmp_path / "bare.onnx", reference_body=False)
    with pytest.raises(InputError, match="patch it without --no-reference-body"):
        session(tmp_path / "bare.onnx")
    with pytest.raises(InputError, match="rope table: got nothing"):
        session(patched, rope=None)


def test_bf16_tensors_are_fed_and_recorded(tmp_path: Path) -> None:
    """onnxruntime takes no such arrays itself; the pools go from step to step bit by bit."""
    patch_onnx(LM, tmp_path / "bf16.onnx", dtype="bf16")
    run = session(tmp_path / "bf16.onnx", record=True, rng=np.random.default_rng(0), fill=np.nan)
    pools = dict(run.pools)
    for step, length in ((run.prefill(ids(0, 70), [70, 12]), 70), (run.decode(ids(1, 1)), 1)):
        assert step.outputs["logits"].dtype == np.float32
        for call in step.calls:
            past = call.node.inputs["past_key_value"]
            surface = {t.name: call.inputs[t.name].dtype for t in INPUTS if t.dtype is DType.SURFACE}
            assert set(surface.values()) == {np.dtype(ml_dtypes.bfloat16)} and len(surface) == 7
            assert np.array_equal(call.inputs["past_key_value"].view(np.uint16), pools[past].view(np.uint16))
            expected = qsa_attention(call.inputs, call.node.geometry)
            assert call.attn_output.shape == expected.attn_output.shape == (2, length, 8, 64)
            assert np.array_equal(np.isnan(call.present_key_value), np.isnan(expected.present_key_value))
            pools[past] = call.present_key_value


def test_without_onnxruntime(patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'qsa-trt\[ort\]'"):
        session(patched)
