"""The record of a run: a JSON file and its tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qsa_plugin.errors import InputError
from qsa_trt.new_file import new_file

from .cases import HOST_CASE, HOST_TARGET_US
from .host import HostTime
from .timing import Sample

#: Raised when a field changes its meaning.
SCHEMA = 1
Json = Mapping[str, Any]


@dataclass(frozen=True)
class CaseResult:
    """What was measured of one case. Times are us of one enqueue.

    Attributes:
        name: `Case.name`.
        mode: prefill or decode.
        batch: sequences.
        length: S of prefill, context of decode.
        target_us: for `hot`, on an H200; None where none is stated.
        relative_to: the case to compare with.
        jaccard_target: overlap of neighbouring rows that the inputs were made for.
        jaccard: the overlap of the lists that the kernels left; None where the workspace has none.
        bytes: least traffic with device memory (`counts`).
        flops: least floating-point operations.
        floor_us: the longer of the two at this run's roofs.
        workspace_bytes: that the plugin asked for.
        hot: with inputs in L2 where they fit.
        cold: with L2 full of something else.
        stages_us: what each kernel adds.
        dense: cuDNN's dense attention over the same tokens; norm, RoPE and cache write not included.
        notes: what was not measured, and why.
        skipped: why nothing was.
    """

    name: str
    mode: str
    batch: int
    length: int
    target_us: float | None
    relative_to: str | None
    jaccard_target: float | None
    bytes: int
    flops: int
    floor_us: float
    workspace_bytes: int
    jaccard: float | None = None
    hot: Sample | None = None
    cold: Sample | None = None
    stages_us: Mapping[str, float] = field(default_factory=dict)
    dense: Sample | None = None
    notes: Sequence[str] = ()
    skipped: str | None = None

    def line(self) -> str:
        """The times in one line, for the progress of a long run."""
        if self.hot is None:
            return f"{self.name}: skipped: {self.skipped}"
        others = {"cold": self.cold, "dense": self.dense}
        times = [f"{name} {_us(sample.us)}" for name, sample in others.items() if sample]
        return f"{self.name}: {', '.join([f'{_us(self.hot.us)} us', *times, stage_line(self.stages_us)])}"


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        date: of its start, ISO 8601 in UTC.
        gpu: name, compute capability, multiprocessors, L2 bytes.
        versions: of driver and packages.
        settings: steps a graph, and how often what was repeated.
        roofs: `copy_tb_s` (read plus write) and `fp16_tflop_s`, None without PyTorch.
        cases: in table order.
        host: of one decode enqueue; None where its case was not selected.
        seconds: of the whole run.
    """

    date: str
    gpu: Json
    versions: Mapping[str, str]
    settings: Json
    roofs: Mapping[str, float | None]
    cases: Sequence[CaseResult]
    host: HostTime | None
    seconds: float
    schema: int = SCHEMA

    def write(self, path: str | Path) -> None:
        """As JSON, all or nothing."""
        with new_file(Path(path)) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
            temporary.replace(path)

    def summary(self) -> str:
        """The tables."""
        return tables(asdict(self))


def read_record(path: str | Path) -> Json:
    """A record as `Record.write` left it.

    Raises:
        InputError: no such file, or no record of this version.
    """
    expected, fix = f"a record of qsa-trt bench, schema {SCHEMA}", "make one: qsa-trt bench --json FILE"
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError("FILE", f"{path} ({error.strerror})", expected, fix) from error
    except ValueError as error:
        raise InputError("FILE", f"{path} (no JSON)", expected, fix) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError("FILE", path, expected, fix)
    return record


def tables(record: Json) -> str:
    """The record for people: cases against targets, floors and dense attention, then stages and host time."""
    gpu, roofs = record["gpu"], record["roofs"]
    rate = roofs["fp16_tflop_s"]
    head = (
        f"{gpu['name']}, {record['date']}, {record['seconds']:.0f} s; roofs: copy {roofs['copy_tb_s']:.2f} TB/s, "
        + (f"fp16 product {rate:.0f} TFLOP/s" if rate else "no fp16 product (PyTorch with CUDA is not installed)")
    )
    parts = [head, "", _case_table(record["cases"], roofs), "", _stage_table(record["cases"])]
    if record["host"]:
        parts += ["", _host_line(record["host"])]
    notes = [f"{case['name']}: {note}" for case in record["cases"] for note in _remarks(case)]
    return "\n".join(parts + (["", *notes] if notes else []))


def _case_table(cases: Sequence[Json], roofs: Mapping[str, float | None]) -> str:
    by_name = {case["name"]: case for case in cases}
    rows = [["us", "target", "hot", "low..high", "cold", "floor", "hot/floor", "TB/s", "TFLOP/s", "dense", "J"]]
    for case in cases:
        hot = case["hot"]
        if hot is None:
            rows.append([case["name"], *["-"] * 10])
            continue
        us = hot["us"]
        rows.append(
            [
                case["name"],
                _target(case, by_name),
                _us(us),
                f"{_us(hot['low_us'])}..{_us(hot['high_us'])}",
                _us(case["cold"] and case["cold"]["us"]),
                _us(case["floor_us"]),
                f"{us / case['floor_us']:.2f}",
                _of_roof(case["bytes"] / us / 1e6, roofs["copy_tb_s"], 2),
                _of_roof(case["flops"] / us / 1e6, roofs["fp16_tflop_s"], 0),
                _us(case["dense"] and case["dense"]["us"]),
                "" if case["jaccard"] is None else f"{case['jaccard']:.3f}",
            ]
        )
    return aligned(rows)


def _target(case: Json, by_name: Mapping[str, Json]) -> str:
    """The target and whether it is met, or the ratio to another case."""
    us, base = case["hot"]["us"], by_name.get(case["relative_to"] or "")
    if case["target_us"] is not None:
        return f"{_us(case['target_us'])} {'met' if us <= case['target_us'] else 'MISSED'}"
    return f"{us / base['hot']['us']:.2f} x" if base and base["hot"] else ""


def _stage_table(cases: Sequence[Json]) -> str:
    rows = [["what each kernel adds, us"]]
    rows += [[case["name"], stage_line(case["stages_us"])] for case in cases if case["stages_us"]]
    return "\n".join("  ".join(row) for row in rows)


def stage_line(stages: Mapping[str, float]) -> str:
    """What each kernel adds, in order."""
    return "  ".join(f"{name} {_us(us)}" for name, us in stages.items())


def _host_line(host: Json) -> str:
    parts = ", ".join(f"{name} {us:.1f}" for name, us in host["parts"].items())
    verdict = "met" if host["us"] <= HOST_TARGET_US else "MISSED"
    return (
        f"host, {HOST_CASE} outside a graph: {host['us']:.1f} us ({host['low_us']:.1f}..{host['high_us']:.1f}), "
        f"target {HOST_TARGET_US:g} {verdict}; {parts}"
    )


def _remarks(case: Json) -> list[str]:
    return [*case["notes"], *([f"skipped: {case['skipped']}"] if case["skipped"] else [])]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def _of_roof(value: float, roof: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + (f" ({value / roof:.0%})" if roof else "")


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Lines of columns: the first to the left, the others to the right."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
