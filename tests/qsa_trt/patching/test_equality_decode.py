"""Original against patched in onnxruntime, fp32 at the node: step-by-step decode over shuffled pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_trt.metrics import row_error, same_index_sets
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession, Step
from qsa_trt.reference import qsa_attention
from tests.support.originals import Original, Run, index_list

#: As in prefill: fp32 on both sides, sums in another order.
BOUND = 1e-5
PREFILL_MODELS = (
    "layer-dynamo-18-eager",
    "layer-dynamo-20-sdpa",
    "layer-dynamo-23-sdpa",
    "layer-script-18-eager",
    "qsa2_raw",
    "qsa_lm",
)


def patched_session(model: Original, folder: Path, batch: int, max_kv_len: int) -> PatchedSession:
    path = folder / "patched.onnx"
    patch_onnx(model.path, path, dtype="fp32")
    rng = np.random.default_rng(5)
    rope = model.rope(max_kv_len)
    return PatchedSession(path, batch=batch, max_kv_len=max_kv_len, rope=rope, record=True, rng=rng, fill=np.nan)


def check_step(step: Step, run: Run, row: int, position: NDArray[Any], output: str) -> None:
    """A decode step at `position` [B] against row `row` of the original."""
    expected = run.outputs[output][:, row]
    assert row_error(step.outputs[output][:, 0], expected).max() <= BOUND, f"positions {position}"
    for call, blocks in zip(step.calls, run.blocks, strict=True):
        lists = qsa_attention(call.inputs, call.node.geometry).index_lists
        for b, t in enumerate(position):
            wanted = index_list(call.node.geometry, blocks[b, row], int(t))
            assert same_index_sets(lists[b, 0], wanted), f"{call.node.name}, sequence {b}, position {t}"


@pytest.mark.parametrize(("start", "stop"), [(2, 40), (121, 133)])
@pytest.mark.parametrize("name", PREFILL_MODELS)
def test_decode_step_equals_prefill_row(name: str, start: int, stop: int, tmp_path: Path) -> None:
    """From below the budget into sparse rows, and across a page end."""
    model = Original(name)
    tokens = model.tokens(np.random.default_rng(start), 2, stop)
    run = model.prefill(tokens, np.array([stop, stop]))
    session = patched_session(model, tmp_path, 2, 200)
    session.prefill({key: value[:, :start] for key, value in tokens.items()}, [start, start])
    output = next(iter(run.outputs))
    for t in range(start, stop):
        step = session.decode({key: value[:, t : t + 1] for key, value in tokens.items()})
        check_step(step, run, t, np.array([t, t]), output)


def test_ragged_decode_with_a_pause(tmp_path: Path) -> None:
    """Sequences of different lengths go on at their own pace; one pauses and comes back."""
    model = Original("qsa_lm")
    tokens = model.tokens(np.random.default_rng(2), 2, 110)["input_ids"]
    run = model.prefill({"input_ids": tokens}, np.array([110, 110]))
    session = patched_session(model, tmp_path, 2, 128)
    lengths = np.array([90, 31])
    session.prefill({"input_ids": tokens[:, :90]}, lengths)
    for turn in range(12):
        active = np.array([True, turn % 3 != 0])
        step = session.decode({"input_ids": np.take_along_axis(tokens, lengths[:, None], axis=1)}, active)
        for b in np.flatnonzero(active):
            expected = run.outputs["logits"][b, lengths[b]]
            assert row_error(step.outputs["logits"][b, 0], expected) <= BOUND, f"sequence {b}, turn {turn}"
        lengths = lengths + active
    assert session.lengths.tolist() == lengths.tolist() == [102, 39]


def test_decode_graph_from_an_empty_pool(tmp_path: Path) -> None:
    """The decode export against itself: its dense caches grow from empty as the pools do."""
    model = Original("qsa2_decode")
    session = patched_session(model, tmp_path, 2, 64)
    tokens = model.tokens(np.random.default_rng(9), 2, 45)["input_ids"]
    caches = {name: np.zeros(_empty(info), np.float32) for name, info in model.inputs.items() if ".cache." in name}
    positions = "input.cache.layers.0.indexer_position_ids"
    caches[positions] = caches[positions].astype(np.int64)
    for t in range(45):
        ids = tokens[:, t : t + 1]
        run = model.run({"input_ids": ids, "position_ids": np.full((2, 1), t), **caches})
        caches = {name: run.outputs[name.replace("input.", "output.", 1)] for name in caches}
        check_step(session.decode({"input_ids": ids}), run, 0, np.array([t, t]), "logits")


def _empty(info: Any) -> list[int]:
    """The input's shape for a batch of 2 and nothing cached."""
    batch = next(i for i, dim in enumerate(info.shape) if dim == "s17")
    return [2 if axis == batch else 0 if isinstance(dim, str) else dim for axis, dim in enumerate(info.shape)]
