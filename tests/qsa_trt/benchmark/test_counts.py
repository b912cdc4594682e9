"""Least bytes and operations, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import Geometry, Mode
from qsa_trt.benchmark.cases import GEOMETRY, Case
from qsa_trt.benchmark.counts import Work, listed_tokens, scored_blocks, work_of

#: 4 query heads, 2 KV heads of 8; indexer 2 x 4; 2 blocks of 4 tokens.
SMALL = Geometry(4, 2, 8, 2, 4, 8, 4)


def test_listed_tokens_and_scored_blocks() -> None:
    positions = np.array([0, 3, 6, 10, 11, 13])
    # complete blocks 0 1 1 2 3 3, tails 1 0 3 3 0 2
    assert list(listed_tokens(SMALL, positions)) == [1, 4, 7, 11, 8, 10]
    assert list(scored_blocks(SMALL, positions)) == [0, 0, 0, 0, 3, 3]


def test_decode_by_hand() -> None:
    # one token: qkv (4 + 2*2) * 8 = 64, index (2 + 1) * 4 = 12, output 32, its K and V 32, its indexer state 4
    # list: 2 blocks and 2 tokens of tail = 10 tokens of 2 * 16; 3 block keys of 4
    elements = 64 + 12 + 32 + 32 + 4 + 10 * 32 + 3 * 4
    # 4 heads * 8 * 10 tokens, twice, 2 operations each; 2 indexer heads * 4 * 3 blocks, 2 operations each
    assert work_of(Case(Mode.DECODE, 5, 14), SMALL) == Work(5 * 2 * elements, 5 * (4 * 4 * 8 * 10 + 2 * 2 * 4 * 3))


def test_prefill_by_hand() -> None:
    # 14 rows of qkv, index, output, K and V; 3 block keys. Lists: 1 + 2 + ... + 11, then 8, 9, 10. Scored: 3 rows of 3
    elements = 14 * (64 + 12 + 32 + 32) + 3 * 4
    listed, scored = 66 + 8 + 9 + 10, 9
    assert work_of(Case(Mode.PREFILL, 2, 14), SMALL) == Work(
        2 * 2 * elements, 2 * (4 * 4 * 8 * listed + 2 * 2 * 4 * scored)
    )


def test_the_design_s_round_numbers() -> None:
    """4.2 MB a decode row, 64 B a context token for scoring, 137 GFLOP of scoring and 412 a 8192 rows of attention."""
    row = work_of(Case(Mode.DECODE, 1, 2048), GEOMETRY).bytes
    assert row == pytest.approx(4.2e6, rel=0.01)
    assert work_of(Case(Mode.DECODE, 1, 131072), GEOMETRY).bytes - row == 64 * 131072
    whole = [work_of(Case(Mode.PREFILL, 1, length), GEOMETRY).flops for length in (32768, 24576)]
    scoring = [4 * 128 * 2 * (length**2 / 8) for length in (32768, 24576)]
    assert scoring[0] == pytest.approx(137e9, rel=0.01)
    assert whole[0] - whole[1] - (scoring[0] - scoring[1]) == pytest.approx(412e9, rel=0.01)


def test_the_floor_is_the_longer_of_the_two() -> None:
    work = Work(bytes=4_000_000, flops=2_000_000_000)
    assert work.floor_us(4.0, 100.0) == pytest.approx(20)  # 1 us of bytes, 20 us of operations
    assert work.floor_us(0.1, 100.0) == pytest.approx(40)
    assert work.floor_us(4.0, None) == pytest.approx(1)
