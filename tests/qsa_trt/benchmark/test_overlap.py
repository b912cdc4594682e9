"""Overlap of neighbouring rows: the measure, the calibration, and that the real indexer finds what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import Call, Geometry, Mode
from qsa_plugin.workspace import layout
from qsa_trt import reference
from qsa_trt.benchmark.cases import GEOMETRY, ROTARY_DIMS
from qsa_trt.benchmark.overlap import (
    correlated_rows,
    correlation_for,
    expected_jaccard,
    jaccard,
    measured_jaccard,
    pairwise_equal,
    raw_index_rows,
)
from qsa_trt.rope import default_inv_freq, rope_table

SMALL = Geometry(4, 2, 8, 2, 4, 8, 4)


def test_jaccard() -> None:
    assert jaccard(np.array([1, 2, 3]), np.array([2, 3, 4])) == 0.5
    assert jaccard(np.array([1, 2]), np.array([3, 4])) == 0
    assert jaccard(np.array([1, 2]), np.array([2, 1])) == 1


def test_independent_rows_overlap_as_chance_has_it() -> None:
    """k of n blocks twice by chance: J = k / (2n - k), averaged over the rows' n from k + 1 to S / R."""
    n = np.arange(513, 8192 // 4 + 1)
    assert expected_jaccard(GEOMETRY, 8192, 0.0) == pytest.approx(np.mean(512 / (2 * n - 512)), abs=0.01)
    assert expected_jaccard(GEOMETRY, 8192, 1.0) == 1


@pytest.mark.parametrize("target", [0.5, 0.8, 0.9, 0.95])
def test_calibration(target: float) -> None:
    correlation = correlation_for(GEOMETRY, 8192, target)
    assert 0 < correlation < 1
    assert expected_jaccard(GEOMETRY, 8192, correlation) == pytest.approx(target, abs=0.003)


def test_no_correlation_where_chance_overlaps_more() -> None:
    assert correlation_for(GEOMETRY, 4096, 0.3) == 0


def test_correlated_rows_are_stationary() -> None:
    x = correlated_rows(np.random.default_rng(0), 3000, 64, 0.9)
    assert x.std() == pytest.approx(1, abs=0.02)
    assert np.mean(x[1:] * x[:-1]) == pytest.approx(0.9, abs=0.02)
    assert np.mean(x[3:] * x[:-3]) == pytest.approx(0.9**3, abs=0.04)


@pytest.mark.parametrize("target", [0.9, 0.5])
def test_the_indexer_finds_the_overlap_that_was_asked_for(target: float) -> None:
    """Steps 2 to 5 of the reference on the inputs of a prompt; 60 pairs of 512 ids leave a deviation under 0.01."""
    rng, length, g = np.random.default_rng(1), 8192, GEOMETRY
    rope = rope_table(length, default_inv_freq(ROTARY_DIMS, 1e7))
    rows = raw_index_rows(rng, g, rope, length, correlation_for(g, length, target))
    weight = 1 + pairwise_equal(rng.standard_normal(g.indexer_head_dim).astype(np.float32) / 4, ROTARY_DIMS)
    cos, sin = np.split(rope[0], 2, axis=-1)
    heads = rows.astype(np.float32).reshape(length, -1, g.indexer_head_dim)
    queries = reference.rotate(reference.rms_norm(heads[:, :-1], 1e-6) * weight, cos[:, None], sin[:, None])
    means = heads[:, -1].reshape(-1, g.indexer_compress_ratio, g.indexer_head_dim).mean(1)
    keys = reference.rotate(reference.rms_norm(means, 1e-6), cos[::4], sin[::4])

    def selected(row: int) -> np.ndarray:
        scores = np.maximum(queries[row] @ keys[: (row + 1) // 4].T, 0).sum(0)
        return np.argsort(-scores, kind="stable")[: g.budget_blocks]

    pairs = np.linspace(g.list_width, length - 2, 62).astype(int)[1:-1]
    assert np.mean([jaccard(selected(t), selected(t + 1)) for t in pairs]) == pytest.approx(target, abs=0.03)


def test_measured_in_the_workspace() -> None:
    call = Call(Mode.PREFILL, 1, 15, 1, 1, 128, 4)  # rows 11 to 14 are sparse, 3 blocks
    lists = np.array([[0, 1], [0, 1], [1, 2], [0, 2]], np.int32)
    offset = layout(SMALL, call).offsets["block_ids"]

    def read(start: int, count: int) -> np.ndarray:
        return lists.ravel()[(start - offset) // 4 :][:count]

    assert measured_jaccard(SMALL, call, read) == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)
    lists[2, 1] = 3  # no such block: the slot holds something else
    assert measured_jaccard(SMALL, call, read) is None
    assert measured_jaccard(SMALL, Call(Mode.PREFILL, 1, 8, 1, 1, 128, 4), read) is None
    assert measured_jaccard(SMALL, Call(Mode.DECODE, 1, 1, 1, 1, 128, 4), read) is None
