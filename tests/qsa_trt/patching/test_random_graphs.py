"""Random edits: the patched model gives the answer of its original, or the patcher refuses; it never crashes."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from qsa_plugin.errors import InputError, QsaError, RefusedError
from qsa_trt.patching.well_formed import check_well_formed
from qsa_trt.recording import open_session
from tests.support.compare import BOUND, errors, feeds, patch
from tests.support.forms import as_sparse_ops
from tests.support.graphs import load
from tests.support.mutations import Mutate
from tests.support.originals import MODELS
from tests.support.projections import as_form, n_bits, packed
from tests.support.random_edits import CHANGING, NEUTRAL, damaged

Edits = list[tuple[str, int]]
CONFIG = MODELS / "qsa_lm.config.json"
SEEDS = st.integers(0, 1 << 16)
neutral = st.lists(st.tuples(st.sampled_from(sorted(NEUTRAL)), SEEDS), min_size=1, max_size=3)
changing = st.tuples(st.sampled_from(sorted(CHANGING)), SEEDS)
_ORT = onnxruntime.capi.onnxruntime_pybind11_state
#: What onnx and onnxruntime raise on graphs that contradict themselves, which say nothing about the patcher.
_UNUSABLE = (
    onnx.shape_inference.InferenceError, _ORT.Fail, _ORT.InvalidGraph, _ORT.InvalidArgument, _ORT.RuntimeException,
)  # fmt: skip


def usable(model: onnx.ModelProto) -> bool:
    """Whether the edited model runs, with finite answers that do not depend on later tokens: else it cannot decode."""
    tokens = np.random.default_rng(0).integers(0, 128, (2, 92))
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        session = open_session(model)
        long, short = (
            session.run(["logits"], feeds(model, tokens[:, :n], np.array([n, n])))[0][:, :60] for n in (92, 60)
        )
    except _UNUSABLE:
        return False
    return bool(np.isfinite(long).all() and np.allclose(long, short, atol=1e-4))


def outcome(edits: Edits, *, config: bool = False) -> str:
    """`refused`, or `equal`; everything else raises."""
    model = load()
    for name, seed in edits:
        try:
            {**NEUTRAL, **CHANGING}[name](model, random.Random(seed))
        except (StopIteration, IndexError, KeyError, RefusedError):  # an earlier edit took its place away
            assume(False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_well_formed(model, Path(folder))
            assume(usable(model))
            assert max(errors(model, Path(folder), config=CONFIG if config else None)) <= BOUND
        except (RefusedError, InputError):
            return "refused"
    return "equal"


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(neutral)
def test_edits_that_keep_the_answer(edits: Edits) -> None:
    """Another form alone is no reason to refuse."""
    assert outcome(edits) == "equal"


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(neutral | st.just([]), changing, st.booleans())
def test_edits_that_may_change_the_answer(before: Edits, edit: tuple[str, int], config: bool) -> None:
    assert outcome([edit, *before], config=config) in ("equal", "refused")


FORMS = {
    "plain": load,
    "com.microsoft": as_sparse_ops,
    "com.microsoft, older": lambda: as_sparse_ops("old"),
    "quantised": lambda: _other(as_form(n_bits)),
    "packed": lambda: _other(packed()),
}


def _other(change: Mutate) -> onnx.ModelProto:
    model = load()
    change(model)
    return model


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FORMS)), st.lists(SEEDS, min_size=1, max_size=3))
def test_damage_is_patched_or_refused(form: str, seeds: list[int]) -> None:
    """Whatever is wrong with a file, a user reads one line."""
    model = FORMS[form]()
    for seed in seeds:
        damaged(model, random.Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        try:
            patch(model, Path(folder), dry_run=True)
        except QsaError as error:
            assert len(str(error).splitlines()) == 1
