"""Tile sizes of the prefill kernels that come in several forms, and the form that a target gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .specialisation import Specialisation, shared_limit
from .workspace import MAX_UNION_ROWS

_TOKENS = 64  # that attention takes a step


@dataclass(frozen=True)
class AttnTile:
    """One variant of the attention kernel.

    Attributes:
        kernel: its file, prefill_attn or prefill_attn_hopper.
        rows: rows of one sequence that a thread block computes for one KV head.
        threads: of a thread block.
        shared_bytes: its dynamic shared memory, the `Shared` struct of the file.
        defines: the tile sizes as macros.
    """

    kernel: str
    rows: int
    threads: int
    shared_bytes: int
    defines: Mapping[str, int]


def attn_tile(spec: Specialisation, dense: bool, portable: bool = False) -> AttnTile:
    """The variant for a target.

    Args:
        spec: the specialisation.
        dense: for rows that see no more than the budget.
        portable: not the one with instructions of compute capability 9.0.
    """
    group = spec.geometry.group_size
    # few heads a row fill little of a warpgroup's 64 operand rows
    if spec.hopper and not portable and spec.head_size >= 64 and group >= 8:
        return _hopper_tile(spec, dense, 64 // group if dense else min(64 // group, MAX_UNION_ROWS // 2))
    roomy = shared_limit(spec.compute_capability) >= 160 * 1024
    union = min(8, 64 // group)
    warps = (8 if roomy else 4) if dense else math.ceil(union * group / 16)
    ctas = 2 if roomy and not dense else 1
    return AttnTile(
        kernel="prefill_attn",
        rows=warps * 16 // group if dense else union,
        threads=warps * 32,
        shared_bytes=(warps * 16 + 2 * _TOKENS) * spec.head_size * 2 + 2 * 3 * 4 * _TOKENS,
        defines={
            "QSA_DENSE": int(dense),
            "QSA_WARPS": warps,
            "QSA_NT": _TOKENS,
            "QSA_CTAS": ctas,
            "QSA_UNION_ROWS": union,
            "QSA_UNION_SPLIT": 0,
        },
    )


def _hopper_tile(spec: Specialisation, dense: bool, rows_a_group: int) -> AttnTile:
    # the union's halves are those of the two warpgroups; the dense variant has none, its rows only need to be legal
    union = 2 * min(rows_a_group, MAX_UNION_ROWS // 2)
    defines = {
        "QSA_DENSE": int(dense),
        "QSA_ROWS_A_GROUP": rows_a_group,
        "QSA_UNION_ROWS": union,
        "QSA_UNION_SPLIT": 1,
    }
    return AttnTile(
        kernel="prefill_attn_hopper",
        rows=2 * rows_a_group,
        threads=384,
        shared_bytes=(2 * 64 + 4 * _TOKENS) * spec.head_size * 2 + 8 * 8,
        defines=defines,
    )


@dataclass(frozen=True)
class ScoreTile:
    """One form of the kernels that score on tensor cores.

    Attributes:
        rows: rows of one sequence that a thread block works on.
        threads: of a thread block.
        ctas: thread blocks of selection on a multiprocessor.
        query_bytes: of dynamic shared memory for the queries of the rows.
        defines: which form.
    """

    rows: int
    threads: int
    ctas: int
    query_bytes: int
    defines: Mapping[str, int]

    @property
    def select_bytes(self) -> int:
        """Dynamic shared memory of selection: queries, and a histogram of 1024 words a warp."""
        return self.query_bytes + self.threads // 32 * 4096


def score_tile(spec: Specialisation, portable: bool = False) -> ScoreTile:
    """The form for a target; `portable`: not the one with instructions of compute capability 9.0."""
    heads, dim = spec.indexer_n_heads, spec.indexer_head_dim
    if spec.hopper and not portable:
        slabs, pairs = math.ceil(dim / 64), math.ceil(heads / 2)
        threads, ctas = (384, 1) if heads > 4 else (256, 2)
        return ScoreTile(32, threads, ctas, slabs * pairs * 8192, {"QSA_SCORE_HOPPER": 1})
    padding = 32 if heads * dim % 64 == 0 else 0
    return ScoreTile(16, 192, 1 if heads > 4 else 2, 16 * (heads * dim + padding) * 2, {"QSA_SCORE_HOPPER": 0})
