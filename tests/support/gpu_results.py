"""Writes what a GPU run found: environment, counts, durations, and the largest errors that tests recorded, as JSON.

`pytest -m gpu --gpu-results FILE` switches it on; `tests/conftest.py` registers it.
`python -m tests.support.gpu_results FILE PAGE` writes the summary of a results file into a page, between two marks;
with more files after these, FILE is first made of those, which several sessions wrote.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qsa_trt import device

START, END = "<!-- results: start -->", "<!-- results: end -->"
#: Key of a recorded figure in a report's user properties.
RECORD = "figure"


class GpuResults:
    """A pytest plugin that collects figures and outcomes, and writes them when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.perf_counter()
        self._collected = 0
        self._outcomes: Counter[str] = Counter()
        self._failed: list[str] = []
        self._seconds: Counter[str] = Counter()
        self._figures: dict[str, dict[str, dict[str, Any]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """How many cases there are to run."""
        self._collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._seconds[report.nodeid] += report.duration
        if report.when != "call" and report.outcome == "passed":
            return
        self._outcomes[report.outcome] += 1
        if report.failed:
            self._failed.append(report.nodeid)
        for key, figure in report.user_properties:
            if key == RECORD:
                self._keep(report.nodeid.removeprefix("tests/gpu/"), figure)

    def _keep(self, case: str, figure: dict[str, Any]) -> None:
        """Of the cases of one test: how many there are, and the one that comes closest to its bound."""
        figures = self._figures.setdefault(case.split("[")[0], {})
        new = {"cases": 1, "largest": figure["value"], "bound": figure["bound"]}
        _add(figures, figure["name"], new | {"case": case.partition("[")[2].rstrip("]")})

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        slowest = {name: round(seconds, 2) for name, seconds in self._seconds.most_common(15)}
        record = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            **environment(),
            "seconds": round(time.perf_counter() - self._start, 1),
            "cases": {outcome: self._outcomes[outcome] for outcome in ("passed", "skipped", "failed")}
            | {"not run": self._collected - sum(self._outcomes.values())},
            "failed": self._failed,
            "figures": {test: self._figures[test] for test in sorted(self._figures)},
            "slowest_seconds": slowest,
        }
        _write(self._path, record)


def _write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)


def _add(figures: dict[str, dict[str, Any]], name: str, new: dict[str, Any]) -> None:
    """Count the cases of a figure, and keep what is closest to its bound."""
    known = figures.setdefault(name, new | {"cases": 0})
    worse = max(known, new, key=lambda figure: figure["largest"] / (figure["bound"] or 1))
    figures[name] = worse | {"cases": known["cases"] + new["cases"]}


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of several sessions on one machine as one; `seconds` is their sum."""
    first = records[0]
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        for test, found in record["figures"].items():
            for name, figure in found.items():
                _add(figures.setdefault(test, {}), name, figure)
    slowest = Counter({test: seconds for record in records for test, seconds in record["slowest_seconds"].items()})
    return first | {
        "sessions": len(records),
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "cases": {outcome: sum(record["cases"][outcome] for record in records) for outcome in first["cases"]},
        "failed": [test for record in records for test in record["failed"]],
        "figures": {test: figures[test] for test in sorted(figures)},
        "slowest_seconds": dict(slowest.most_common(15)),
    }


def environment() -> dict[str, Any]:
    """GPU, driver and versions of all that a result depends on."""
    packages = ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "numpy", "torch", "transformers")
    return {
        **gpu(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "nvrtc": ".".join(map(str, _nvrtc())),
        "tensorrt": _tensorrt(),
    }


def version(package: str) -> str | None:
    """Of an installed distribution; None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu() -> dict[str, Any]:
    """Name of device 0, compute capability, multiprocessors, and what CUDA the driver supports."""
    if device.compute_capability() is None:
        return {"gpu": None, "driver": None}
    from cuda.core import Device

    properties = Device(0).properties
    return {
        "gpu": Device(0).name,
        "compute_capability": ".".join(map(str, device.compute_capability() or ())),
        "multiprocessors": int(properties.multiprocessor_count),
        "driver": _driver(),
    }


def _driver() -> str:
    """Version of the kernel driver, where the system says it, and of the CUDA that it supports."""
    from cuda.bindings import driver

    cuda = int(device.check(driver.cuDriverGetVersion()))
    text = Path("/sys/module/nvidia/version")
    known = text.read_text().strip() if text.exists() else _nvml_driver()
    return f"{known or 'unknown'} (CUDA {cuda // 1000}.{cuda % 1000 // 10})"


def _nvml_driver() -> str | None:
    """From nvidia-smi."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() or None


def _nvrtc() -> tuple[int, int]:
    from qsa_plugin.jit import nvrtc_version

    return nvrtc_version()


def _tensorrt() -> str | None:
    from qsa_plugin import tensorrt
    from qsa_plugin.errors import QsaError

    try:
        module = tensorrt()
    except QsaError:
        return None
    return f"{module.__name__} {module.__version__}"


def summary(record: dict[str, Any]) -> str:
    """A results file as Markdown: where and when, how many, and every figure with its bound."""
    cases = record["cases"]
    tensorrt = record["tensorrt"] or "no TensorRT"
    sessions = (
        f" of {record['sessions']} sessions, most of them beside each other" if record.get("sessions", 1) > 1 else ""
    )
    not_run = f", {cases['not run']} did not run" if cases.get("not run") else ""
    lines = [
        f"{record['date']}, {record['gpu']}, driver {record['driver']}; Python {record['python']}, cuda-bindings "
        f"{record['cuda-bindings']}, NVRTC {record['nvrtc']}, torch {record['torch']}, transformers "
        f"{record['transformers']}, {tensorrt}.",
        "",
        f"{cases['passed']} cases passed, {cases['failed']} failed, {cases['skipped']} were skipped{not_run}, in "
        f"{record['seconds']:.0f} seconds{sessions}.",
        "",
        "| test | figure | largest | bound | cases | which |",
        "|---|---|---|---|---|---|",
    ]
    for test, figures in record["figures"].items():
        for name, figure in figures.items():
            bound = "" if figure["bound"] is None else f"{figure['bound']:g}"
            lines.append(
                f"| `{test.replace('.py::test_', ': ')}` | {name} | {figure['largest']:.3g} | {bound} | "
                f"{figure['cases']} | {figure['case']} |"
            )
    return "\n".join(lines)


def write_summary(results: Path, page: Path) -> None:
    """Replace what stands between the marks of `page`."""
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    text = summary(json.loads(results.read_text()))
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


if __name__ == "__main__":
    results_path, page_path, *parts = map(Path, sys.argv[1:])
    if parts:
        _write(results_path, merged([json.loads(part.read_text()) for part in parts]))
    write_summary(results_path, page_path)
