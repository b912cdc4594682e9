"""Which pages of a paged pool hold which tokens of which sequence: allocate, grow, fork, free.

A `PagePool` holds no memory: all layers of a model share one page table, and each layer has a pool of its own behind
it. Whoever owns the memory makes the page copies that `grow` returns, in every layer, before the call that writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.errors import InputError

from ..paging import pages_for

#: K page id in [0, N) and V page id in [N, 2N) of one slot of 128 tokens; the two are independent.
Slot = tuple[int, int]


@dataclass(frozen=True)
class PageCopy:
    """One page to be copied in every layer; ids as in the page table, K in [0, N) and V in [N, 2N)."""

    source: int
    target: int


@dataclass(frozen=True)
class Growth:
    """What a `grow` did.

    Attributes:
        tokens: sequence to the number of its new tokens.
        copies: to be made, in every layer, before the call that writes the tokens. A copy's source may be freed or
            written to afterwards.
        shared: sequence to the slot that it shared until now, and has a copy of.
    """

    tokens: Mapping[int, int]
    copies: tuple[PageCopy, ...]
    shared: Mapping[int, Slot]


class PagePool:
    """The pages of many sequences in one pool.

    A sequence is known by a number that is never used again. A page belongs to one sequence, or to several that were
    forked from each other, until one of them writes to it: that one gets a copy of its own.

    Args:
        num_pages: pages a plane, N.
        max_kv_len: tokens of the longest sequence.
        pages_per_seq: width of the page table, M; None is `ceil(max_kv_len / 128)`.
        rng: shuffles the page ids, those of K and of V independently; None hands them out in order.

    Raises:
        InputError: a size is not positive.
    """

    def __init__(
        self,
        num_pages: int,
        max_kv_len: int,
        *,
        pages_per_seq: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        for what, value in (("num_pages", num_pages), ("max_kv_len", max_kv_len)):
            if value < 1:
                raise InputError(what, value, "at least 1", "make it larger")
        self.num_pages, self.max_kv_len = num_pages, max_kv_len
        self.pages_per_seq = max(pages_per_seq or 0, pages_for(max_kv_len))
        order = [np.arange(num_pages) if rng is None else rng.permutation(num_pages) for _ in range(2)]
        self._free_k = order[0][::-1].tolist()  # taken from the end
        self._free_v = (order[1][::-1] + num_pages).tolist()
        self._users: Counter[Slot] = Counter()
        self._slots: dict[int, list[Slot]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """Pages a plane that belong to no sequence."""
        return len(self._free_k)

    @property
    def sequences(self) -> tuple[int, ...]:
        """All live sequences, oldest first."""
        return tuple(self._slots)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence.

        Raises:
            InputError: there is no such sequence.
        """
        self._check(sequence)
        return self._lengths[sequence]

    def allocate(self) -> int:
        """A new sequence of no tokens, which holds no page yet."""
        return self._add([], 0)

    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of `sequence`; they share all pages until one of them grows.

        Raises:
            InputError: there is no such sequence.
        """
        self._check(sequence)
        self._users.update(self._slots[sequence])
        return self._add(list(self._slots[sequence]), self._lengths[sequence])

    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that no other one uses can be handed out again.

        Raises:
            InputError: there is no such sequence.
        """
        self._check(sequence)
        self._release(self._slots.pop(sequence))
        del self._lengths[sequence]

    def grow(self, tokens: Mapping[int, int]) -> Growth:
        """Make room for tokens that the next call writes: in all of these sequences, or in none.

        Args:
            tokens: sequence to the number of its new tokens.

        Returns:
            What to copy before that call, and what `undo` takes if it fails.

        Raises:
            InputError: there is no such sequence, it would become longer than `max_kv_len`, or the pool is full.
        """
        for sequence, count in tokens.items():
            if count < 0:
                raise InputError("new tokens", count, "0 or more", "correct the count")
            length = self.length(sequence) + count
            if length > self.max_kv_len:
                raise InputError("length", length, f"at most max_kv_len {self.max_kv_len}", "raise it")
        wanted = self._wanted(tokens)
        if wanted > self.free_pages:
            raise InputError(
                "page pool",
                f"{wanted} more pages wanted, {self.free_pages} of {self.num_pages} free",
                "a free page for every 128 tokens of every sequence",
                "free sequences that have ended, or make the pool larger (num_pages)",
            )
        shared: dict[int, Slot] = {}
        copies: list[PageCopy] = []
        for sequence, count in tokens.items():
            if self._writes_to_shared(sequence, count, self._users):
                shared[sequence], own = self._leave(sequence)
                copies += [PageCopy(source, target) for source, target in zip(shared[sequence], own, strict=True)]
            self._lengths[sequence] += count
            slots = self._slots[sequence]
            slots += [self._take() for _ in range(pages_for(self._lengths[sequence]) - len(slots))]
        return Growth(dict(tokens), tuple(copies), shared)

    def undo(self, growth: Growth) -> None:
        """Take back the last `grow`, because its call failed.

        It is no way to forget tokens that a call has written: the indexer's state of the last block is gone by then.
        """
        for sequence, count in growth.tokens.items():
            slots = self._slots[sequence]
            self._lengths[sequence] -= count
            pages = pages_for(self._lengths[sequence])
            self._release(slots[pages:])
            del slots[pages:]
            if sequence in growth.shared:
                self._release(slots[-1:])
                slots[-1] = growth.shared[sequence]
                self._users[slots[-1]] += 1

    def table(self, sequences: Sequence[int | None]) -> NDArray[np.int32]:
        """Input `kv_page_table`, int32 `[B, 2, M]`; -1 past each length, and everywhere in a row of None.

        Raises:
            InputError: there is no such sequence.
        """
        table = np.full((len(sequences), 2, self.pages_per_seq), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                self._check(sequence)
                slots = np.array(self._slots[sequence], np.int32).reshape(-1, 2)  # [pages, 2]
                table[row, :, : len(slots)] = slots.T
        return table

    def lengths(self, sequences: Sequence[int | None]) -> NDArray[np.int32]:
        """Tokens int32 `[B]` of sequences, as input `context_lengths`; 0 for None.

        Raises:
            InputError: there is no such sequence.
        """
        return np.array([0 if sequence is None else self.length(sequence) for sequence in sequences], np.int32)

    def _wanted(self, tokens: Mapping[int, int]) -> int:
        """Pages a plane that `grow` will take."""
        wanted = 0
        users = self._users.copy()
        for sequence, count in tokens.items():
            slots = self._slots[sequence]
            wanted += pages_for(self._lengths[sequence] + count) - len(slots)
            if self._writes_to_shared(sequence, count, users):
                users[slots[-1]] -= 1
                wanted += 1
        return wanted

    def _writes_to_shared(self, sequence: int, count: int, users: Counter[Slot]) -> bool:
        """Whether new tokens go to a page of others: the last one, if it has room. All before it are full for good."""
        return count > 0 and self._lengths[sequence] % PAGE_SIZE > 0 and users[self._slots[sequence][-1]] > 1

    def _leave(self, sequence: int) -> tuple[Slot, Slot]:
        """Give a sequence a last slot of its own; returns the shared one and the new one."""
        slots = self._slots[sequence]
        shared, own = slots[-1], self._take()
        self._users[shared] -= 1
        slots[-1] = own
        return shared, own

    def _take(self) -> Slot:
        slot = (self._free_k.pop(), self._free_v.pop())
        self._users[slot] = 1
        return slot

    def _release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._users[slot]
                self._free_k.append(slot[0])
                self._free_v.append(slot[1])

    def _add(self, slots: list[Slot], length: int) -> int:
        sequence, self._next = self._next, self._next + 1
        self._slots[sequence], self._lengths[sequence] = slots, length
        return sequence

    def _check(self, sequence: int) -> None:
        if sequence not in self._slots:
            raise InputError("sequence", sequence, "one that was allocated and not freed", "allocate or fork it first")
