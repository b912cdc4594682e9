"""What is timed: the table of cases with their targets, at the geometry of Qwen3.8-Flash-Next."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from qsa_plugin.contract import PAGE_SIZE, Mode
from qsa_plugin.errors import InputError
from qsa_plugin.specialisation import SPECIALISATIONS

SPECIALISATION = SPECIALISATIONS["real-fp16"]
GEOMETRY, SURFACE = SPECIALISATION.geometry, SPECIALISATION.surface
ROTARY_DIMS, THETA = SPECIALISATION.rotary_dims, 1e7
#: Host time of a decode enqueue outside a graph, us.
HOST_TARGET_US = 25.0
#: The case whose enqueue is timed on the host.
HOST_CASE = "decode-b1-8192"


@dataclass(frozen=True)
class Case:
    """One enqueue, repeated.

    Attributes:
        mode: prefill or decode.
        batch: sequences.
        length: tokens of a prefill call (S), or of the context that decode attends to.
        target_us: what one enqueue may take on an H200, inputs hot; None where no target is stated.
        jaccard: overlap of neighbouring prefill rows' block sets; None: as it comes, from independent queries.
        scores: distribution of decode's block scores, one of `inputs.SCORES`.
        capacity: tokens that the page table, pool and rope table hold a sequence; 0: `length`.
        portable: without what only newer compute capabilities have.
        relative_to: the case whose time this one is compared with.
        quick: part of the short run.
    """

    mode: Mode
    batch: int
    length: int
    target_us: float | None = None
    jaccard: float | None = None
    scores: str = "normal"
    capacity: int = 0
    portable: bool = False
    relative_to: str | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique: `decode-b64-32768`, `prefill-8192-j0.9`, `decode-b1-8192-all-equal`."""
        parts = [self.mode.value]
        if self.mode is Mode.DECODE:
            parts.append(f"b{self.batch}")
        parts.append(str(self.length))
        if self.mode is Mode.PREFILL and self.length >= GEOMETRY.list_width:  # else no row is sparse
            parts.append("random" if self.jaccard is None else f"j{self.jaccard:g}")
        if self.scores != "normal":
            parts.append(self.scores.replace(" ", "-"))
        if self.capacity:
            parts.append(f"in-{self.capacity >> 20}M")
        if self.portable:
            parts.append("portable")
        return "-".join(parts)

    @property
    def pages_a_sequence(self) -> int:
        """Slots of the page table."""
        return -(-max(self.length, self.capacity) // PAGE_SIZE)


def _decode(batch: int, length: int, target_us: float | None, quick: bool = False) -> Case:
    return Case(Mode.DECODE, batch, length, target_us, quick=quick)


def _prefill(length: int, jaccard: float | None, target_us: float | None, quick: bool = False) -> Case:
    return Case(Mode.PREFILL, 1, length, target_us, jaccard, quick=quick)


def _scores(length: int, kind: str, quick: bool = False) -> Case:
    return Case(Mode.DECODE, 1, length, scores=kind, relative_to=f"decode-b1-{length}", quick=quick)


_KINDS = ("concentrated", "all equal", "five values", "400 high")

CASES: tuple[Case, ...] = (
    _decode(1, 2048, 9, quick=True),
    _decode(1, 8192, 11, quick=True),
    _decode(1, 32768, 12),
    _decode(1, 131072, 15, quick=True),
    _decode(16, 8192, 34),
    _decode(16, 32768, 38),
    _decode(16, 131072, 65),
    _decode(64, 8192, 80),
    _decode(64, 32768, 108, quick=True),
    _decode(64, 131072, 205),
    Case(Mode.DECODE, 1, 8192, capacity=1 << 20, relative_to="decode-b1-8192", quick=True),
    *(_scores(length, kind, quick=length == 8192) for length in (8192, 32768, 131072) for kind in _KINDS),
    _prefill(2048, None, 200, quick=True),
    _prefill(8192, 0.9, 1300, quick=True),
    _prefill(8192, 0.8, 1600),
    _prefill(8192, 0.5, None),
    _prefill(8192, None, 2800),
    _prefill(32768, 0.95, None),
    _prefill(32768, 0.9, 5500, quick=True),
    _prefill(32768, None, 15000),
    _prefill(131072, 0.9, 26000),
    Case(Mode.DECODE, 1, 8192, portable=True, relative_to="decode-b1-8192"),
    Case(Mode.DECODE, 64, 32768, portable=True, relative_to="decode-b64-32768"),
    Case(Mode.PREFILL, 1, 8192, jaccard=0.9, portable=True, relative_to="prefill-8192-j0.9"),
)


def select(patterns: Sequence[str], quick: bool, cases: Sequence[Case] = CASES) -> list[Case]:
    """The cases whose name matches a pattern (`decode-b1-*`), in table order; without patterns all, or the quick ones.

    Raises:
        InputError: a pattern matches no case.
    """
    if not patterns:
        return [case for case in cases if case.quick or not quick]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise InputError("option --cases", pattern, f"a pattern that matches one of {names}", "correct the pattern")
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
