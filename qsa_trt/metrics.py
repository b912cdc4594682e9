"""How results are compared: one error metric, index sets, and the rows whose selection rounding may flip."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Scores are sums of products of values that were rounded to the surface dtype, so two right roundings of one score
#: differ by about the dtype's epsilon (2**-10 for fp16, 2**-7 for bf16) times the row's largest score: within that
#: distance of the k-th score the order of two blocks is not determined.
FP16_TIE_BAND = 9.8e-4
BF16_TIE_BAND = 7.8e-3


def row_error(actual: NDArray[Any], expected: NDArray[Any], *, row_dims: int = 1) -> NDArray[np.float64]:
    """Largest |actual - expected| of each row over the row's largest |expected|.

    Args:
        actual: `[..., n]`.
        expected: the same shape.
        row_dims: how many trailing dims make a row. 1 takes each head of an attention output by itself (the
            stricter reading), 2 each token.

    Returns:
        float64 with the leading dims. A row that is expected to be all zeros has error 0 where it is exactly that,
        else inf; a row that holds NaN or inf on either side has error inf.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    axes = tuple(range(-row_dims, 0))
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(a).all(axes) & np.isfinite(e).all(axes)
    with np.errstate(invalid="ignore"):
        worst = np.abs(a - e).max(axes, initial=0.0)
    largest = np.abs(e).max(axes, initial=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(worst == 0, 0.0, worst / largest)
    return np.where(finite, error, np.inf)


def cosine(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Cosine of the angle between two arrays taken as vectors; 1.0 when both are zero, NaN when one is."""
    a, e = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(e))
    if lengths == 0:
        return 1.0 if not a.any() and not e.any() else float("nan")
    return float(a @ e) / lengths


def same_index_sets(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Whether rows of two index lists hold the same ids, in any order.

    Args:
        a: `[..., Wa]`; negative entries are empty.
        b: `[..., Wb]`.

    Returns:
        bool with the leading dims. An id that stands twice on one side only is a difference.
    """
    width = max(a.shape[-1], b.shape[-1])
    return np.asarray((_sorted_ids(a, width) == _sorted_ids(b, width)).all(-1))


def _sorted_ids(lists: NDArray[Any], width: int) -> NDArray[Any]:
    padded = np.full((*lists.shape[:-1], width), -1, np.int64)
    padded[..., : lists.shape[-1]] = np.maximum(lists, -1)
    return np.sort(padded, axis=-1)


def tie_rows(scores: NDArray[Any], k: int, band: float) -> NDArray[np.bool_]:
    """Rows whose k-th and next best score lie within `band` times the row's largest score.

    Args:
        scores: `[rows, blocks]`; -inf past a row's visible blocks, NaN ranks lowest.
        k: blocks selected a row.
        band: relative distance, `FP16_TIE_BAND` or `BF16_TIE_BAND`; 0 finds exact ties.

    Returns:
        bool `[rows]`; False where at most k blocks have a score, since nothing is left out there.
    """
    if scores.shape[-1] <= k:
        return np.zeros(scores.shape[:-1], bool)
    ranked = -np.sort(-np.where(np.isnan(scores), -np.inf, scores).astype(np.float64), axis=-1)
    kth, following = ranked[..., k - 1], ranked[..., k]
    with np.errstate(invalid="ignore"):
        return np.asarray(np.isfinite(following) & (kth - following <= band * ranked[..., 0]))
