"""Two records of `qsa-trt bench`, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsa_plugin.errors import InputError

from .record import Json, aligned, read_record

#: Ratio over 1 that two runs of one version reach without a reason.
NOISE = 0.05
#: The host's times vary more, with what else its processor does.
_HOST_NOISE = 4
_HOST = "host"


@dataclass(frozen=True)
class Comparison:
    """Times of both records.

    Attributes:
        times: name of a case and state (`decode-b1-8192 hot`) to (before, after) in us.
        only_in_one: what just one record holds.
        noise: slowdown that passes; four times as much on the host.
        warning: why the two may not be comparable; empty where they are.
    """

    times: Mapping[str, tuple[float, float]]
    only_in_one: tuple[str, ...]
    noise: float
    warning: str = ""

    @property
    def slower(self) -> list[str]:
        """Names whose time grew by more than the noise."""
        return [name for name, (before, after) in self.times.items() if after > before * (1 + self._bound(name))]

    @property
    def passed(self) -> bool:
        """Whether nothing became slower."""
        return not self.slower

    def _bound(self, name: str) -> float:
        return self.noise * (_HOST_NOISE if name == _HOST else 1)

    def summary(self) -> str:
        """The ratios after / before; the last line is PASSED or FAILED."""
        slower = set(self.slower)
        rows = [["us", "before", "after", "ratio", ""]]
        for name, (before, after) in self.times.items():
            verdict = "SLOWER" if name in slower else "faster" if after < before * (1 - self._bound(name)) else ""
            rows.append([name, f"{before:.1f}", f"{after:.1f}", f"{after / before:.3f}", verdict])
        lines = [self.warning] if self.warning else []
        lines.append(aligned(rows))
        if self.only_in_one:
            lines.append("only in one of the two: " + ", ".join(self.only_in_one))
        lines.append(f"slower by more than {self.noise:.0%}: {len(slower)} of {len(self.times)}")
        return "\n".join([*lines, "PASSED" if self.passed else "FAILED"])


def compare_records(before: str | Path, after: str | Path, noise: float = NOISE) -> Comparison:
    """Compare two records.

    Args:
        before: file of the older record.
        after: file of the newer one.
        noise: slowdown that passes, 0.05 for 5 %.

    Raises:
        InputError: a file that is no record, a negative noise, or records without a case in common.
    """
    if not 0 <= noise < 1:
        raise InputError("option --noise", noise, "a fraction from 0 to 1", "give 0.05 for 5 %")
    records = [read_record(path) for path in (before, after)]
    old, new = (_times(record) for record in records)
    common = [name for name in old if name in new]
    if not common:
        raise InputError("FILE", after, f"a record with a case of {before}", "compare runs of the same --cases")
    one = tuple(name for name in [*old, *new] if (name in old) != (name in new))
    gpus = [record["gpu"]["name"] for record in records]
    warning = "" if gpus[0] == gpus[1] else f"warning: two kinds of GPU, {gpus[0]} and {gpus[1]}"
    return Comparison({name: (old[name], new[name]) for name in common}, one, noise, warning)


def _times(record: Json) -> dict[str, float]:
    """Every time of our own: cases hot and cold, and what a tenth of the host's enqueues stay under."""
    times = {f"{case['name']} {state}": case[state]["us"]
             for case in record["cases"] for state in ("hot", "cold") if case[state]}  # fmt: skip
    return times | ({_HOST: record["host"]["low_us"]} if record["host"] else {})
