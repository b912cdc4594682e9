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
#: Scores of one chunk of prefill rows: small enough to be read back from L2 by the selection.
SCORE_CHUNK_BYTES = 64 << 20
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


def score_elements(geometry: Geometry, call: Call) -> int:
    """fp32 scores kept at a time: all of decode's; in prefill a chunk of rows, but never less than one row."""
    blocks = visible_blocks(geometry, call)
    everything = call.batch * call.seq_len * blocks
    return everything if call.mode is Mode.DECODE else max(min(everything, SCORE_CHUNK_BYTES // 4), blocks)


def partial_tiles(geometry: Geometry, call: Call) -> int:
    """Split-K tiles of decode attention: batch * KV heads * splits."""
    return max(call.batch * geometry.num_kv_heads * DECODE_SPLITS, MIN_PARTIAL_TILES)


_BOTH = (Mode.PREFILL, Mode.DECODE)
_DECODE = (Mode.DECODE,)

SLOTS: tuple[Slot, ...] = (
    # normed and roped queries, surface dtype
    Slot("query", _BOTH, 2, lambda g, c: (c.batch, c.seq_len, g.num_q_heads, g.head_size)),
    Slot("index_query", _BOTH, 2, lambda g, c: (c.batch, c.seq_len, g.indexer_n_heads, g.indexer_head_dim)),
    # fp32 block scores [rows of the chunk, visible blocks]
    Slot("scores", _BOTH, 4, lambda g, c: (score_elements(g, c),)),
    # int32 selected block ids, ascending
    Slot("block_ids", _BOTH, 4, lambda g, c: (c.batch, c.seq_len, min(g.budget_blocks, visible_blocks(g, c)))),
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
