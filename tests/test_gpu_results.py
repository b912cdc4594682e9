"""The writer of GPU results, and the compilations that GPU tests start with. No GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qsa_plugin.specialisation import SPECIALISATIONS
from tests.support.compile_ahead import jobs_of
from tests.support.gpu_results import END, RECORD, START, GpuResults, merged, summary, write_summary


def report(case: str, when: str, outcome: str, *figures: tuple[str, float, float | None]) -> Any:
    """What pytest says of one phase of one test."""
    properties = [(RECORD, {"name": name, "value": value, "bound": bound}) for name, value, bound in figures]
    return SimpleNamespace(
        nodeid=f"tests/gpu/{case}",
        when=when,
        outcome=outcome,
        failed=outcome == "failed",
        duration=0.5,
        user_properties=properties,
    )


def session_of(cases: int) -> Any:
    """A session that has collected so many cases."""
    return SimpleNamespace(items=[None] * cases)


def test_the_case_closest_to_its_bound_is_kept(tmp_path: Path) -> None:
    """Cases are counted once, whatever their phases; a failed set-up is a failure."""
    results = GpuResults(tmp_path / "new" / "results.json")
    results.pytest_collection_finish(session_of(6))
    for phase in (
        report("test_a.py::test_x[one]", "setup", "passed"),
        report("test_a.py::test_x[one]", "call", "passed", ("ulps", 0.5, 2.0), ("us", 3.0, None)),
        report("test_a.py::test_x[one]", "teardown", "passed", ("ulps", 0.5, 2.0)),
        report("test_a.py::test_x[two]", "call", "passed", ("ulps", 0.75, 8.0), ("us", 4.0, None)),
        report("test_a.py::test_y", "setup", "skipped"),
        report("test_b.py::test_z", "setup", "failed"),
    ):
        results.pytest_runtest_logreport(phase)
    results.pytest_sessionfinish()
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    assert written["cases"] == {"passed": 2, "skipped": 1, "failed": 1, "not run": 2}
    assert written["failed"] == ["tests/gpu/test_b.py::test_z"]
    assert written["figures"] == {
        "test_a.py::test_x": {
            "ulps": {"cases": 2, "largest": 0.5, "bound": 2.0, "case": "one"},
            "us": {"cases": 2, "largest": 4.0, "bound": None, "case": "two"},
        }
    }
    assert {"date", "python", "cuda-bindings", "nvrtc", "torch", "transformers", "tensorrt", "gpu"} <= written.keys()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.json"]


def test_a_page_shows_the_results(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    collected = GpuResults(results)
    collected.pytest_collection_finish(session_of(1))
    collected.pytest_runtest_logreport(report("test_a.py::test_x[one]", "call", "passed", ("ulps", 0.5, 2.0)))
    collected.pytest_sessionfinish()
    page.write_text(f"# Title\n{START}\nold\n{END}\nrest\n")
    write_summary(results, page)
    text = page.read_text()
    assert text.startswith(f"# Title\n{START}\n")
    assert text.endswith(f"{END}\nrest\n")
    assert "old" not in text
    assert "1 cases passed, 0 failed, 0 were skipped, in" in text
    assert "| `test_a: x` | ulps | 0.5 | 2 | 1 | one |" in text


def test_sessions_are_merged(tmp_path: Path) -> None:
    """Cases add up; of each figure the one closest to its bound stays."""
    records = []
    for case, value in (("one", 0.5), ("two", 1.5)):
        results = GpuResults(tmp_path / f"{case}.json")
        results.pytest_collection_finish(session_of(3))
        results.pytest_runtest_logreport(report(f"test_a.py::test_x[{case}]", "call", "passed", ("ulps", value, 2.0)))
        results.pytest_sessionfinish()
        records.append(json.loads((tmp_path / f"{case}.json").read_text()))
    both = merged(records)
    assert both["cases"] == {"passed": 2, "skipped": 0, "failed": 0, "not run": 4}
    assert both["figures"]["test_a.py::test_x"]["ulps"] == {"cases": 2, "largest": 1.5, "bound": 2.0, "case": "two"}
    assert "4 did not run" in summary(both) and "2 sessions" in summary(both)


def test_the_page_shows_the_results_in_the_repository() -> None:
    """`docs/gpu-tests.md` and the file that it sums up were written together."""
    docs = Path(__file__).parents[1] / "docs"
    results = docs / "measurements" / "gpu-tests-h200.json"
    shown = (docs / "gpu-tests.md").read_text().partition(START)[2].partition(END)[0].strip()
    expected = summary(json.loads(results.read_text())) if results.exists() else "No run is recorded."
    assert shown == expected


def test_every_kernel_file_is_compiled_ahead() -> None:
    """Those of both modes, the variants of the device's own and the portable ones."""
    spec = SPECIALISATIONS["real-fp16"].on("sm_90a")
    native, both = set(jobs_of(spec, portable=False)), set(jobs_of(spec, portable=True))
    assert native < both
    files = {job.name for job in both}
    assert {"decode_score", "decode_attend", "prefill_write", "prefill_attn", "prefill_attn_hopper"} <= files
