"""Every stage as a launcher of its own, by the names that users of staged kernels know, on raw device addresses.

`block_pool`, `qprep`, `qprep_rows`, `score`, `score_rows`, `score_rows_tc`, `gather` and `prefill_attn`. Kernels
are loaded once, when a `StageLaunchers` is made; each method is one launch on the given stream handle.
"""

from __future__ import annotations

import math

from . import jit
from .contract import PAGE_SIZE, Geometry
from .decode_plan import LAYOUT, SCORE_BLOCKS_AN_SM, SCORE_STAGE, SCORE_WARPS
from .launch import Launch, ParamBlock, sm_count
from .prefill_launchers import PrefillLaunchers
from .specialisation import Specialisation
from .workspace import SCORE_TILE


class StageLaunchers(PrefillLaunchers):
    """The stages of prefill and the two that decode adds. One object serves one thread at a time.

    Args:
        spec: what to compile for.
        geometry: gives the softmax scale and the epsilon.
        portable: leave out what only compute capability 9.0 has.

    Raises:
        FailedError: the kernels do not compile or load.
    """

    def __init__(self, spec: Specialisation, geometry: Geometry, portable: bool = False) -> None:
        super().__init__(spec, geometry, portable)
        (kernel,) = jit.kernels("decode_score", spec, ["decode_score"], SCORE_STAGE)
        self._score = Launch(kernel, SCORE_WARPS * 32), ParamBlock(LAYOUT)
        self._score_blocks = SCORE_BLOCKS_AN_SM * sm_count()

    def qprep(
        self, stream: int, *, index_qk: int, out: int, rope: int, weight: int, live: int, past: int, batch: int
    ) -> None:
        """Indexer queries of one decode token a sequence, normed and roped.

        Args:
            stream: raw CUstream handle.
            index_qk: surface `[B, 1, (Ih+1)*Id]`.
            out: surface `[B, 1, Ih, Id]`.
            rope: fp32 `[1, maxPos, rotary]`.
            weight: surface `[Id]`, the raw norm weight.
            live: int32 `[B]`, 1 for a row that is computed, 0 for one that is not.
            past: int32 `[B]`, tokens before this one: the position.
            batch: B.
        """
        self.qprep_rows(
            stream,
            index_qk=index_qk,
            out=out,
            rope=rope,
            weight=weight,
            live=live,
            past=past,
            batch=batch,
            seq_len=1,
            row_begin=0,
            rows=1,
        )

    def score(
        self,
        stream: int,
        *,
        queries: int,
        pool: int,
        page_table: int,
        context_lengths: int,
        scores: int,
        batch: int,
        pages_per_seq: int,
        num_pages: int,
        stride: int,
    ) -> None:
        """Scores of one query a sequence against all its complete blocks; nothing is written past them.

        Args:
            stream: raw CUstream handle.
            queries: surface `[B, Ih, Id]`, as `qprep` stores them; at a multiple of 16.
            pool: surface `[2, N, P, Hkv, D+Id]`.
            page_table: int32 `[B, 2, M]`.
            context_lengths: int32 `[B]`, the query's token included; 0 or beyond the page table: nothing is written.
            scores: fp32 `[B, stride]`.
            batch: B.
            pages_per_seq: M.
            num_pages: N.
            stride: elements from one row of scores to the next, at least M * P / R.
        """
        launch, block = self._score
        tiles = math.ceil(pages_per_seq * PAGE_SIZE / self.geometry.indexer_compress_ratio / SCORE_TILE)
        blocks_a_row = max(1, min(self._score_blocks // batch, tiles))
        pointers = [0] * 19
        pointers[2], pointers[3], pointers[5], pointers[11] = pool, context_lengths, page_table, queries
        pointers[13] = scores
        max_positions = pages_per_seq * PAGE_SIZE
        block.pack(*pointers, pages_per_seq, num_pages, max_positions, stride, blocks_a_row, 1, 0.0, 0.0)
        launch.grid(batch * blocks_a_row)
        launch(stream, block)
