"""`qsa-trt bench` on a device: the smallest case in each mode, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsa_trt.benchmark import run_benchmark
from tests.support.plugin_host import needs_tensorrt
from tests.support.requirements import needs_gpu

pytestmark = [*needs_gpu, needs_tensorrt]


def test_one_case_of_each_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record = run_benchmark(quick=True, cases="decode-b1-8192,prefill-8192-j0.9", json=path)
    decode, prefill = record.cases
    for case in (decode, prefill):
        assert case.hot and case.cold and case.stages_us
        assert case.hot.us > case.floor_us
        # the stages are differences of chains whose last is the whole call, timed again
        assert sum(case.stages_us.values()) == pytest.approx(case.hot.us, rel=0.1)
        assert case.cold.us > case.hot.us * 0.95
    assert prefill.jaccard is None or prefill.jaccard == pytest.approx(0.9, abs=0.01)
    assert record.host and sum(record.host.parts.values()) == pytest.approx(record.host.us, rel=0.5)
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == [decode.name, prefill.name]
