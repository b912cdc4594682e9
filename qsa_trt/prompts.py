"""Random prompts for any model of a causal attention: what each of its own inputs gets for a window of tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from qsa_plugin.contract import INPUTS
from qsa_plugin.errors import InputError

from .data_loader import POOL, VOCABULARY

Array = NDArray[Any]
DEFAULT_LENGTHS, DEFAULT_DECODE_STEPS = (160, 97, 33), 40
_CONTRACT = frozenset(tensor.name for tensor in INPUTS)
_COS_SIN = re.compile(r"(^|[._])(cos|sin)($|[._])")
_CACHE = re.compile(r"(^|[._])(past|cache)")
_DIRECTION = re.compile(r"(^|\.)(input|output|past|present)(_key_values?)?(?=\.|_|$)")


@dataclass(frozen=True)
class ModelInput:
    """One graph input.

    Attributes:
        name: its name.
        dtype: NumPy's name of its element type.
        dims: integers, and a name or None for a dim that is open.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str | None, ...]

    @property
    def is_cos_sin(self) -> bool:
        """Cosines or sines of the tokens' positions, `[B, S, rotary]`."""
        return bool(_COS_SIN.search(self.name)) and len(self.dims) == 3

    @property
    def is_cache(self) -> bool:
        """A dense cache that a decode graph takes in and gives back longer."""
        return bool(_CACHE.search(self.name)) and self.name != "cache_position"

    def empty(self, batch: int, batch_dim: int | str | None) -> Array:
        """The cache before the first token: the batch where `batch_dim` stands, 0 in the other open dims."""
        if not isinstance(batch_dim, int) and self.dims.count(batch_dim) != 1:
            got = f"dims {list(self.dims)}"
            raise InputError(f"input {self.name}", got, f"one dim {batch_dim}, the batch", "name it in the export")
        open_dims = {batch_dim: batch}
        return np.zeros([d if isinstance(d, int) else open_dims.get(d, 0) for d in self.dims], self.dtype)


@dataclass(frozen=True)
class Sizes:
    """Tokens of each sequence that are prefilled, int `[B]`, and how many are decoded after them."""

    prompt: NDArray[np.int64]
    steps: int

    @property
    def totals(self) -> NDArray[np.int64]:
        """Tokens of each sequence, `[B]`."""
        return self.prompt + self.steps


def choose_sizes(
    inputs: Sequence[ModelInput],
    equal: bool,
    lengths: str | Sequence[int] | None,
    decode_steps: int | None,
    most: int | None,
) -> tuple[Sizes, list[str]]:
    """What to run, as far as the model allows.

    Args:
        inputs: of the original, caches left out; token ids or hidden states tell a static batch or sequence.
        equal: sequences of one length, as dense caches need.
        lengths: of the prompts; None takes the default.
        decode_steps: after each prompt; None takes the default.
        most: positions of a baked rope table; the defaults keep within them.

    Returns:
        The sizes, and notes on what they leave out.

    Raises:
        InputError: sizes that the caller chose and that do not fit.
    """
    prompt = np.array(parse_lengths(DEFAULT_LENGTHS if lengths is None else lengths), np.int64)
    steps = DEFAULT_DECODE_STEPS if decode_steps is None else decode_steps
    if steps < 0:
        raise InputError("decode steps", steps, "a number from 0 on", "correct --decode-steps")
    batch, seq_len, *_ = (*batch_and_seq(inputs), None, None)
    if isinstance(batch, int):
        prompt = np.resize(prompt, batch)
    if most is not None and lengths is None and decode_steps is None:
        steps = min(steps, most // 2)
        prompt = np.minimum(prompt, most - steps)
    prompt = np.full_like(prompt, prompt.max()) if equal else prompt
    notes = []
    if seq_len == 1:
        notes.append("the graph takes one token a call: nothing is prefilled")
        steps, prompt = int(prompt.max()) + steps, np.zeros_like(prompt)
    elif isinstance(seq_len, int):
        notes.append(f"the graph takes {seq_len} tokens a call: nothing is decoded")
        steps, prompt = 0, np.full_like(prompt, seq_len)
    sizes = Sizes(prompt, steps)
    if most is not None and sizes.totals.max() > most:
        got = f"{sizes.totals.max()} tokens"
        raise InputError("lengths and decode steps", got, f"at most {most}, as the baked rope table has", "lower them")
    return sizes, notes


def check_memory(sizes: Sizes, heads: int = 1) -> None:
    """Plain attention holds a score for every head and pair of tokens, fp32 `[B, heads, S, S]`.

    Raises:
        InputError: this machine has less memory than that.
    """
    longest = int(sizes.totals.max())
    needed = 4 * sizes.totals.size * heads * longest**2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise InputError(
            "lengths and decode steps",
            f"{longest} tokens, with scores of {needed / 2**30:.0f} GiB",
            f"at most the {memory / 2**30:.0f} GiB of this machine's memory",
            "lower --lengths or --decode-steps",
        )


def batch_and_seq(inputs: Sequence[ModelInput]) -> tuple[int | str | None, ...]:
    """The first two dims of the token ids or hidden states; empty where there are none."""
    return next((known.dims[:2] for known in inputs if not _is_derived(known)), ())


def parse_lengths(lengths: str | Sequence[int]) -> list[int]:
    """Prompt lengths from "N,N,...", or as they are.

    Raises:
        InputError: something is no number from 1 on.
    """
    parts = lengths.split(",") if isinstance(lengths, str) else lengths
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) >= 1 << 31:
        raise InputError("lengths", lengths, "numbers from 1 on below 2^31, such as 160,97", "correct --lengths")
    return numbers


