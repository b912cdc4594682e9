"""The stages of prefill, each callable on its own on raw device addresses and a raw stream handle.

Notation as in `contract`; K is budget/R, the blocks a row selects; T tokens of this call a sequence; `rows` is a range
of T from `row_begin` on. Every stage is one launch. Its grid depends on shapes alone; what is real lies on the device:

* `live` int32 `[B]`: real rows of each sequence, 0 for one that is inactive; `context_lengths` clipped to T will do.
* `past` int32 `[B]`: tokens in the pool before this call; address 0 means none anywhere.

Pool, page table and rope table are those of the contract; live page ids are not checked here, `plan` does that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from . import jit
from .contract import Geometry
from .launch import Launch, ParamBlock
from .launch import sm_count as _sm_count
from .prefill_tiles import AttnTile, attn_tile, score_tile
from .specialisation import Specialisation
from .workspace import BLOCK_TILE, SELECT_ROWS, select_sizes

_LOG2_E = math.log2(math.e)
_WARPS = 8  # of the kernels that give a warp one vector


class PrefillLaunchers:
    """The loaded stages of one specialisation. One object serves one thread at a time.

    Args:
        spec: what to compile for.
        geometry: gives the softmax scale and the epsilon.
        portable: leave out what only compute capability 9.0 has.

    Raises:
        FailedError: the kernels do not compile or load.
    """

    def __init__(self, spec: Specialisation, geometry: Geometry, portable: bool = False) -> None:
        self.geometry = geometry
        self.dense_tile, self.sparse_tile = attn_tile(spec, True, portable), attn_tile(spec, False, portable)
        self._scores = scores = score_tile(spec, portable)
        self._select_ctas = min(scores.ctas * _sm_count(), SELECT_ROWS // scores.rows)

        def load(
            name: str, entry: str, threads: int, defines: Mapping[str, int] | None = None, shared_bytes: int = 0
        ) -> Launch:
            (kernel,) = jit.kernels(name, spec, [f"qsa_{entry}"], defines)
            return Launch(kernel, threads, shared_bytes)

        def attention(tile: AttnTile) -> Launch:
            (kernel,) = jit.kernels(tile.kernel, spec, ["qsa_prefill_attn"], tile.defines)
            return Launch(kernel, tile.threads, tile.shared_bytes)

        self._plan = load("prefill_plan", "prefill_plan", 128), ParamBlock("5Q4i")
        self._write = load("prefill_write", "prefill_write", 7 * 32), ParamBlock("9Q3if")
        self._qprep_rows = load("prefill_qprep", "qprep_rows", _WARPS * 32), ParamBlock("6Q4if")
        self._block_pool = load("prefill_block_pool", "block_pool", _WARPS * 32), ParamBlock("7Q4if")
        self._score_rows_tc = (
            load("prefill_score", "score_rows_tc", scores.threads, scores.defines, scores.query_bytes),
            ParamBlock("6Q6i"),
        )
        self._score_rows = load("prefill_score", "score_rows", scores.threads, scores.defines), ParamBlock("6Q6i")
        self._select_tiles = (
            load("prefill_select", "select_tiles", scores.threads, scores.defines, scores.select_bytes),
            ParamBlock("7Q7i"),
        )
        self._select_rows = load("prefill_select", "select_rows", _WARPS * 32, scores.defines), ParamBlock("3Q2i")
        union_define = {name: self.sparse_tile.defines[name] for name in ("QSA_UNION_ROWS", "QSA_UNION_SPLIT")}
        self._union = load("prefill_union", "union", 128, union_define), ParamBlock("5Q4i")
        self._expand = load("prefill_gather", "expand", 128), ParamBlock("4Q4i")
        self._gather = load("prefill_gather", "gather", 128), ParamBlock("5Q4i")
        self._dense_attn = attention(self.dense_tile), ParamBlock("8Q5if")
        self._sparse_attn = attention(self.sparse_tile), ParamBlock("8Q5if")

    def plan(
        self,
        stream: int,
        *,
        context_lengths: int,
        page_table: int,
        past_lengths: int,
        live: int,
        past: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
        num_pages: int,
        max_kv_len: int,
    ) -> None:
        """`live` and `past` `[B]` from total lengths; an inactive sequence, or one with a bad live page id, gets 0."""
        launch, block = self._plan
        block.pack(context_lengths, page_table, past_lengths, live, past, seq_len, pages_per_seq, num_pages, max_kv_len)
        launch.grid(batch)
        launch(stream, block)

    def write(
        self,
        stream: int,
        *,
        qkv: int,
        pool: int,
        q_out: int,
        page_table: int,
        rope: int,
        q_gamma: int,
        k_gamma: int,
        live: int,
        past: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
    ) -> None:
        """Norm, RoPE and paged write; `q_out` surface `[B, T, Hq, D]` gets the roped queries, padding rows zeros."""
        launch, block = self._write
        g = self.geometry
        block.pack(
            *(qkv, pool, q_out, page_table, rope, q_gamma, k_gamma, live, past),
            *(batch, seq_len, pages_per_seq, g.rms_norm_eps),
        )
        launch.grid(batch * seq_len)
        launch(stream, block)

    def qprep_rows(
        self,
        stream: int,
        *,
        index_qk: int,
        out: int,
        rope: int,
        weight: int,
        live: int,
        past: int,
        batch: int,
        seq_len: int,
        row_begin: int,
        rows: int,
    ) -> None:
        """Indexer queries of a row range, normed and roped: `out` surface `[B, rows, Ih, Id]`; padding unwritten."""
        launch, block = self._qprep_rows
        g = self.geometry
        block.pack(index_qk, out, rope, weight, live, past, batch, seq_len, row_begin, rows, g.rms_norm_eps)
        launch.grid(math.ceil(batch * rows * g.indexer_n_heads / _WARPS))
        launch(stream, block)

    def block_pool(
        self,
        stream: int,
        *,
        index_qk: int,
        pool: int,
        page_table: int,
        rope: int,
        weight: int,
        live: int,
        past: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
    ) -> None:
        """Block keys of the blocks that the call completes, raw keys of the block left open, into the pool's tails."""
        launch, block = self._block_pool
        g = self.geometry
        blocks = math.ceil(seq_len / g.indexer_compress_ratio) + (past != 0)
        block.pack(
            *(index_qk, pool, page_table, rope, weight, live, past),
            *(batch, seq_len, pages_per_seq, blocks, g.rms_norm_eps),
        )
        launch.grid(math.ceil(batch * blocks / _WARPS))
        launch(stream, block)

    def score_rows_tc(
        self,
        stream: int,
        *,
        queries: int,
        pool: int,
        page_table: int,
        live: int,
        past: int,
        scores: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
        row_begin: int,
        rows: int,
        stride: int,
    ) -> None:
        """Scores fp32 `[B, rows, stride]` on tensor cores, -inf past each row's complete blocks and in padding rows.

        `queries` as `qprep_rows` stores them; `stride` a multiple of 64, at least the blocks of the longest row.
        """
        launch, block = self._score_rows_tc
        block.pack(
            *(queries, pool, page_table, live, past, scores, batch, seq_len, pages_per_seq, row_begin, rows, stride)
        )
        launch.grid(batch * math.ceil(rows / self._scores.rows))
        launch(stream, block)

    def score_rows(
        self,
        stream: int,
        *,
        queries: int,
        pool: int,
        page_table: int,
        live: int,
        past: int,
        scores: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
        row_begin: int,
        rows: int,
        stride: int,
    ) -> None:
        """As `score_rows_tc`, one thread a score: the last bits differ, for sums have another order."""
        launch, block = self._score_rows
        block.pack(
            *(queries, pool, page_table, live, past, scores, batch, seq_len, pages_per_seq, row_begin, rows, stride)
        )
        launch.grid(math.ceil(batch * rows * stride / self._scores.threads))
        launch(stream, block)

    def select_rows(self, stream: int, *, scores: int, counts: int, lists: int, rows: int, stride: int) -> None:
        """The K best blocks of rows of `scores` fp32 `[rows, stride]`: `lists` int32 `[rows, K]`, ascending, then -1.

        `counts` int32 `[rows]` says how many scores a row has; nothing past them is looked at. `stride` is a multiple
        of 4. Larger score first, then lower id; -0.0 equals +0.0; NaN is lowest.
        """
        launch, block = self._select_rows
        block.pack(scores, counts, lists, rows, stride)
        launch.grid(math.ceil(rows / _WARPS))
        launch(stream, block)

    def select_tiles(
        self,
        stream: int,
        *,
        queries: int,
        pool: int,
        page_table: int,
        live: int,
        past: int,
        scratch: int,
        lists: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
        row_begin: int,
        rows: int,
        blocks: int,
    ) -> None:
        """`score_rows_tc` and `select_rows` in one: `lists` int32 `[B, rows, K]`, written for sparse rows alone.

        `blocks` is at least the number that the longest row sees; `workspace.score_elements` bounds `scratch`, fp32.
        """
        launch, block = self._select_tiles
        chunk, candidates = select_sizes(self.geometry, blocks)
        block.pack(
            *(queries, pool, page_table, live, past, scratch, lists),
            *(batch, seq_len, pages_per_seq, row_begin, rows, chunk, candidates),
        )
        launch.grid(min(self._select_ctas, batch * math.ceil(rows / self._scores.rows)))
        launch(stream, block)

    def union(
        self,
        stream: int,
        *,
        lists: int,
        live: int,
        past: int,
        entries: int,
        counts: int,
        batch: int,
        seq_len: int,
        row_begin: int,
        rows: int,
    ) -> None:
        """Merge the lists of each tile of neighbouring sparse rows, and their causal tails.

        `entries` uint32 `[B, tiles, classes, region]` and `counts` int32 `[B, tiles, 4]` are laid out as in
        kernels/prefill.cuh; `workspace.union_elements` bounds the size of the former for a sequence.
        """
        launch, block = self._union
        tiles = math.ceil(rows / self.sparse_tile.rows)
        block.pack(lists, live, past, entries, counts, seq_len, row_begin, rows, tiles)
        launch.grid(batch * tiles)
        launch(stream, block)

    def expand(
        self,
        stream: int,
        *,
        lists: int,
        live: int,
        past: int,
        tokens: int,
        batch: int,
        seq_len: int,
        row_begin: int,
        rows: int,
    ) -> None:
        """Index lists of the contract's form: `tokens` int32 `[B, rows, W]`, selected tokens, causal tail, -1."""
        launch, block = self._expand
        block.pack(lists, live, past, tokens, batch, seq_len, row_begin, rows)
        launch.grid(batch * rows)
        launch(stream, block)

    def gather(
        self,
        stream: int,
        *,
        tokens: int,
        pool: int,
        page_table: int,
        keys: int,
        values: int,
        batch: int,
        rows: int,
        width: int,
        pages_per_seq: int,
    ) -> None:
        """K and V of token lists int32 `[B, rows, width]`: surface `[B, rows, width, Hkv, D]` each, zeros for -1."""
        launch, block = self._gather
        block.pack(tokens, pool, page_table, keys, values, batch, rows, width, pages_per_seq)
        launch.grid(math.ceil(batch * rows * width / 4))
        launch(stream, block)

    def prefill_attn(
        self,
        stream: int,
        *,
        q: int,
        pool: int,
        out: int,
        page_table: int,
        live: int,
        past: int,
        entries: int,
        counts: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
        row_begin: int,
        rows: int,
    ) -> None:
        """Attention of the sparse rows of a range over the lists that `union` merged.

        `q` and `out` surface `[B, T, Hq, D]`, which may be one buffer. Rows that are dense or padding stay unwritten.
        """
        tiles = math.ceil(rows / self.sparse_tile.rows)
        launch, block = self._sparse_attn
        block.pack(
            *(q, pool, out, page_table, live, past, entries, counts),
            *(seq_len, pages_per_seq, row_begin, rows, tiles, self.geometry.scale * _LOG2_E),
        )
        launch.grid(batch * tiles * self.geometry.num_kv_heads)
        launch(stream, block)

    def prefill_attn_dense(
        self,
        stream: int,
        *,
        q: int,
        pool: int,
        out: int,
        page_table: int,
        live: int,
        past: int,
        batch: int,
        seq_len: int,
        pages_per_seq: int,
    ) -> None:
        """Causal attention of the rows that see no more than the budget: t <= budget + R - 2. Others stay unwritten."""
        rows = min(seq_len, self.geometry.list_width)
        tiles = math.ceil(rows / self.dense_tile.rows)
        launch, block = self._dense_attn
        block.pack(
            *(q, pool, out, page_table, live, past, 0, 0),
            *(seq_len, pages_per_seq, 0, rows, tiles, self.geometry.scale * _LOG2_E),
        )
        launch.grid(batch * tiles * self.geometry.num_kv_heads)
        launch(stream, block)


def score_stride(blocks: int) -> int:
    """Scores from one row to the next: blocks rounded up to what an mma takes."""
    return max(1, math.ceil(blocks / BLOCK_TILE)) * BLOCK_TILE
