"""The plugin's workspace: one table of named slots, each with the formula of its size.

TensorRT asks once for the size at a profile's maximum, and later runs every smaller shape in either mode inside it, so
every formula is monotone in every size of the call. No slot holds a term of S * S: scores are made in chunks of rows.
The content of the workspace is garbage when an enqueue starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .contract import Call, Geometry, Mode

#: Every slot starts at a multiple of this many bytes, which is also what the workspace itself must be aligned to.
ALIGNMENT = 256
#: Rows that prefill selects from at a time at most: 296 thread blocks of 32 rows.
SELECT_ROWS = 9472
#: Blocks that are scored before selection goes over them, a multiple of `BLOCK_TILE` (kernels/prefill_candidates.cuh).
SELECT_CHUNK = 2048
#: Rows a thread block of prefill selection has at most, and blocks that are scored together.
MAX_ROW_TILE, BLOCK_TILE = 32, 64
#: Neighbouring sparse rows at most whose blocks are attended to together (MEMBER_BITS of kernels/prefill.cuh).
MAX_UNION_ROWS = 10
#: Blocks that decode scores together, and one of whose scores stands for all at first (kernels/decode.cuh).
SCORE_TILE = 16
#: Rows of split-K partials: the tensor-core tile that holds up to 16 query heads of one KV head.
PARTIAL_ROWS = 16
#: Splits of decode attention that every batch may use.
DECODE_SPLITS = 8
#: Partial tiles that are reserved at least, so that small batches can use more splits than `DECODE_SPLITS`.
MIN_PARTIAL_TILES = 512


@dataclass(frozen=True)
class Slot:
    """One buffer: its name, the modes that use it, bytes an element, and its shape for one call."""

    name: str
    modes: tuple[Mode, ...]
    itemsize: int
    shape: Callable[[Geometry, Call], tuple[int, ...]]


def visible_blocks(geometry: Geometry, call: Call) -> int:
    """Complete blocks that a row of this call can see at most."""
    tokens = call.seq_len if call.mode is Mode.PREFILL else call.max_kv_len
    return tokens // geometry.indexer_compress_ratio


def sparse_rows(geometry: Geometry, call: Call) -> int:
    """Rows a sequence of a prefill call that may have more complete blocks than the budget: all from row W on."""
    return max(0, call.seq_len - geometry.list_width)


def union_elements(geometry: Geometry, call: Call) -> int:
    """Entries of the unions of a sequence's tiles (UNION_REGION of kernels/prefill.cuh), however many rows a tile has.

    A tile has at most one and a half lists of `budget_blocks + 1` entries a row, and padding; the last tile is whole.
    """
    rows = sparse_rows(geometry, call)
    return (rows + MAX_UNION_ROWS) * (math.ceil((geometry.budget_blocks + 1) * 1.5) + 64) if rows else 0


def score_elements(geometry: Geometry, call: Call) -> int:
    """fp32 scores kept at a time: all of decode's; in prefill chunks and candidates of some rows."""
    if call.mode is Mode.DECODE:
        return call.batch * score_stride(geometry, call)
    rows = call.batch * math.ceil(sparse_rows(geometry, call) / MAX_ROW_TILE) * MAX_ROW_TILE
    chunk, candidates = select_sizes(geometry, visible_blocks(geometry, call))
    return min(SELECT_ROWS, rows) * (chunk + 2 * candidates)


def select_sizes(geometry: Geometry, blocks: int) -> tuple[int, int]:
    """Blocks that are scored at a time, and candidates that are kept, for a prefill row of so many blocks.

    A row of one chunk needs no list of candidates; longer ones keep MAX_CANDIDATES of kernels/prefill_candidates.cuh
    and what a chunk adds.
    """
    chunk = min(SELECT_CHUNK, max(1, math.ceil(blocks / BLOCK_TILE)) * BLOCK_TILE)
    most = math.ceil(max(2 * geometry.budget_blocks, 1024) / 4) * 4  # lists start at 16-byte boundaries
    return chunk, most + chunk if blocks > chunk else 0