def model_inputs(model: onnx.ModelProto) -> tuple[ModelInput, ...]:
    """The inputs that a caller feeds, those of QsaAttention nodes left out."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(
        _model_input(value)
        for value in model.graph.input
        if value.name not in weights | _CONTRACT and not POOL.fullmatch(value.name)
    )


def _model_input(value: onnx.ValueInfoProto) -> ModelInput:
    kind = value.type.tensor_type
    dims = [int(d.dim_value) if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim]
    sizes = tuple(int(d) if isinstance(d, str) and d.isdigit() else d for d in dims)  # exporters write "2" as a name
    return ModelInput(value.name, np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)), sizes)


def cache_key(name: str) -> str:
    """What the input and the output of one cache have in common: `past.0.key` and `present.0.key`."""
    return _DIRECTION.sub("", name)


class Prompts:
    """Random tokens of whole sequences, and feeds for windows of them.

    Args:
        inputs: of every model that is to be fed: equal names get equal values.
        lengths: int `[B]`, tokens of each sequence; what follows is padding.
        rope: the table `[1, positions, rotary]` that cosines and sines are taken from.
        rng: draws the tokens.

    Raises:
        InputError: an input whose meaning is unknown.
    """

    def __init__(
        self,
        inputs: Sequence[ModelInput],
        lengths: NDArray[np.int64],
        rope: NDArray[np.float32],
        rng: np.random.Generator,
    ) -> None:
        self.lengths = lengths
        self._rope = rope[0]  # [positions, rotary]
        batch, total = lengths.size, int(lengths.max())
        self._tokens: dict[str, Array] = {}  # [B, total, ...]
        for known in inputs:
            if not _is_derived(known):
                self._tokens[known.name] = _random(known, batch, total, rng)
        if not self._tokens:
            names = ", ".join(known.name for known in inputs) or "none"
            raise InputError("model inputs", names, "token ids or hidden states", "give a whole layer or model")

    def with_other_start(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """The same feeds but for the first token of every sequence."""
        changed = {name: value.copy() for name, value in feeds.items()}
        for name in self._tokens.keys() & feeds.keys():
            first = changed[name][:, 0] + np.array(1, changed[name].dtype)
            changed[name][:, 0] = first % VOCABULARY if changed[name].dtype.kind in "iu" else first
        return changed

    def window(
        self, inputs: Sequence[ModelInput], positions: NDArray[np.int64], cached: int | None = None
    ) -> dict[str, Array]:
        """Feeds for one call.

        Args:
            inputs: of the model that is called, caches left out.
            positions: `[B, S]`, which token of its sequence each column is.
            cached: tokens that dense caches hold before these; None for a model without caches.
        """
        keys = positions  # [B, S] or [B, cached + S]: the tokens that a mask speaks of
        if cached is not None:
            shape = (positions.shape[0], cached + positions.shape[1])
            keys = np.broadcast_to(np.arange(shape[1]), shape)
        return {known.name: self._feed(known, positions, keys) for known in inputs}

    def _feed(self, known: ModelInput, positions: NDArray[np.int64], keys: NDArray[np.int64]) -> Array:
        rank = len(known.dims)
        if known.name in self._tokens:
            return np.asarray(self._tokens[known.name][np.arange(self.lengths.size)[:, None], positions])
        if known.is_cos_sin:
            cos, sin = np.split(self._rope[positions], 2, axis=-1)  # [B, S, rotary/2]
            return np.tile(cos if "cos" in known.name else sin, 2).astype(known.dtype)
        live = keys < self.lengths[:, None]
        if "mask" in known.name and rank == 2:
            return np.asarray(live, known.dtype)
        if "mask" in known.name and rank == 4:
            visible = live[:, None, None] & (keys[:, None, None] <= positions[:, None, :, None])  # [B, 1, S, keys]
            return visible if known.dtype == np.bool_ else np.where(visible, 0, np.finfo(known.dtype).min)
        if known.name == "cache_position" and rank == 1:
            return np.asarray(positions[0], known.dtype)
        if "position" in known.name and rank in (2, 3):
            return np.broadcast_to(positions, (3,) * (rank - 2) + positions.shape).astype(known.dtype)
        raise InputError(
            f"input {known.name}",
            f"{known.dtype} {list(known.dims)}",
            "token ids, hidden states, cos, sin, a mask of rank 2 or 4, position ids or caches",
            "compare a graph of that form",
        )


def _is_derived(known: ModelInput) -> bool:
    return known.is_cos_sin or known.is_cache or "mask" in known.name or "position" in known.name


def _random(known: ModelInput, batch: int, total: int, rng: np.random.Generator) -> Array:
    if len(known.dims) == 2 and np.issubdtype(known.dtype, np.integer):
        return np.asarray(rng.integers(0, VOCABULARY, (batch, total)), known.dtype)
    if len(known.dims) == 3 and isinstance(known.dims[2], int) and known.dtype.kind not in "iub":
        return np.asarray(rng.standard_normal((batch, total, known.dims[2]), np.float32), known.dtype)
    raise InputError(
        f"input {known.name}",
        f"{known.dtype} {list(known.dims)}",
        "integer token ids [batch, seq] or hidden states [batch, seq, width]",
        "compare a graph of that form",
    )
