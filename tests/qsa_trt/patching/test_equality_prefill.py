"""Original against patched in onnxruntime, fp32 at the node: prefill of all lengths and of ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from qsa_trt.metrics import row_error, same_index_sets
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession, Step
from qsa_trt.reference import qsa_attention
from tests.support.originals import Original, Run, index_list

LAYERS = ("layer-dynamo-18-eager", "layer-dynamo-20-sdpa", "layer-dynamo-23-sdpa", "layer-script-18-eager")
MODELS = ("qsa2_raw", "qsa_lm")
#: fp32 on both sides, sums in another order: a few hundred roundings of 6e-8 of the row's largest value.
BOUND = 1e-5


@cache
def original(name: str) -> Original:
    return Original(name)


@pytest.fixture(scope="module")
def patched_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patched")


def patched_session(name: str, folder: Path, batch: int, max_kv_len: int, *, seed: int = 0) -> PatchedSession:
    """The fp32 surface, shuffled pages, pools full of NaN."""
    path = folder / f"{name}.onnx"
    if not path.is_file():
        patch_onnx(original(name).path, path, dtype="fp32")
    return PatchedSession(
        path,
        batch=batch,
        max_kv_len=max_kv_len,
        rope=original(name).rope(max_kv_len),
        record=True,
        rng=np.random.default_rng(seed),
        fill=np.nan,
    )


def check_rows(name: str, run: Run, step: Step, lengths: Sequence[int]) -> None:
    """Outputs and index sets of all live rows."""
    for output, expected in run.outputs.items():
        for b, length in enumerate(lengths):
            error = row_error(step.outputs[output][b, :length], expected[b, :length])
            assert error.max(initial=0) <= BOUND, f"{output} of sequence {b}"
    assert len(step.calls) == len(run.blocks) == len(original(name).geometries)
    for call, blocks, geometry in zip(step.calls, run.blocks, original(name).geometries, strict=True):
        assert call.node.geometry == geometry
        lists = qsa_attention(call.inputs, geometry).index_lists
        for b, length in enumerate(lengths):
            expected = np.stack([index_list(geometry, blocks[b, t], t) for t in range(length)])
            assert same_index_sets(lists[b, :length], expected).all(), f"{call.node.name}, sequence {b}"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 20, 67])
@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_prefill_of_one_sequence(name: str, length: int, patched_dir: Path) -> None:
    model = original(name)
    tokens = model.tokens(np.random.default_rng(length), 1, length)
    step = patched_session(name, patched_dir, 1, length).prefill(tokens, [length])
    check_rows(name, model.prefill(tokens, np.array([length])), step, [length])


@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_prefill_across_a_page_end(name: str, patched_dir: Path) -> None:
    model = original(name)
    tokens = model.tokens(np.random.default_rng(7), 1, 133)
    step = patched_session(name, patched_dir, 1, 140).prefill(tokens, [133])
    check_rows(name, model.prefill(tokens, np.array([133])), step, [133])


@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_ragged_batch(name: str, patched_dir: Path) -> None:
    lengths = [41, 80, 18, 3]
    model = original(name)
    tokens = model.tokens(np.random.default_rng(11), len(lengths), 80)
    step = patched_session(name, patched_dir, len(lengths), 128).prefill(tokens, lengths)
    check_rows(name, model.prefill(tokens, np.array(lengths)), step, lengths)


def test_comparison_can_fail(patched_dir: Path) -> None:
    """The checks themselves are not blind: another prompt shows in the numbers and in the sets."""
    model = original("qsa_lm")
    tokens = model.tokens(np.random.default_rng(3), 1, 90)
    run = model.prefill(tokens, np.array([90]))
    tokens["input_ids"] = np.roll(tokens["input_ids"], 1, axis=1)
    step = patched_session("qsa_lm", patched_dir, 1, 90).prefill(tokens, [90])
    assert row_error(step.outputs["logits"][0, 1:], run.outputs["logits"][0, 1:]).max() > BOUND
    assert not all(
        same_index_sets(qsa_attention(call.inputs, g).index_lists[0, 89], index_list(g, blocks[0, 89], 89))
        for call, blocks, g in zip(step.calls, run.blocks, model.geometries, strict=True)
    )
