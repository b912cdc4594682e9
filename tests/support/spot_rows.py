"""The reference for single rows of calls that are too large for the whole of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry
from qsa_trt import reference
from qsa_trt.paging import SequencePages, flat_pages
from tests.support.node import BANDS, Inputs, epsilon

Array = NDArray[Any]


class SpotRows:
    """Rows of one call, each computed by the functions of `qsa_trt.reference` from a pool that is right already.

    Args:
        geometry: the node's attributes.
        inputs: the call's inputs.
        pool: the pool that the call left, `[2, N, P, Hkv, D+Id]`.
    """

    def __init__(self, geometry: Geometry, inputs: Inputs, pool: Array) -> None:
        self.geometry, self.inputs, self.pool = geometry, inputs, pool
        self._arithmetic = reference.Arithmetic(np.dtype(np.float32), np.dtype(inputs["qkv"].dtype))
        self._layer = reference._layer(inputs, geometry, self._arithmetic)

    def tokens(self, b: int, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> reference.Tokens:
        """Norm and RoPE of some rows of the call, which stand at these positions."""
        return reference.prepare(self._layer, self.inputs["qkv"][b, rows], self.inputs["index_qk"][b, rows], positions)

    def write(self, b: int, row: int, position: int) -> None:
        """Add one token to the pool, as decode does."""
        pages = SequencePages.of(self.inputs["kv_page_table"], b, self.geometry.head_size)
        reference.write_pool(self._layer, self.pool, pages, self.tokens(b, np.array([row]), np.array([position])))

    def pool_ulps(self, b: int, positions: NDArray[np.int64]) -> float:
        """How far keys, values and block keys of a prefill's tokens at multiples of R are from the reference."""
        g, flat = self.geometry, flat_pages(self.pool)
        pages, tokens = (
            SequencePages.of(self.inputs["kv_page_table"], b, g.head_size),
            self.tokens(b, positions, positions),
        )
        in_block = positions[:, None] + np.arange(g.indexer_compress_ratio)  # [n, R]
        raw = self._arithmetic.h(self.inputs["index_qk"][b, in_block.ravel(), -g.indexer_head_dim :])
        raw = raw.reshape(*in_block.shape, g.indexer_head_dim)
        keys = reference.pooled_block_keys(self._layer, raw, positions)
        pairs = [
            (pages.key(positions), tokens.k),
            (pages.value(positions), tokens.v),
            (pages.block_key(positions), keys),
        ]
        worst = 0.0
        for where, expected in pairs:
            difference = np.abs(flat[where].astype(np.float64) - expected.astype(np.float64)).max(-1)
            worst = max(worst, float((difference / np.abs(expected).max(-1)).max()))
        return worst / epsilon(self.pool.dtype)

    def scores(self, b: int, row: int, position: int) -> Array:
        """Scores `[G]` of one row against its complete blocks."""
        g = self.geometry
        pages = SequencePages.of(self.inputs["kv_page_table"], b, g.head_size)
        first_tokens = np.arange((position + 1) // g.indexer_compress_ratio) * g.indexer_compress_ratio
        block_keys = flat_pages(self.pool)[pages.block_key(first_tokens)].astype(np.float32)
        tokens = self.tokens(b, np.array([row]), np.array([position]))
        return reference.block_scores(tokens.index_q, block_keys)[0]

    def output_ulps(self, b: int, row: int, position: int, chosen: NDArray[Any], output: Array) -> float:
        """How far one row's output is from attention over the blocks it chose; asserts that they are the best ones.

        Args:
            b: sequence.
            row: row of the call.
            position: its token.
            chosen: complete blocks that the device selected, ascending.
            output: `[Hq, D]`.
        """
        g, flat = self.geometry, flat_pages(self.pool)
        ratio, visible = g.indexer_compress_ratio, (position + 1) // g.indexer_compress_ratio
        pages = SequencePages.of(self.inputs["kv_page_table"], b, g.head_size)
        tokens = self.tokens(b, np.array([row]), np.array([position]))
        self._assert_best(self.scores(b, row, position), chosen)
        listed = (chosen[:, None] * ratio + np.arange(ratio)).ravel()
        listed = np.concatenate([listed, np.arange(visible * ratio, position + 1)])
        keys, values = (flat[where(listed)].astype(np.float32).swapaxes(0, 1) for where in (pages.key, pages.value))
        expected = reference.attend(tokens.q[0], keys, values, g.scale).astype(np.float64)
        difference = np.abs(output.astype(np.float64) - expected).max(-1) / np.abs(expected).max(-1)
        return float(difference.max()) / epsilon(output.dtype)

    def _assert_best(self, scores: Array, chosen: NDArray[Any]) -> None:
        """Distinct, in range, as many as there must be; no block beyond the tie band is missing or extra."""
        count = min(self.geometry.budget_blocks, scores.size)
        assert chosen.size == count
        assert (np.diff(chosen) > 0).all()
        if count == 0:
            return
        assert chosen[0] >= 0
        assert chosen[-1] < scores.size
        kth = np.partition(scores, -count)[-count]
        margin = BANDS["float16" if self.pool.dtype == np.float16 else "bfloat16"] * scores.max()
        left_out = np.delete(scores, chosen)
        assert (scores[chosen] >= kth - margin).all(), "a block far below the k-th was selected"
        assert (left_out <= kth + margin).all(), "a block far above the k-th was left out"
