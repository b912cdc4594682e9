"""Neighbouring rows that select overlapping blocks: raw indexer queries whose rows are correlated.

A row's queries are those of the row before times a correlation, plus fresh noise (a stationary first-order process), so
scores move from row to row as they do in text, and the real indexer finds the overlap. RoPE would turn even equal raw
queries apart, so the process runs on the roped side and the raw query is rotated back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import Call, Geometry
from qsa_plugin.workspace import layout, sparse_rows, visible_blocks
from qsa_trt.reference import rotate

Array = NDArray[Any]
#: Row lengths and bisection steps of the calibration: J within about 0.01.
_SAMPLES, _STEPS = 24, 14
#: Pairs of rows that a measurement looks at.
_PAIRS = 200


def jaccard(a: Array, b: Array) -> float:
    """|a and b| / |a or b| of two lists without repetitions."""
    common = np.intersect1d(a, b, assume_unique=True).size
    return common / (a.size + b.size - common)


def measured_jaccard(geometry: Geometry, call: Call, read: Callable[[int, int], Array]) -> float | None:
    """Mean overlap of neighbouring rows' lists that a prefill call left in its workspace.

    Args:
        geometry: the node's attributes.
        call: the call's sizes.
        read: `(offset, count)` to that many int32 of the workspace, from a byte offset on.

    Returns:
        None where no row is sparse, or the workspace holds no lists of block ids.
    """
    budget, rows = geometry.budget_blocks, sparse_rows(geometry, call)
    offset = layout(geometry, call).offsets.get("block_ids")
    if offset is None or rows < 2:
        return None
    overlaps = []
    for row in np.unique(np.linspace(0, rows - 2, _PAIRS).astype(int)):
        lists = read(offset + 4 * budget * int(row), 2 * budget).reshape(2, budget)
        if lists.min() < 0 or lists.max() >= visible_blocks(geometry, call) or (np.diff(lists) <= 0).any():
            return None  # not what this slot used to hold
        overlaps.append(jaccard(*lists))
    return float(np.mean(overlaps))


def expected_jaccard(geometry: Geometry, seq_len: int, correlation: float) -> float:
    """Mean overlap of neighbouring sparse rows of a prompt, by simulation.

    The products of a query head with independent block keys are normal; those of the next row correlate with them as
    the queries do. A row's score is the sum over heads of their positive parts.
    """
    budget, fresh = geometry.budget_blocks, np.float32(np.sqrt(1 - correlation**2))
    overlaps = []
    for now, noise in _simulated_products(geometry, seq_len):
        then = np.float32(correlation) * now + fresh * noise
        first, second = (np.argpartition(-np.maximum(x, 0).sum(0), budget)[:budget] for x in (now, then))
        overlaps.append(jaccard(first, second))
    return float(np.mean(overlaps))


@functools.lru_cache(maxsize=1)
def _simulated_products(geometry: Geometry, seq_len: int) -> list[Array]:
    """Products of a row, and noise for the next, `[2, Ih, visible blocks]`, of rows spread over the sparse part."""
    rng = np.random.default_rng(0)
    first, last = geometry.budget_blocks + 1, seq_len // geometry.indexer_compress_ratio
    visible = first + (np.arange(_SAMPLES) + 0.5) / _SAMPLES * (last - first)
    return [rng.standard_normal((2, geometry.indexer_n_heads, int(n)), np.float32) for n in visible]


def correlation_for(geometry: Geometry, seq_len: int, target: float) -> float:
    """The correlation whose expected overlap is `target`; 0 where independent rows overlap more than that."""
    low, high = 0.0, np.pi / 2  # angle between the queries of neighbours: the overlap falls as it grows
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if expected_jaccard(geometry, seq_len, float(np.cos(middle))) > target:
            low = middle
        else:
            high = middle
    return float(np.cos(low)) if low > 0 and high < np.pi / 2 else 0.0


def correlated_rows(rng: np.random.Generator, rows: int, width: int, correlation: float) -> Array:
    """Stationary first-order process, fp32 `[rows, width]`, of unit variance."""
    x = rng.standard_normal((rows, width), np.float32)
    if correlation:
        x[1:] *= np.float32(np.sqrt(1 - correlation**2))
        carried = np.empty(width, np.float32)
        for row in range(1, rows):
            np.multiply(x[row - 1], np.float32(correlation), out=carried)
            x[row] += carried
    return x


def raw_index_rows(rng: np.random.Generator, geometry: Geometry, rope: Array, rows: int, correlation: float) -> Array:
    """Input `index_qk` of one prompt, fp16 `[rows, (Ih+1)*Id]`: correlated queries, independent keys.

    Norm and RoPE leave the correlation as it is if the two norm weights of every rotated pair are equal
    (`pairwise_equal`).

    Args:
        rng: the source of randomness.
        geometry: the node's attributes.
        rope: fp32 `[1, maxPos, rotary]`.
        rows: tokens, from position 0.
        correlation: of a row's queries with those of the row before.
    """
    heads, dim = geometry.indexer_n_heads, geometry.indexer_head_dim
    cos, sin = np.split(rope[0, :rows, None], 2, axis=-1)  # [rows, 1, rotary/2]
    result = np.empty((rows, (heads + 1) * dim), np.float16)
    queries = correlated_rows(rng, rows, heads * dim, correlation).reshape(rows, heads, dim)
    result[:, : heads * dim] = rotate(queries, cos, -sin).reshape(rows, -1)
    result[:, heads * dim :] = rng.standard_normal((rows, dim), np.float32)
    return result


def pairwise_equal(weight: Array, rotary_dims: int) -> Array:
    """A norm weight whose two entries of every rotated pair are equal, so that norm and rotation commute."""
    half = rotary_dims // 2
    return np.concatenate([weight[:half], weight[:half], weight[rotary_dims:]])
