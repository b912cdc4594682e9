"""Kind 21: the workspace reported at a profile's maximum holds every smaller call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsa_plugin import Geometry, Mode
from qsa_plugin.contract import PAGE_SIZE, Call
from qsa_plugin.workspace import (
    ALIGNMENT,
    DECODE_SPLITS,
    PARTIAL_ROWS,
    SELECT_CHUNK,
    SLOTS,
    layout,
    reported_size,
    select_sizes,
)

REAL = Geometry(24, 2, 256, 4, 128, 2048, 4)


def call(mode: Mode, batch: int, seq_len: int, pages_per_seq: int, max_positions: int | None = None) -> Call:
    positions = pages_per_seq * PAGE_SIZE if max_positions is None else max_positions
    return Call(mode, batch, seq_len, batch * pages_per_seq, pages_per_seq, positions, 64)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kv_heads = draw(st.integers(1, 8))
    ratio = draw(st.sampled_from((2, 4, 8)))
    return Geometry(
        num_q_heads=kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from((32, 64, 128, 256))),
        indexer_n_heads=draw(st.integers(1, 8)),
        indexer_head_dim=draw(st.sampled_from((32, 64, 128))),
        indexer_budget=ratio * draw(st.integers(1, 8192 // ratio)),
        indexer_compress_ratio=ratio,
    )


@st.composite
def smaller_and_largest(draw: st.DrawFn) -> tuple[Call, Call]:
    """Any legal call and any profile maximum around it."""
    mode = draw(st.sampled_from(Mode))
    pages = draw(st.integers(1, 8192))
    positions = draw(st.integers(1, pages * PAGE_SIZE + 1000))
    seq_len = 1 if mode is Mode.DECODE else draw(st.integers(1, min(pages * PAGE_SIZE, positions)))
    smaller = call(mode, draw(st.integers(1, 128)), seq_len, pages, positions)
    largest = replace(
        smaller,
        mode=Mode.PREFILL,
        batch=smaller.batch + draw(st.integers(0, 64)),
        seq_len=seq_len + draw(st.integers(0, 100_000)),
        pages_per_seq=pages + draw(st.integers(0, 4096)),
        max_positions=positions + draw(st.integers(0, 1_000_000)),
    )
    return smaller, largest


@pytest.mark.pitfall(21)
@given(geometries(), smaller_and_largest())
def test_kind_21_reported_covers_every_smaller_call(geometry: Geometry, calls: tuple[Call, Call]) -> None:
    smaller, largest = calls
    assert layout(geometry, smaller).size <= reported_size(geometry, largest)


@given(geometries(), smaller_and_largest())
def test_slots_are_aligned_apart_and_inside(geometry: Geometry, calls: tuple[Call, Call]) -> None:
    for one in calls:
        found = layout(geometry, one)
        used = [slot for slot in SLOTS if one.mode in slot.modes]
        assert list(found.offsets) == [slot.name for slot in used]
        ends = [*list(found.offsets.values())[1:], found.size]
        for slot, end in zip(used, ends, strict=True):
            nbytes = slot.itemsize
            for dim in slot.shape(geometry, one):
                nbytes *= dim
            assert found.offsets[slot.name] % ALIGNMENT == 0
            assert found.offsets[slot.name] + nbytes <= end


@pytest.mark.pitfall(21)
@given(geometries(), st.integers(1, 64), st.integers(16_384, 1 << 20))
def test_kind_21_no_term_grows_with_the_square_of_the_prompt(geometry: Geometry, batch: int, seq_len: int) -> None:
    """The step from 2S to 3S tokens needs no more than the step from S to 2S, but for rounding.

    From 16,384 tokens on every list is full and every chunk at its cap, so nothing but a square could grow faster. The
    smallest square, 4 bytes for each of S*S/8 scores, would differ by 256 MiB and more; rounding up to tiles of rows
    and blocks stays below 16 MiB.
    """
    once, twice, thrice = (layout(geometry, call(Mode.PREFILL, batch, n * seq_len, 1 << 20)).size for n in (1, 2, 3))
    assert thrice - twice <= twice - once + (16 << 20)


def test_the_real_model_at_32k_stays_under_one_gib() -> None:
    assert reported_size(REAL, call(Mode.PREFILL, 1, 32_768, 256)) <= 1 << 30


@pytest.mark.parametrize("batch", [1, 3, 64, 500])
def test_decode_slots_hold_the_documented_buffers(batch: int) -> None:
    """fp32 partials [B*Hkv*splits, 16, D], stats [B*Hkv*splits, 2, 16] and int32 counters [B*Hkv], at 8 splits."""
    shapes = {slot.name: slot.shape(REAL, call(Mode.DECODE, batch, 1, 64)) for slot in SLOTS}
    tiles = batch * REAL.num_kv_heads * DECODE_SPLITS
    assert DECODE_SPLITS == 8
    assert PARTIAL_ROWS == 16
    assert shapes["partials"][0] >= tiles
    assert shapes["partials"][1:] == (16, 256)
    assert shapes["stats"][0] >= tiles
    assert shapes["stats"][1:] == (2, 16)
    assert shapes["counters"] == (batch, 2)


@pytest.mark.parametrize("blocks", [9, 512, 513, 515, 4096])
def test_lists_of_candidates_are_read_four_at_a_time(blocks: int) -> None:
    """Room for twice the budget and a chunk, in whole vectors; none where one chunk is the row."""
    geometry = replace(REAL, indexer_budget=blocks * REAL.indexer_compress_ratio)
    chunk, candidates = select_sizes(geometry, SELECT_CHUNK + 1)
    assert candidates % 4 == 0 and candidates >= max(2 * blocks, 1024) + chunk
    assert select_sizes(geometry, SELECT_CHUNK) == (SELECT_CHUNK, 0)
