"""Prefill rows that see several chunks of blocks: candidates are kept where scores are made, and lists stay exact."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.prefill_launchers import score_stride
from qsa_plugin.workspace import MAX_ROW_TILE, SELECT_CHUNK, select_sizes
from qsa_trt import device
from qsa_trt.reference import select_blocks
from tests.gpu.test_prefill_launchers import launchers
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu
LENGTHS = (4 * SELECT_CHUNK + 1234, SELECT_CHUNK + 100)  # blocks; samples of a chunk and of half of one
ROWS = 40  # a tile and a part of one


def sampled_blocks(blocks: int) -> NDArray[np.int64]:
    """The blocks of the sample of a tile whose first row sees so many (kernels/prefill_candidates.cuh)."""
    size = SELECT_CHUNK if blocks > 8192 else SELECT_CHUNK // 2
    return np.arange(size) * ((blocks << 16) // size) >> 16


def values(kind: str, rng: np.random.Generator, n: int, sampled: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number a block, which its score grows with."""
    place = np.arange(n)
    return {
        "normal": lambda: 2 + rng.standard_normal(n) / 2,
        "ascending": lambda: place / n + 0.5,  # every chunk beats all before it
        "descending": lambda: 1.5 - place / n,
        "all equal": lambda: np.ones(n),
        "all zero": lambda: np.zeros(n),
        "five values": lambda: rng.integers(2, 7, n) / 4,
        "ties that grow": lambda: 1 + place // SELECT_CHUNK / 8,  # each chunk one value, larger than those before
        "400 high, the rest tied": lambda: np.where(rng.permutation(n) < 400, 2.0, 1.0),
        "best in the third chunk": lambda: np.where(abs(place - 2.5 * SELECT_CHUNK) < 300, 3, 1) + rng.random(n) / 8,
        "mostly NaN": lambda: np.where(rng.random(n) < 0.96, np.nan, rng.random(n)),
        "tiny": lambda: rng.integers(1, 40, n) * 2.0**-24,  # the smallest steps of fp16
        "some infinite": lambda: np.where(rng.random(n) < 0.02, np.inf, rng.random(n)),
        "the sample promises too much": lambda: np.where(np.isin(place, sampled), 2, 1) + rng.random(n) / 8,
        "the sample promises too little": lambda: np.where(np.isin(place, sampled), 1, 2) + rng.random(n) / 8,
    }[kind]()


KINDS = ("normal", "ascending", "descending", "all equal", "all zero", "five values", "ties that grow",
         "400 high, the rest tied", "best in the third chunk", "mostly NaN", "tiny", "some infinite",
         "the sample promises too much", "the sample promises too little")  # fmt: skip


@pytest.mark.pitfall(2)
@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("name", ["real-fp16", "budget-odd-blocks"])
@pytest.mark.parametrize("blocks", LENGTHS)
def test_exact_in_every_distribution(blocks: int, name: str, portable: bool) -> None:
    stages = launchers(name, portable)
    g, rng = stages.geometry, np.random.default_rng(7)
    ratio, budget, dim = g.indexer_compress_ratio, g.budget_blocks, g.indexer_head_dim
    tokens = blocks * ratio
    pages = -(-tokens // PAGE_SIZE)
    pool = np.zeros((2 * pages, PAGE_SIZE, g.num_kv_heads, g.pool_width), np.float16)
    order = rng.permutation(pages)
    table = device.Buffer.of(np.stack([order, order + pages]).astype(np.int32)[None])
    queries = device.Buffer.of(np.ones((ROWS, g.indexer_n_heads, dim), np.float16))
    live = device.Buffer.of(np.array([tokens], np.int32))
    row_begin = tokens - ROWS
    visible = (row_begin + np.arange(ROWS) + 1) // ratio
    stride = score_stride(blocks)
    chunk, candidates = select_sizes(g, blocks)
    assert candidates > 0, "rows of one chunk"
    scores = device.Buffer(ROWS * stride * 4)
    scratch = device.Buffer(2 * MAX_ROW_TILE * (chunk + 2 * candidates) * 4)
    scratch.write(np.full(2 * MAX_ROW_TILE * (chunk + 2 * candidates), 0xA5A5A5A5, np.uint32))
    lists, held, stream = device.Buffer(ROWS * budget * 4), device.Buffer(pool.nbytes), device.Stream()
    common = {"queries": queries.address, "pool": held.address, "page_table": table.address, "live": live.address,
              "past": 0, "batch": 1, "seq_len": tokens, "pages_per_seq": pages, "row_begin": row_begin,
              "rows": ROWS}  # fmt: skip
    sampled = sampled_blocks(int(visible[0]))
    keys = pool[pages:, ::ratio, 0, g.head_size :]  # of the V plane: [pages, blocks a page, dim]
    for kind in KINDS:
        number = np.resize(values(kind, rng, blocks, sampled), pages * keys.shape[1]).reshape(pages, -1)
        with np.errstate(invalid="ignore"):
            keys[order] = number[..., None].astype(np.float16)
        held.write(pool)
        device.synchronize()
        stages.score_rows_tc(stream.handle, scores=scores.address, stride=stride, **common)
        stages.select_tiles(stream.handle, scratch=scratch.address, lists=lists.address, blocks=blocks, **common)
        stream.synchronize()
        assert lists.intact() and scratch.intact()
        chosen, score = lists.read((ROWS, budget), np.int32), scores.read((ROWS, stride), np.float32)
        for r in range(ROWS):
            expected = np.sort(select_blocks(score[r, : visible[r]], budget))
            assert np.array_equal(chosen[r], expected), (kind, r)
