"""The paged pool: how a token's state is found in it, and well-formed pools and page tables.

A pool is `[2, N, P, Hkv, D+Id]`. Its two planes are addressed as one run of 2*N pages, because K page ids lie in
[0, N) and V page ids in [N, 2N). Token t of a sequence lies in page slot t // P, row t % P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qsa_plugin.contract import PAGE_SIZE, Geometry
from qsa_plugin.errors import InputError

Index = tuple[Any, ...]


@dataclass(frozen=True)
class SequencePages:
    """Where one sequence's tokens lie in a pool seen through `flat_pages`.

    The four methods take token positions `[n]` and return a NumPy index, good for reading and for assignment.
    """

    k_pages: NDArray[np.int64]  # [M]
    v_pages: NDArray[np.int64]  # [M]
    head_size: int

    @classmethod
    def of(cls, page_table: NDArray[Any], sequence: int, head_size: int) -> SequencePages:
        """The pages of one sequence of a table `[B, 2, M]`."""
        k_pages, v_pages = page_table[sequence].astype(np.int64)
        return cls(k_pages, v_pages, head_size)

    def in_range(self, length: int, num_pages: int) -> bool:
        """Whether every page that holds one of the first `length` tokens exists; entries past them are not read."""
        live = slice(pages_for(length))
        k_pages, v_pages = self.k_pages[live], self.v_pages[live]
        k_good = (k_pages >= 0) & (k_pages < num_pages)
        v_good = (v_pages >= num_pages) & (v_pages < 2 * num_pages)
        return bool(k_good.all() and v_good.all())

    def key(self, tokens: NDArray[Any]) -> Index:
        """Normed and roped keys, `[n, Hkv, D]`."""
        return (*_slot(self.k_pages, tokens), slice(None), slice(None, self.head_size))

    def value(self, tokens: NDArray[Any]) -> Index:
        """Raw values, `[n, Hkv, D]`."""
        return (*_slot(self.v_pages, tokens), slice(None), slice(None, self.head_size))

    def raw_index_key(self, tokens: NDArray[Any]) -> Index:
        """Raw indexer keys `[n, Id]`: the K plane's tail of head 0, live while the token's block is incomplete."""
        return (*_slot(self.k_pages, tokens), 0, slice(self.head_size, None))

    def block_key(self, first_tokens: NDArray[Any]) -> Index:
        """Pooled keys `[n, Id]` of the complete blocks that start at these tokens: the V plane's tail of head 0."""
        return (*_slot(self.v_pages, first_tokens), 0, slice(self.head_size, None))


def _slot(pages: NDArray[np.int64], tokens: NDArray[Any]) -> Index:
    return pages[tokens // PAGE_SIZE], tokens % PAGE_SIZE


def flat_pages(pool: NDArray[Any]) -> NDArray[Any]:
    """A pool `[2, N, P, Hkv, D+Id]` seen as `[2*N, P, Hkv, D+Id]`.

    Raises:
        ValueError: the pool is not C-contiguous, so that writes to a reshaped copy would be lost.
    """
    if not pool.flags.c_contiguous:
        raise ValueError("the pool is not C-contiguous")
    return pool.reshape(2 * pool.shape[1], *pool.shape[2:])


def pages_for(length: int) -> int:
    """Pages a plane that hold `length` tokens."""
    return math.ceil(length / PAGE_SIZE)


def empty_pool(geometry: Geometry, num_pages: int, dtype: DTypeLike, fill: float = 0.0) -> NDArray[Any]:
    """A pool `[2, num_pages, P, Hkv, D+Id]` that holds `fill` everywhere (NaN to find reads of stale state)."""
    shape = (2, num_pages, PAGE_SIZE, geometry.num_kv_heads, geometry.pool_width)
    return np.full(shape, fill, dtype)


def page_table(
    batch: int, pages_per_seq: int, num_pages: int, *, rng: np.random.Generator | None = None
) -> NDArray[np.int32]:
    """A page table int32 `[batch, 2, pages_per_seq]`; no page belongs to two sequences.

    Args:
        batch: sequences.
        pages_per_seq: page slots a sequence, M.
        num_pages: pages a plane, N.
        rng: shuffles the ids, those of K and of V independently; None hands them out in order.

    Raises:
        InputError: fewer pages than slots.
    """
    slots = batch * pages_per_seq
    if num_pages < slots:
        raise InputError(
            "num_pages",
            num_pages,
            f"at least {slots} ({batch} sequences of {pages_per_seq} pages)",
            "allocate more pages or lower the batch or the length",
        )
    table = np.empty((batch, 2, pages_per_seq), np.int32)
    for plane in (0, 1):
        ids = np.arange(num_pages) if rng is None else rng.permutation(num_pages)
        table[:, plane] = ids[:slots].reshape(batch, pages_per_seq) + plane * num_pages
    return table


def blank_dead_entries(table: NDArray[np.int32], lengths: NDArray[Any], value: int = -1) -> NDArray[np.int32]:
    """A copy of a page table `[B, 2, M]` whose entries past each sequence's length hold `value`."""
    blanked = table.copy()
    for sequence, length in enumerate(lengths):
        blanked[sequence, :, pages_for(max(int(length), 0)) :] = value
    return blanked
