"""Inputs whose block scores are known exactly, so that the selected blocks are, ties included.

Every indexer head of the query is one vector with two equal elements at two dims that RoPE leaves alone; a block key
holds a and b there and zeros elsewhere. With a = 1 and b a multiple of 2**-20 the score is a + b times a constant, and
every product and sum is exact in fp32, in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry
from qsa_trt.paging import SequencePages, flat_pages
from tests.support.node import Inputs

Float64 = NDArray[np.float64]
_TINY = 2.0**-20


def set_scores(inputs: Inputs, geometry: Geometry, row: int, scores: Float64) -> None:
    """Make the complete blocks `[G]` of a decode row score in proportion to `scores`, with all of their order.

    Args:
        inputs: a decode call; the indexer's norm weights become zero for all rows.
        geometry: the node's attributes.
        row: which sequence.
        scores: `[G]`, each `x` or `x + j * 2**-20` with fp16 `x` and integer 0 <= j < 2048; NaN makes the key NaN;
            negative ones end as zero.
    """
    first, second = geometry.indexer_head_dim - 2, geometry.indexer_head_dim - 1
    inputs["indexer_q_norm_gamma"][:] = 0
    query = inputs["index_qk"][row, 0].reshape(-1, geometry.indexer_head_dim)
    query[:-1] = 0
    query[:-1, [first, second]] = 1
    pages = SequencePages.of(inputs["kv_page_table"], row, geometry.head_size)
    keys = np.zeros((scores.size, geometry.indexer_head_dim), np.float64)
    keys[:, first] = scores.astype(np.float16)
    coarse = keys[:, first] > scores  # fp16 rounded up: the rest must not be negative
    keys[coarse, first] = np.nextafter(keys[coarse, first].astype(np.float16), np.float16(-np.inf))
    keys[:, second] = scores - keys[:, first]
    keys = keys.astype(inputs["past_key_value"].dtype)
    where = pages.block_key(np.arange(scores.size) * geometry.indexer_compress_ratio)
    flat_pages(inputs["past_key_value"])[where] = keys


def distributions(n: int) -> dict[str, Float64]:
    """Scores `[n]` that others' selection kernels got wrong, by name."""
    rng = np.random.default_rng(n)
    steps = rng.integers(0, 2048, n) * _TINY
    return {
        "normal": np.abs(rng.standard_normal(n)).astype(np.float16).astype(np.float64),
        "tiny steps": 1 + steps,
        "one coarse bin": 1 + (steps + rng.integers(0, 2, n) * 2.0**-10),
        "all equal": np.full(n, 1.5),
        "all negative": -1 - rng.random(n).astype(np.float16).astype(np.float64),
        "400 high, 150 tied": permuted(rng, n, 400, 150),
        "NaN": np.where(rng.random(n) < 0.2, np.nan, 1 + steps),
        "nearly all NaN": np.where(rng.permutation(n) < 100, 1 + steps, np.nan),
        "ascending": np.minimum(np.arange(n) // 8, 60000) / 64.0,
    }


def permuted(rng: np.random.Generator, n: int, high: int, tied: int) -> Float64:
    """`high` blocks score 2, `tied` 1, the others 0.5, in random places."""
    place = rng.permutation(n)
    return np.where(place < high, 2.0, np.where(place < high + tied, 1.0, 0.5))


def best(scores: Float64, count: int) -> NDArray[np.int64]:
    """The selected blocks by definition, ascending: larger first, then lower id; negative is zero, NaN is last."""
    clipped = np.where(scores < 0, 0.0, scores)
    return np.sort(np.argsort(-clipped, kind="stable")[:count])