def score_stride(geometry: Geometry, call: Call) -> int:
    """Scores from one decode row to the next: rows start at 16-byte boundaries."""
    return math.ceil(visible_blocks(geometry, call) / 4) * 4


def maxima_stride(geometry: Geometry, call: Call) -> int:
    """Largest scores of `SCORE_TILE` blocks from one decode row to the next: rows start at 16-byte boundaries."""
    return math.ceil(score_stride(geometry, call) / (4 * SCORE_TILE)) * 4


def partial_tiles(geometry: Geometry, call: Call) -> int:
    """Split-K tiles of decode attention: batch * KV heads * splits."""
    return max(call.batch * geometry.num_kv_heads * DECODE_SPLITS, MIN_PARTIAL_TILES)


_BOTH = (Mode.PREFILL, Mode.DECODE)
_DECODE = (Mode.DECODE,)
_PREFILL = (Mode.PREFILL,)

SLOTS: tuple[Slot, ...] = (
    # normed and roped indexer queries, surface dtype; prefill keeps the main ones in its output, decode on the chip
    Slot("index_rows", _PREFILL, 2, lambda g, c: (c.batch, sparse_rows(g, c), g.indexer_n_heads, g.indexer_head_dim)),
    # fp32 block scores, and the largest of each group of them
    Slot("scores", _BOTH, 4, lambda g, c: (score_elements(g, c),)),
    Slot("maxima", _DECODE, 4, lambda g, c: (c.batch, maxima_stride(g, c))),
    # int32 real rows and past length of each sequence; selected block ids, ascending; union of a tile's block ids with
    # the rows that selected them, and how many there are
    Slot("rows", _PREFILL, 4, lambda g, c: (2, c.batch)),
    Slot("block_ids", _PREFILL, 4, lambda g, c: (c.batch, sparse_rows(g, c), g.budget_blocks)),
    Slot("union", _PREFILL, 4, lambda g, c: (c.batch, union_elements(g, c))),
    Slot("union_counts", _PREFILL, 4, lambda g, c: (c.batch, sparse_rows(g, c), 4)),
    # int32 length of a row, 0 where nothing is done; int32 ids of the listed blocks
    Slot("live", _DECODE, 4, lambda g, c: (c.batch,)),
    Slot("blocks", _DECODE, 4, lambda g, c: (c.batch, g.budget_blocks + 1)),
    # fp32 split-K partial outputs, their row maxima and sums, int32 arrival counters
    Slot("partials", _DECODE, 4, lambda g, c: (partial_tiles(g, c), PARTIAL_ROWS, g.head_size)),
    Slot("stats", _DECODE, 4, lambda g, c: (partial_tiles(g, c), 2, PARTIAL_ROWS)),
    Slot("counters", _DECODE, 4, lambda g, c: (c.batch, g.num_kv_heads)),
)


@dataclass(frozen=True)
class Layout:
    """Where the slots of one call lie: byte offsets by slot name, and the bytes of all of them."""

    offsets: Mapping[str, int]
    size: int


def layout(geometry: Geometry, call: Call) -> Layout:
    """The slots that one call uses, one after the other at multiples of `ALIGNMENT`."""
    offsets: dict[str, int] = {}
    end = 0
    for slot in SLOTS:
        if call.mode in slot.modes:
            offsets[slot.name] = end
            nbytes = math.prod(slot.shape(geometry, call)) * slot.itemsize
            end += math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
    return Layout(offsets, end)


def reported_size(geometry: Geometry, largest: Call) -> int:
    """Bytes that cover every call no larger than `largest` in any size, in both modes (its own mode is not read)."""
    prefill = replace(largest, mode=Mode.PREFILL)
    decode = replace(largest, mode=Mode.DECODE, seq_len=1)
    return max(layout(geometry, prefill).size, layout(geometry, decode).size)
