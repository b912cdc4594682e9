"""Prefill and decode over sequences of one page pool, whatever computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.errors import InputError

from .layout import PoolLayout
from .pages import PageCopy

Array = NDArray[Any]


class Session(ABC):
    """Runs a model, or one layer of it, step by step; each step grows the sequences that it runs.

    A step that fails leaves lengths and pages as they were.

    Args:
        layout: the pools.
        rng: shuffles the page ids; None hands them out in order.

    Attributes:
        layout: the pools.
        pages: which pages hold which sequence: `allocate`, `fork` and `free` are its methods.
    """

    def __init__(self, layout: PoolLayout, rng: np.random.Generator | None = None) -> None:
        self.layout = layout
        self.pages = layout.pages(rng)

    def prefill(
        self, sequences: Sequence[int | None], feeds: Mapping[str, Array], lengths: Sequence[int] | NDArray[Any]
    ) -> dict[str, Array]:
        """Run whole prompts, padded on the right.

        Args:
            sequences: one a row of the batch, newly allocated; None is a row that computes nothing.
            feeds: the model's own inputs, `[B, S, ...]`.
            lengths: tokens of each prompt; 0 leaves a sequence as it is.

        Returns:
            The outputs without the pools; what rows hold past their lengths means nothing.

        Raises:
            InputError: wrong sequences, lengths or feeds, or the pool is full.
        """
        counts = [int(length) for length in lengths]
        if len(counts) != len(sequences) or min(counts, default=0) < 0:
            raise InputError("lengths", counts, f"{len(sequences)} numbers from 0 on", "give one a sequence")
        for sequence in sequences:
            if sequence is not None and self.pages.length(sequence):
                raise InputError(
                    "prefill",
                    f"sequence {sequence} of {self.pages.length(sequence)} tokens",
                    "sequences that hold no token yet",
                    "decode it, or allocate a new one",
                )
        tokens = [0 if sequence is None else count for sequence, count in zip(sequences, counts, strict=True)]
        return self._step(sequences, tokens, feeds, np.zeros(0, np.int32))

    def decode(self, sequences: Sequence[int | None], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run one more token of each sequence.

        Args:
            sequences: one a row of the batch; None is a row that computes nothing.
            feeds: the model's own inputs, `[B, 1, ...]`.

        Returns:
            The outputs without the pools.

        Raises:
            InputError: wrong sequences or feeds, a sequence is full, or the pool is.
        """
        return self._step(
            sequences, [int(sequence is not None) for sequence in sequences], feeds, self.pages.lengths(sequences)
        )

    def _step(
        self,
        sequences: Sequence[int | None],
        tokens: Sequence[int],
        feeds: Mapping[str, Array],
        start: NDArray[np.int32],
    ) -> dict[str, Array]:
        live = [sequence for sequence in sequences if sequence is not None]
        if not sequences or len(set(live)) != len(live):
            raise InputError("sequences", list(sequences), "one or more, each once", "correct the list")
        growth = self.pages.grow({s: n for s, n in zip(sequences, tokens, strict=True) if s is not None})
        try:
            if growth.copies:
                self._copy_pages(growth.copies)
            step: dict[str, Array] = {
                "context_lengths": self.pages.lengths(sequences),  # [B]
                "kvcache_start_index": start,  # [0] or [B]
                "kv_page_table": self.pages.table(sequences),  # [B, 2, M]
            }
            return self._run(feeds, step)
        except BaseException:
            self.pages.undo(growth)
            raise

    @abstractmethod
    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer's pool."""

    @abstractmethod
    def _run(self, feeds: Mapping[str, Array], step: Mapping[str, Array]) -> dict[str, Array]:
        """One call; `step` holds lengths, start index and page table by the contract's names."""


def check_feeds(feeds: Mapping[str, Array], wanted: Mapping[str, np.dtype[Any]], batch: int) -> None:
    """Every input of the model is fed, nothing else is, and all have the right type and one batch.

    Args:
        feeds: arrays by input name.
        wanted: the model's own inputs and their types.
        batch: rows of every array.

    Raises:
        InputError: what is missing, too much, or of another type or batch.
    """
    if set(feeds) != set(wanted):
        raise InputError("feeds", ", ".join(feeds) or "nothing", ", ".join(wanted), "feed exactly these inputs")
    for name, array in feeds.items():
        if array.dtype != wanted[name]:
            raise InputError(f"input {name}", array.dtype, str(wanted[name]), "convert it")
        if array.ndim == 0 or array.shape[0] != batch:
            raise InputError(f"input {name}", f"shape {list(array.shape)}", f"a batch of {batch}", "one row a sequence")


def check_rope(rope: NDArray[np.float32] | None, name: str, max_kv_len: int) -> NDArray[np.float32]:
    """The rope table, which is there and long enough.

    Raises:
        InputError: it is not.
    """
    if rope is None:
        raise InputError("rope table", "nothing", f"fp32 [1, maxPos, rotary] for input {name}", "pass rope=")
    if rope.dtype != np.float32:
        raise InputError("rope table", rope.dtype, "float32", "convert it")
    if rope.shape[1] < max_kv_len:
        raise InputError(
            "rope table", f"{rope.shape[1]} positions", f"at least max_kv_len {max_kv_len}", "make a longer one"
        )
    return rope
