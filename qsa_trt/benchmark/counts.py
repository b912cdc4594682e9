"""The least work of a call: bytes that must move through device memory once, and floating-point operations.

Bytes count projections, the output, what is written to the pool, the selected keys and values, and the block keys that
are scored. Prefill reads back what it has just written; that may stay on chip and does not count. Rope and page tables
and norm weights, below 2 % together, do not count either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry, Mode

from .cases import Case

_SURFACE_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Least bytes and operations of one call."""

    bytes: int
    flops: int

    def floor_us(self, copy_tb_s: float, fp16_tflop_s: float | None) -> float:
        """The longer of the two at the given roofs, in us."""
        moved = self.bytes / copy_tb_s / 1e6
        return max(moved, self.flops / fp16_tflop_s / 1e6) if fp16_tflop_s else moved


def work_of(case: Case, geometry: Geometry) -> Work:
    """The least work of one call of `case`."""
    positions = np.arange(case.length) if case.mode is Mode.PREFILL else np.array([case.length - 1])
    g, tokens = geometry, positions.size
    listed, scored = int(listed_tokens(g, positions).sum()), int(scored_blocks(g, positions).sum())
    vector = g.num_kv_heads * g.head_size  # of K or V, of one token
    elements = tokens * (g.qkv_width + g.index_width + g.num_q_heads * g.head_size)
    elements += tokens * 2 * vector
    if case.mode is Mode.PREFILL:
        elements += tokens // g.indexer_compress_ratio * g.indexer_head_dim
    else:
        elements += g.indexer_head_dim + 2 * vector * listed + g.indexer_head_dim * scored
    # a product of m x k and k x n is 2 m k n
    attention = 2 * 2 * g.num_q_heads * g.head_size * listed
    scoring = 2 * g.indexer_n_heads * g.indexer_head_dim * scored
    return Work(case.batch * elements * _SURFACE_BYTES, case.batch * (attention + scoring))


def listed_tokens(geometry: Geometry, positions: NDArray[Any]) -> NDArray[np.int64]:
    """Tokens that rows at these positions attend to: their best blocks and the causal tail."""
    ratio = geometry.indexer_compress_ratio
    blocks = (positions + 1) // ratio
    return np.asarray(np.minimum(blocks, geometry.budget_blocks) * ratio + (positions + 1) % ratio, np.int64)


def scored_blocks(geometry: Geometry, positions: NDArray[Any]) -> NDArray[np.int64]:
    """Blocks that must be scored: all complete ones, none where all are selected anyway."""
    blocks = (positions + 1) // geometry.indexer_compress_ratio
    return np.asarray(np.where(blocks > geometry.budget_blocks, blocks, 0), np.int64)
