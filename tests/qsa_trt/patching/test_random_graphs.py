"""Random edits: the patched model gives the answer of its original, or the patcher refuses; it never crashes."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import onnxruntime
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from qsa_plugin.errors import InputError, RefusedError
from tests.support.compare import BOUND, errors
from tests.support.graphs import load
from tests.support.originals import MODELS
from tests.support.random_edits import CHANGING, NEUTRAL

Edits = list[tuple[str, int]]
SEEDS = st.integers(0, 1 << 16)
neutral = st.lists(st.tuples(st.sampled_from(sorted(NEUTRAL)), SEEDS), min_size=1, max_size=3)
changing = st.tuples(st.sampled_from(sorted(CHANGING)), SEEDS)
#: Values that are no numbers, or no graph that onnxruntime accepts, say nothing about the patcher.
_UNUSABLE = (onnxruntime.capi.onnxruntime_pybind11_state.Fail, onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph)


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
            found = list(errors(model, Path(folder), config=MODELS / "qsa_lm.config.json" if config else None))
        except (RefusedError, InputError):
            return "refused"
    assume(all(e == e for e in found))
    assert max(found) <= BOUND
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
