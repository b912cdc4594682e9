"""The fp16 surface, node by node: what the patched file computes in onnxruntime against the NumPy rounding chain.

Whole-model outputs are not compared in half precision: rounding legitimately flips blocks whose scores nearly tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qsa_trt.metrics import FP16_TIE_BAND, row_error, tie_rows
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import NodeCall, PatchedSession
from qsa_trt.reference import qsa_attention
from tests.support.originals import Original

#: fp16 rounds at 4.9e-4 of a value; a row passes through about ten such roundings (projection, norm, RoPE, softmax).
BOUND = 5e-3
#: Share of rows that may be left out because their k-th and next score nearly tie.
MOST_TIES = 0.05


def calls(model: Original, folder: Path, lengths: list[int], steps: int) -> Iterator[tuple[NodeCall, list[int]]]:
    """Every node's calls in a ragged prefill and in decode steps, with the live rows of each sequence."""
    path = folder / "patched.onnx"
    report = patch_onnx(model.path, path)
    assert {layer.surface for layer in report.layers} == {"fp16"}
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


def compare(call: NodeCall, rows: list[int]) -> tuple[int, int, float]:
    """(rows, rows that nearly tie, largest error of the others) of one call."""
    assert call.inputs["qkv"].dtype == call.attn_output.dtype == np.float16
    geometry = call.node.geometry
    expected = qsa_attention(call.inputs, geometry)
    seen, ties, worst = 0, 0, 0.0
    for b, count in enumerate(rows):
        scores, k = expected.scores[b][:count], geometry.budget_blocks
        # Exactly equal scores (zeros, mostly) stay in: the contract decides them by block id, not by rounding.
        tied = tie_rows(scores, k, FP16_TIE_BAND) & ~tie_rows(scores, k, 0)
        error = row_error(call.attn_output[b, :count], expected.attn_output[b, :count]).max(axis=-1)
        seen, ties = seen + count, ties + int(tied.sum())
        worst = max(worst, float(error[~tied].max(initial=0)))
    return seen, ties, worst


@pytest.mark.parametrize("name", ["layer-dynamo-20-sdpa", "layer-script-18-eager", "qsa2_raw", "qsa_lm"])
def test_nodes_follow_the_rounding_chain(name: str, tmp_path: Path) -> None:
    results = [compare(call, rows) for call, rows in calls(Original(name), tmp_path, [110, 64, 3], steps=6)]
    rows, ties = sum(r[0] for r in results), sum(r[1] for r in results)
    assert ties <= MOST_TIES * rows, f"{ties} of {rows} rows nearly tie"
    assert max(r[2] for r in results) <= BOUND


def test_sample_with_the_real_geometry(tmp_path: Path) -> None:
    results = [compare(call, rows) for call, rows in calls(Original("sample/real_layer_fp16"), tmp_path, [131, 20], 3)]
    assert sum(r[1] for r in results) == 0  # within the budget nothing is left out
    assert max(r[2] for r in results) <= BOUND


def test_real_geometry_around_its_budget(tmp_path: Path) -> None:
    """An fp16 graph keeps its own surface; contexts 2047 to 2056 lie around the first row that is sparse (2052)."""
    model = Original("real_layer_fp16")
    results = [compare(call, rows) for call, rows in calls(model, tmp_path, [2047], steps=9)]
    assert sum(r[1] for r in results) <= MOST_TIES * sum(r[0] for r in results)
    assert max(r[2] for r in results) <= BOUND
