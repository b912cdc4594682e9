"""The paged pool: addresses, page tables."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.errors import InputError
from qsa_trt.paging import SequencePages, blank_dead_entries, empty_pool, flat_pages, page_table, pages_for
from tests.support.cases import SMALL


def test_empty_pool_has_the_contract_shape_and_fill():
    pool = empty_pool(SMALL, 3, np.float16, np.nan)
    assert pool.shape == (2, 3, PAGE_SIZE, SMALL.num_kv_heads, SMALL.head_size + SMALL.indexer_head_dim)
    assert pool.dtype == np.float16
    assert np.isnan(pool).all()
    assert not empty_pool(SMALL, 3, np.float32).any()


def test_flat_pages_is_a_view_and_refuses_to_copy():
    pool = empty_pool(SMALL, 2, np.float32)
    flat_pages(pool)[3, 5, 1, 0] = 7
    assert pool[1, 1, 5, 1, 0] == 7
    with pytest.raises(ValueError, match="not C-contiguous"):
        flat_pages(pool[:, ::2])


def test_page_table_in_order_without_a_generator():
    assert page_table(2, 2, 5).tolist() == [[[0, 1], [5, 6]], [[2, 3], [7, 8]]]


def test_shuffled_page_table_is_distinct_independent_and_in_range():
    table = page_table(4, 3, 15, rng=np.random.default_rng(0))
    k_ids, v_ids = table[:, 0].ravel(), table[:, 1].ravel()
    assert table.dtype == np.int32
    assert len(set(k_ids)) == len(set(v_ids)) == 12
    assert k_ids.min() >= 0 and k_ids.max() < 15 <= v_ids.min() and v_ids.max() < 30
    assert (k_ids != v_ids - 15).any(), "K and V ids of a slot are independent"


def test_page_table_refuses_a_pool_that_is_too_small():
    with pytest.raises(InputError, match=r"num_pages: got 5; expected at least 6 \(2 sequences of 3 pages\); allocate"):
        page_table(2, 3, 5)


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (128, 1), (129, 2), (256, 2)])
def test_pages_for(length: int, pages: int):
    assert pages_for(length) == pages


def test_blank_dead_entries_keeps_live_pages_only():
    table = page_table(4, 2, 8)
    blanked = blank_dead_entries(table, np.array([0, 1, 128, 129]), value=-7)
    assert (blanked == -7).sum(axis=(1, 2)).tolist() == [4, 2, 2, 0]
    assert (blanked[3] == table[3]).all() and (blanked[1, :, 0] == table[1, :, 0]).all()
    assert (table >= 0).all(), "the table given is not modified"


def test_a_tokens_four_places_in_the_pool():
    """Token 130 is row 2 of slot 1; its K page and V page are different ids; tails belong to head 0."""
    table = np.array([[[4, 2], [7, 5]]], np.int32)
    pool = np.arange(empty_pool(SMALL, 5, np.float32).size, dtype=np.float32).reshape(2, 5, PAGE_SIZE, 2, 24)
    flat, pages, token = flat_pages(pool), SequencePages.of(table, 0, SMALL.head_size), np.array([130])
    assert (flat[pages.key(token)] == pool[0, 2, 2, :, :16]).all()
    assert (flat[pages.value(token)] == pool[1, 0, 2, :, :16]).all()
    assert (flat[pages.raw_index_key(token)] == pool[0, 2, 2, 0, 16:]).all()
    assert (flat[pages.block_key(token)] == pool[1, 0, 2, 0, 16:]).all()


@pytest.mark.parametrize(
    ("k_ids", "v_ids", "length", "good"),
    [
        ([0, 4], [5, 9], 256, True),
        ([0, 5], [5, 9], 256, False),
        ([-1, 4], [5, 9], 1, False),
        ([0, 4], [4, 9], 1, False),
        ([0, 4], [5, 10], 256, False),
        ([0, -1], [5, 2**31 - 1], 128, True),
        ([-1, -1], [-1, -1], 0, True),
    ],
)
def test_in_range_judges_live_entries_of_both_planes(k_ids: list[int], v_ids: list[int], length: int, good: bool):
    pages = SequencePages.of(np.array([[k_ids, v_ids]], np.int32), 0, SMALL.head_size)
    assert pages.in_range(length, num_pages=5) is good
