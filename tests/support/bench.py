"""Records of `qsa-trt bench` as a run would leave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsa_trt.benchmark.host import HostTime
from qsa_trt.benchmark.record import CaseResult, Record
from qsa_trt.benchmark.timing import Sample


def case_result(name: str, us: float, cold: float | None = None, **fields: Any) -> CaseResult:
    """A case of 4 MB and 2 GFLOP, 5 us at least."""
    values: dict[str, Any] = {
        "mode": name.split("-")[0],
        "batch": 1,
        "length": 8192,
        "target_us": None,
        "relative_to": None,
        "jaccard_target": None,
        "bytes": 4_000_000,
        "flops": 2_000_000_000,
        "floor_us": 5.0,
        "workspace_bytes": 256,
        "hot": _sample(us),
        "cold": None if cold is None else _sample(cold),
        "stages_us": {"append": 2.0, "attend": us - 2},
    }
    return CaseResult(name, **(values | fields))


def make_record(cases: Sequence[CaseResult], *, gpu: str = "Some GPU", host_us: float | None = 20.0) -> Record:
    """A record of these cases."""
    return Record(
        date="2026-12-01T00:00:00+00:00",
        gpu={"name": gpu, "compute_capability": "9.0", "multiprocessors": 132, "l2_bytes": 60 << 20},
        versions={"driver": "1"},
        settings={"steps": 20},
        roofs={"copy_tb_s": 4.0, "fp16_tflop_s": 800.0},
        cases=cases,
        host=None if host_us is None else HostTime(host_us, host_us - 1, host_us + 1, {"checks": 1.0}),
        seconds=100.0,
    )


def _sample(us: float) -> Sample:
    return Sample(us, us - 0.1, us + 0.1, 7)
