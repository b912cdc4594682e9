"""The table of cases: its targets are those of the design, and patterns find cases."""

from __future__ import annotations

import pytest

from qsa_plugin.contract import Mode
from qsa_plugin.errors import InputError
from qsa_trt.benchmark.cases import CASES, GEOMETRY, HOST_CASE, HOST_TARGET_US, select
from qsa_trt.benchmark.inputs import SCORES

#: us on one H200, typed from the design a second time; every other case has no target.
TARGETS = {
    "decode-b1-2048": 9, "decode-b1-8192": 11, "decode-b1-32768": 12, "decode-b1-131072": 15,
    "decode-b16-8192": 34, "decode-b16-32768": 38, "decode-b16-131072": 65,
    "decode-b64-8192": 80, "decode-b64-32768": 108, "decode-b64-131072": 205,
    "prefill-2048": 200, "prefill-8192-j0.9": 1300, "prefill-8192-j0.8": 1600, "prefill-8192-random": 2800,
    "prefill-32768-j0.9": 5500, "prefill-32768-random": 15000, "prefill-131072-j0.9": 26000,
}  # fmt: skip


def test_targets_are_those_of_the_design() -> None:
    assert {case.name: case.target_us for case in CASES if case.target_us is not None} == TARGETS
    assert HOST_TARGET_US == 25 and HOST_CASE in TARGETS


def test_names_are_unique_and_relations_lead_somewhere() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.relative_to for case in CASES} - {None} <= set(names)


def test_every_kind_of_selection_is_timed() -> None:
    prefill = {(case.length, case.jaccard) for case in CASES if case.mode is Mode.PREFILL}
    assert prefill >= {(8192, j) for j in (0.9, 0.8, 0.5, None)} | {(32768, j) for j in (0.95, 0.9, None)}
    for length in (8192, 32768, 131072):
        assert {c.scores for c in CASES if c.mode is Mode.DECODE and (c.batch, c.length) == (1, length)} == set(SCORES)
    assert any(case.capacity == 1 << 20 for case in CASES)
    assert {case.mode for case in CASES if case.portable} == {Mode.PREFILL, Mode.DECODE}


def test_prefill_without_sparse_rows_has_no_overlap_in_its_name() -> None:
    (case,) = select(["prefill-2048*"], quick=False)
    assert case.length < GEOMETRY.list_width and case.name == "prefill-2048"


def test_patterns() -> None:
    assert [case.name for case in select(["decode-b1-2048", "prefill-2*"], False)] == ["decode-b1-2048", "prefill-2048"]
    assert select([], False) == list(CASES)
    assert select([], True) == [case for case in CASES if case.quick]
    assert [case.name for case in select(["prefill-131072-*"], True)] == ["prefill-131072-j0.9"]
    with pytest.raises(InputError, match=r"option --cases: got decode-b2-\*; expected a pattern that matches one of"):
        select(["decode-b1-*", "decode-b2-*"], False)
