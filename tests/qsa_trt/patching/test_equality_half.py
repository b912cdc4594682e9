"""Half precision, node by node: what the patched file computes in onnxruntime against the NumPy rounding chain.

Whole-model outputs are not compared in half precision: rounding legitimately flips blocks whose scores nearly tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from qsa_trt.metrics import BF16_TIE_BAND, FP16_TIE_BAND, row_error, tie_rows
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import NodeCall, PatchedSession, open_session, run_session
from qsa_trt.reference import qsa_attention
from tests.support.graphs import compute_bf16_in_fp32, load, retype
from tests.support.originals import Original
from tests.support.reference_body import SURFACES

#: Both round at half an epsilon of a value; a row passes through about ten such roundings (norm, RoPE, softmax).
BOUND = {"fp16": 5e-3, "bf16": 4e-2}
BAND = {"fp16": FP16_TIE_BAND, "bf16": BF16_TIE_BAND}
#: Share of rows that may be left out because their k-th and next score nearly tie; it grows with the band.
MOST_TIES = {"fp16": 0.05, "bf16": 0.15}


def calls(
    model: Original, folder: Path, dtype: Any, lengths: list[int], steps: int
) -> Iterator[tuple[NodeCall, list[int]]]:
    """Every node's calls in a ragged prefill and in decode steps, with the live rows of each sequence."""
    path = folder / "patched.onnx"
    report = patch_onnx(model.path, path, dtype=dtype)
    assert {layer.surface for layer in report.layers} == {dtype}
    longest = max(lengths) + steps
    rng = np.random.default_rng(1)
    rope = model.rope(longest)
    session = PatchedSession(path, batch=len(lengths), max_kv_len=longest, rope=rope, record=True, rng=rng, fill=np.nan)
    tokens = model.tokens(np.random.default_rng(8), len(lengths), longest)
    prefill = session.prefill({name: value[:, : max(lengths)] for name, value in tokens.items()}, lengths)
    yield from ((call, lengths) for call in prefill.calls)
    for t in range(max(lengths), longest):
        step = session.decode({name: value[:, t : t + 1] for name, value in tokens.items()})
        yield from ((call, [1] * len(lengths)) for call in step.calls)


def compare(call: NodeCall, rows: list[int], dtype: str) -> tuple[int, int, float]:
    """(rows, rows that nearly tie, largest error of the others) of one call."""
    assert call.inputs["qkv"].dtype == call.attn_output.dtype == SURFACES[dtype][0]
    geometry = call.node.geometry
    expected = qsa_attention(call.inputs, geometry)
    seen, ties, worst = 0, 0, 0.0
    for b, count in enumerate(rows):
        scores, k = expected.scores[b][:count], geometry.budget_blocks
        # Exactly equal scores (zeros, mostly) stay in: the contract decides them by block id, not by rounding.
        tied = tie_rows(scores, k, BAND[dtype]) & ~tie_rows(scores, k, 0)
        error = row_error(call.attn_output[b, :count], expected.attn_output[b, :count]).max(axis=-1)
        seen, ties = seen + count, ties + int(tied.sum())
        worst = max(worst, float(error[~tied].max(initial=0)))
    return seen, ties, worst


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["layer-dynamo-20-sdpa", "layer-script-18-eager", "qsa2_raw", "qsa_lm"])
def test_nodes_follow_the_rounding_chain(name: str, dtype: str, tmp_path: Path) -> None:
    made = calls(Original(name), tmp_path, dtype, [110, 64, 3], steps=6)
    results = [compare(call, rows, dtype) for call, rows in made]
    rows, ties = sum(r[0] for r in results), sum(r[1] for r in results)
    assert ties <= MOST_TIES[dtype] * rows, f"{ties} of {rows} rows nearly tie"
    assert max(r[2] for r in results) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sample_with_the_real_geometry(dtype: str, tmp_path: Path) -> None:
    """An fp16 graph, whose casts go to bf16 directly."""
    made = calls(Original("sample/real_layer_fp16"), tmp_path, dtype, [131, 20], 3)
    results = [compare(call, rows, dtype) for call, rows in made]
    assert sum(r[1] for r in results) == 0  # within the budget nothing is left out
    assert max(r[2] for r in results) <= BOUND[dtype]


def test_real_geometry_around_its_budget(tmp_path: Path) -> None:
    """Contexts 2047 to 2056 lie around the first row that is sparse (2052)."""
    made = calls(Original("real_layer_fp16"), tmp_path, "fp16", [2047], steps=9)
    results = [compare(call, rows, "fp16") for call, rows in made]
    assert sum(r[1] for r in results) <= MOST_TIES["fp16"] * sum(r[0] for r in results)
    assert max(r[2] for r in results) <= BOUND["fp16"]


def test_bf16_graph(tmp_path: Path) -> None:
    """A bf16 graph, original against patched, all of it within the budget, where nothing is left out."""
    path, lengths = tmp_path / "bf16.onnx", np.array([131, 20])
    onnx.save(retype(load("real_layer_fp16"), TensorProto.FLOAT16, TensorProto.BFLOAT16), path)
    patched = onnx.load(patch_onnx(path, tmp_path / "patched.onnx").output)
    onnx.checker.check_model(patched)
    twin = Original("real_layer_fp16")  # tells what to feed
    tokens = twin.tokens(np.random.default_rng(4), 2, 131)
    mask = twin.layer_feeds(2, 131, np.arange(131) < lengths[:, None])
    feeds = {name: as_bf16(array) for name, array in (tokens | mask).items()}
    expected = run_session(open_session(compute_bf16_in_fp32(onnx.load(path))), feeds)["out"]
    session = PatchedSession(compute_bf16_in_fp32(patched), batch=2, max_kv_len=131, rope=twin.rope(131), fill=np.nan)
    actual = session.prefill({"hidden_states": feeds["hidden_states"]}, lengths).outputs["out"]
    assert actual.dtype == expected.dtype == ml_dtypes.bfloat16
    for b, length in enumerate(lengths):
        assert row_error(actual[b, :length], expected[b, :length]).max() <= BOUND["bf16"]


def as_bf16(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(ml_dtypes.bfloat16) if array.dtype == np.float16 else array
