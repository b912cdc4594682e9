"""The pages of sequences against a model that keeps every token of every sequence, and copies all of them in a fork."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.errors import InputError
from qsa_trt.paging import pages_for
from qsa_trt.runtime import PagePool

NUM_PAGES, MAX_KV_LEN = 7, 3 * PAGE_SIZE - 5


class PagesAgainstTokens(RuleBasedStateMachine):
    """A memory of one number a token and plane; every token's number is new. The naive model is a list a sequence.

    A page table that shares a page too many, copies too few, or hands a page out twice shows as a wrong number.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, MAX_KV_LEN, rng=np.random.default_rng(0))
        self.memory = np.zeros((2 * NUM_PAGES, PAGE_SIZE), np.int64)
        self.tokens: dict[int, list[int]] = {}
        self.written = 0

    @rule(target=sequences)
    def allocate(self) -> int:
        sequence = self.pool.allocate()
        assert sequence not in self.tokens
        self.tokens[sequence] = []
        return sequence

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int:
        free = self.pool.free_pages
        child = self.pool.fork(sequence)
        assert child not in self.tokens and self.pool.free_pages == free
        self.tokens[child] = list(self.tokens[sequence])
        return child

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.pool.free(sequence)
        del self.tokens[sequence]

    @rule(
        chosen=st.lists(sequences, min_size=1, max_size=3, unique=True),
        counts=st.lists(st.sampled_from([0, 1, 1, 3, 127, 128, 129, 200]), min_size=3, max_size=3),
        fails=st.booleans(),
    )
    def grow(self, chosen: list[int], counts: list[int], fails: bool) -> None:
        growth = dict(zip(chosen, counts, strict=False))
        before = self.pool.table(list(self.tokens)), self.pool.free_pages
        try:
            grown = self.pool.grow(growth)
        except InputError as error:
            assert (self.pool.table(list(self.tokens)) == before[0]).all() and self.pool.free_pages == before[1]
            too_long = any(len(self.tokens[s]) + n > MAX_KV_LEN for s, n in growth.items())
            assert error.what == ("length" if too_long else "page pool")
            if not too_long:
                assert not grows_one_by_one(copy.deepcopy(self.pool), growth), "there was room"
            return
        if fails:  # before the copies were made
            self.pool.undo(grown)
            assert (self.pool.table(list(self.tokens)) == before[0]).all() and self.pool.free_pages == before[1]
            return
        for page in grown.copies:
            assert (page.source < NUM_PAGES) == (page.target < NUM_PAGES)
            self.memory[page.target] = self.memory[page.source]
        for sequence, count in growth.items():
            self._write(sequence, count)

    def _write(self, sequence: int, count: int) -> None:
        (table,) = self.pool.table([sequence])
        for token in range(len(self.tokens[sequence]), len(self.tokens[sequence]) + count):
            self.written += 1
            self.memory[table[:, token // PAGE_SIZE], token % PAGE_SIZE] = self.written, -self.written
            self.tokens[sequence].append(self.written)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        assert list(self.pool.sequences) == list(self.tokens)
        for sequence, tokens in self.tokens.items():
            (table,) = self.pool.table([sequence])
            position = np.arange(len(tokens))
            held = self.memory[table[:, position // PAGE_SIZE], position % PAGE_SIZE]  # [2, length]
            assert (held == np.array([tokens, [-token for token in tokens]]).reshape(2, -1)).all()

    @invariant()
    def pages_are_owned_once_or_shared_by_a_common_prefix(self) -> None:
        tables = dict(zip(self.tokens, self.pool.table(list(self.tokens)), strict=True))
        owners: dict[int, set[tuple[int, int, int]]] = {}  # page -> what its users hold in it, by slot
        for sequence, table in tables.items():
            live = pages_for(len(self.tokens[sequence]))
            assert (table[:, live:] == -1).all()
            assert ((table[0, :live] >= 0) & (table[0, :live] < NUM_PAGES)).all()
            assert ((table[1, :live] >= NUM_PAGES) & (table[1, :live] < 2 * NUM_PAGES)).all()
            for slot in range(live):
                for page in table[:, slot].tolist():
                    first = self.tokens[sequence][slot * PAGE_SIZE]
                    last = self.tokens[sequence][: (slot + 1) * PAGE_SIZE][-1]
                    owners.setdefault(page, set()).add((slot, first, last))
        assert all(len(contents) == 1 for contents in owners.values())
        planes = Counter(page < NUM_PAGES for page in owners)
        assert planes[True] == planes[False] == NUM_PAGES - self.pool.free_pages


def grows_one_by_one(pool: PagePool, growth: dict[int, int]) -> bool:
    try:
        for sequence, count in growth.items():
            pool.grow({sequence: count})
    except InputError:
        return False
    return True


TestPages = PagesAgainstTokens.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pages_come_in_order_without_a_generator() -> None:
    pool = PagePool(5, 2 * PAGE_SIZE)
    first, second = pool.allocate(), pool.allocate()
    assert pool.grow({first: 129, second: 1}).copies == ()
    assert pool.table([first, None, second]).tolist() == [[[0, 1], [5, 6]], [[-1, -1]] * 2, [[2, -1], [7, -1]]]
    assert pool.lengths([first, None, second]).tolist() == [129, 0, 1]


def test_a_page_table_may_be_wider_than_the_longest_sequence() -> None:
    pool = PagePool(2, 200, pages_per_seq=4)
    assert pool.table([pool.allocate()]).shape == (1, 2, 4)


def test_ids_of_k_and_v_are_shuffled_independently() -> None:
    pool = PagePool(32, 32 * PAGE_SIZE, rng=np.random.default_rng(0))
    sequence = pool.allocate()
    pool.grow({sequence: 32 * PAGE_SIZE})
    (table,) = pool.table([sequence])
    assert sorted(table[0]) == list(range(32)) and sorted(table[1]) == list(range(32, 64))
    assert (table[0] != table[1] - 32).any()


def test_only_the_open_page_of_a_fork_is_copied() -> None:
    pool = PagePool(4, 300)
    parent = pool.allocate()
    pool.grow({parent: 130})
    child = pool.fork(parent)
    copies = pool.grow({child: 1}).copies
    assert [(c.source, c.target) for c in copies] == [(1, 2), (5, 6)]
    assert pool.table([parent, child])[:, 0, :2].tolist() == [[0, 1], [0, 2]]
    assert pool.grow({parent: 1}).copies == (), "the other one has its page to itself now"


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    pool = PagePool(4, 300)
    parent = pool.allocate()
    pool.grow({parent: 128})
    assert pool.grow({pool.fork(parent): 1}).copies == ()


def test_what_users_do_wrong() -> None:
    pool = PagePool(1, 300)
    sequence = pool.allocate()
    with pytest.raises(InputError, match=r"page pool: got 2 more pages wanted, 1 of 1 free.*free sequences"):
        pool.grow({sequence: 129})
    with pytest.raises(InputError, match="length: got 301; expected at most max_kv_len 300"):
        pool.grow({sequence: 301})
    with pytest.raises(InputError, match="new tokens: got -1"):
        pool.grow({sequence: -1})
    pool.free(sequence)
    for call in (pool.free, pool.fork, pool.length, lambda s: pool.grow({s: 1}), lambda s: pool.table([s])):
        with pytest.raises(InputError, match="sequence: got 0; expected one that was allocated and not freed"):
            call(sequence)
    with pytest.raises(InputError, match="num_pages: got 0"):
        PagePool(0, 1)
