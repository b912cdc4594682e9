"""Input data that makes sense to patched models, for `polygraphy run --data-loader-script`.

Random page tables and lengths are meaningless, so polygraphy's own data loader cannot feed a QsaAttention node. This
file is the script: `python -m qsa_trt.data_loader` prints its path. It defines three functions:

    load_data   one prefill, then one decode step (the default)
    prefill     one prefill, for engines whose first profile is prefill: `$(python -m qsa_trt.data_loader):prefill`
    decode      one decode step

For other sizes, write a script of two lines: `from qsa_trt.data_loader import QsaData` and
`def load_data(): return QsaData(batch=4, seq_len=3000)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import INPUTS, PAGE_SIZE, Mode
from qsa_plugin.errors import InputError
from qsa_trt.paging import blank_dead_entries, page_table, pages_for
from qsa_trt.rope import default_inv_freq, rope_table

#: What a graph input is to the operator, by its name: pools are numbered by layer.
POOL = re.compile(r"past_key_values?(_\d+)?")
THETA = 1e7
#: Token ids are drawn below this: any real vocabulary holds them.
VOCABULARY = 100
_DIMS = {tensor.name: tensor.dims for tensor in INPUTS}
_RUN_TIME_DIMS = ("B", "S", "N", "M", "maxPos", "start")

Arrays = dict[str, NDArray[Any]]
#: Input name -> (polygraphy dtype, shape); open dims are names, None or -1.
Metadata = Mapping[str, tuple[Any, Sequence[Any]]]


@dataclass(frozen=True)
class _Sizes:
    """The run-time dims of one iteration, by the contract's symbols."""

    mode: Mode
    B: int
    S: int
    N: int
    M: int
    maxPos: int
    longest: int

    @property
    def start(self) -> int:
        """Length of `kvcache_start_index`."""
        return 0 if self.mode is Mode.PREFILL else self.B

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Live tokens int32 [B]: the longest sequence first, each further one shorter by an equal step."""
        return np.array([max(1, self.longest * (self.B - i) // self.B) for i in range(self.B)], np.int32)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions [B, S] of this call's tokens."""
        first = np.zeros(self.B, np.int64) if self.mode is Mode.PREFILL else self.lengths.astype(np.int64) - 1
        return first[:, None] + np.arange(self.S)


class QsaData:
    """An iterable of feeds for polygraphy: zero pools, shuffled page ids, ragged lengths, right padding, a rope table.

    Polygraphy sets `input_metadata` (input name to dtype and shape) before it iterates: that is how the loader learns
    the model's inputs. Static dims win over the sizes given here. Every iteration over it yields the same data.

    Args:
        batch: sequences.
        seq_len: tokens of the prefill, padding included; the longest sequence has no padding.
        context_length: tokens of the longest sequence in decode, the new one included; default `seq_len` + 1.
        pages_per_seq: width of the page table, M; default: what the lengths need.
        num_pages: pages a plane, N; default: one more than the table holds.
        max_positions: positions of the rope table; default `pages_per_seq` * 128.
        modes: what to yield, in this order.
        seed: of the random generator.
    """

    def __init__(
        self,
        batch: int = 2,
        seq_len: int = 160,
        *,
        context_length: int | None = None,
        pages_per_seq: int | None = None,
        num_pages: int | None = None,
        max_positions: int | None = None,
        modes: Sequence[Mode] = (Mode.PREFILL, Mode.DECODE),
        seed: int = 0,
    ) -> None:
        self.input_metadata: Metadata | None = None
        self.batch, self.seq_len = batch, seq_len
        self.context_length = context_length or seq_len + 1
        self.pages_per_seq = pages_per_seq or pages_for(max(self.seq_len, self.context_length))
        self.num_pages = num_pages
        self.max_positions = max_positions
        self.modes = tuple(modes)
        self.seed = seed

    def __iter__(self) -> Iterator[Arrays]:
        """One feed a mode.

        Raises:
            InputError: polygraphy told no inputs, they are not those of a patched model, or no mode fits static dims.
        """
        inputs = self.input_metadata or {}
        if not any(POOL.fullmatch(name) for name in inputs):
            raise InputError(
                "model inputs", ", ".join(inputs) or "none", "those of a patched model", "run: qsa-trt patch-onnx MODEL"
            )
        fixed = _fixed_sizes(inputs)
        modes = [mode for mode in self.modes if _fits(mode, fixed)]
        if not modes:
            raise InputError(
                "model inputs",
                ", ".join(f"{symbol} = {size}" for symbol, size in fixed.items()),
                "dims that allow " + " or ".join(mode.value for mode in self.modes),
                "take a loader function of the other mode, or export with dynamic dims",
            )
        for mode in modes:
            rng = np.random.default_rng(self.seed)
            yield _feed(inputs, self._sizes(mode, fixed), rng)

    def _sizes(self, mode: Mode, fixed: Mapping[str, int]) -> _Sizes:
        batch = fixed.get("B", self.batch)
        pages = fixed.get("M", self.pages_per_seq)
        positions = fixed.get("maxPos", self.max_positions or pages * PAGE_SIZE)
        wanted = fixed.get("S", self.seq_len) if mode is Mode.PREFILL else self.context_length
        longest = min(wanted, pages * PAGE_SIZE, positions)
        return _Sizes(
            mode=mode,
            B=batch,
            S=fixed.get("S", longest if mode is Mode.PREFILL else 1),
            N=fixed.get("N", self.num_pages or batch * pages + 1),
            M=pages,
            maxPos=positions,
            longest=longest,
        )


