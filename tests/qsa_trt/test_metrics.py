"""The one error metric, index sets and tie bands."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qsa_trt.metrics import BF16_TIE_BAND, FP16_TIE_BAND, cosine, row_error, same_index_sets, tie_rows


def test_row_error_is_relative_to_the_rows_own_largest_value():
    expected = np.array([[1.0, -2.0], [100.0, 50.0]])
    actual = np.array([[1.5, -2.0], [100.0, 49.0]])
    assert row_error(actual, expected).tolist() == [0.25, 0.01]


def test_row_error_over_more_than_one_dim():
    expected = np.array([[[1.0, 1.0], [4.0, 4.0]]])
    assert row_error(expected + 0.5, expected).tolist() == [[0.5, 0.125]]
    assert row_error(expected + 0.5, expected, row_dims=2).tolist() == [0.125]


def test_row_error_of_rows_that_must_be_zero():
    assert row_error(np.zeros((1, 3)), np.zeros((1, 3))) == 0
    assert row_error(np.array([[0, 1e-30, 0]]), np.zeros((1, 3))) == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_row_error_never_passes_what_is_not_finite(bad: float):
    row, spoiled = np.ones((1, 2)), np.array([[1, bad]])
    assert row_error(spoiled, row) == row_error(row, spoiled) == row_error(spoiled, spoiled) == np.inf


def test_row_error_refuses_to_broadcast():
    with pytest.raises(ValueError, match="shapes differ"):
        row_error(np.zeros((2, 1)), np.zeros((2, 2)))


def test_row_error_takes_half_precision_without_overflow():
    assert row_error(np.array([[-60000]], np.float16), np.array([[60000]], np.float16)) == pytest.approx(2, rel=1e-3)


def test_cosine():
    assert cosine(np.array([1, 0]), np.array([1, 1])) == pytest.approx(math.sqrt(0.5))
    assert cosine(np.zeros(2), np.zeros(2)) == 1
    assert math.isnan(cosine(np.zeros(2), np.ones(2)))


def test_same_index_sets_ignores_order_and_empty_entries():
    a = np.array([[3, 1, -1, -1], [3, 1, 2, -1], [-1, -1, -1, -1], [1, 1, -1, -1]])
    b = np.array([[1, 3, -1], [1, 3, -1], [-7, -1, -1], [1, -1, -1]])
    assert same_index_sets(a, b).tolist() == [True, False, True, False]
    assert same_index_sets(b, a).tolist() == [True, False, True, False]


def test_tie_rows_finds_rows_whose_selection_rounding_may_flip():
    scores = np.array(
        [
            [100, 50, 49.95, 1],  # 0.05 apart, under the band of 0.098
            [100, 50, 49.0, 1],
            [100, 50, 50, 1],
            [100, 50, -np.inf, -np.inf],  # nothing left out
            [100, np.nan, 50, 49.95],  # NaN ranks lowest
            [0, 0, 0, 0],
            [-np.inf] * 4,
        ]
    )
    assert tie_rows(scores, 2, FP16_TIE_BAND).tolist() == [True, False, True, False, True, True, False]
    assert tie_rows(scores, 2, 0).tolist() == [False, False, True, False, False, True, False]
    assert tie_rows(scores[:, :2], 2, FP16_TIE_BAND).tolist() == [False] * 7


def test_bands_are_the_epsilons_of_the_dtypes():
    assert pytest.approx(np.finfo(np.float16).eps, rel=5e-3) == FP16_TIE_BAND
    assert pytest.approx(2.0**-7, rel=5e-3) == BF16_TIE_BAND