def _feed(inputs: Metadata, sizes: _Sizes, rng: np.random.Generator) -> Arrays:
    lengths = sizes.lengths
    known: Arrays = {
        "context_lengths": lengths,
        "kvcache_start_index": (lengths - 1)[: sizes.start],
        "kv_page_table": blank_dead_entries(page_table(sizes.B, sizes.M, sizes.N, rng=rng), lengths),
    }
    feed: Arrays = {}
    for name, (dtype, shape) in inputs.items():
        if name in known:
            feed[name] = known[name]
        elif name == "rope_rotary_cos_sin":
            feed[name] = rope_table(sizes.maxPos, default_inv_freq(_rotary_dims(shape), THETA))
        elif POOL.fullmatch(name):
            feed[name] = np.zeros((2, sizes.N, *(int(d) for d in shape[2:])), _numpy_dtype(name, dtype))
        else:
            feed[name] = activation(name, _numpy_dtype(name, dtype), shape, sizes.positions, rng)
    return feed


def activation(
    name: str, dtype: np.dtype[Any], shape: Sequence[Any], positions: NDArray[Any], rng: np.random.Generator
) -> NDArray[Any]:
    """Random content of an input that is not the operator's: token ids, position ids, a mask of ones, hidden states.

    Args:
        name: the input's; position ids are known by it.
        dtype: the input's.
        shape: the input's; the first open dim (a name, None or -1) is the batch, the second the sequence.
        positions: `[B, S]` of the tokens.
        rng: source of everything random.

    Raises:
        InputError: more than two dims are open.
    """
    if sum(not _static(d) for d in shape) > 2:
        raise InputError(
            f"input {name}",
            f"shape {list(shape)}",
            "at most two open dims, batch and sequence",
            "feed it from a loader script of your own",
        )
    open_dims = iter(positions.shape)
    dims = [d if _static(d) else next(open_dims) for d in shape]
    if dtype == np.bool_:
        return np.ones(dims, dtype)
    if np.issubdtype(dtype, np.integer):
        if "position" in name:
            return np.broadcast_to(positions, dims).astype(dtype)
        return rng.integers(0, VOCABULARY, dims).astype(dtype)
    return rng.standard_normal(dims).astype(dtype)


def _fixed_sizes(inputs: Metadata) -> dict[str, int]:
    """The contract's symbols whose value the model fixes."""
    fixed: dict[str, int] = {}
    others = []
    for name, (_, shape) in inputs.items():
        symbols = _DIMS["past_key_value"] if POOL.fullmatch(name) else _DIMS.get(name)
        if symbols is None:
            others.append(shape)
        else:
            fixed |= {s: d for s, d in zip(symbols, shape, strict=True) if s in _RUN_TIME_DIMS and _static(d)}
    for shape in others:  # [B, S, ...]
        if len(shape) > 1 and _static(shape[1]) and (not _static(shape[0]) or shape[0] == fixed.get("B")):
            fixed["S"] = shape[1]
    return fixed


def _static(dim: Any) -> bool:
    return isinstance(dim, int) and dim >= 0


def _fits(mode: Mode, fixed: Mapping[str, int]) -> bool:
    if mode is Mode.PREFILL:
        return fixed.get("start", 0) == 0
    return fixed.get("start", 1) >= 1 and fixed.get("S", 1) == 1


def _rotary_dims(shape: Sequence[Any]) -> int:
    if _static(shape[-1]):
        return int(shape[-1])
    raise InputError(
        "rope_rotary_cos_sin",
        f"shape {list(shape)}",
        "a static last dim, the model's rotary dims",
        "patch the model again",
    )


def _numpy_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """NumPy's name of a polygraphy dtype."""
    from polygraphy.datatype import DataType
    from polygraphy.exception import PolygraphyException

    try:
        numpy_dtype: np.dtype[Any] = np.dtype(DataType.to_dtype(DataType.from_dtype(dtype), "numpy"))
    except PolygraphyException as error:
        raise InputError(
            f"input {name}",
            str(dtype),
            "a dtype that NumPy has, since polygraphy feeds NumPy arrays",
            "use an fp16 model",
        ) from error
    return numpy_dtype


def load_data() -> QsaData:
    """One prefill, then one decode step: what polygraphy calls when the script is given without a function."""
    return QsaData()


def prefill() -> QsaData:
    """One prefill."""
    return QsaData(modes=(Mode.PREFILL,))


def decode() -> QsaData:
    """One decode step."""
    return QsaData(modes=(Mode.DECODE,))


if __name__ == "__main__":
    print(Path(__file__).resolve())
