"""Optimization profiles, derived from the sizes a user knows and the dims of the patched graph.

Two profiles: prefill (B 1..max batch, S 1..max sequence length, `kvcache_start_index` of shape [0]) and decode (S = 1,
`kvcache_start_index` of shape [1..max batch]); or one that covers both. Pages, page table width and rope positions are
fixed: they are capacities, allocated once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.errors import InputError

from .patched_model import PatchedModel

DEFAULT_MAX_BATCH = 1
DEFAULT_MAX_SEQ_LEN = 2048
DEFAULT_MAX_KV_LEN = 4096
PREFILL, DECODE, SINGLE = "prefill", "decode", "all"
_INT32_MAX = 2**31 - 1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Capacities of the engine, in tokens and pages."""

    max_batch: int
    max_seq_len: int
    max_kv_len: int
    num_pages: int
    pages_per_seq: int
    max_positions: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """Legal choices that a user may not have meant."""
        full = self.max_batch * self.pages_per_seq
        if self.num_pages >= full:
            return ()
        return (
            f"--num-pages {self.num_pages} is less than the {full} pages of {self.max_batch} sequences of "
            f"{self.max_kv_len} tokens: they cannot all reach their full length at once",
        )


@dataclass(frozen=True)
class Shapes:
    """The three shapes of one input in one profile."""

    min: Shape
    opt: Shape
    max: Shape


@dataclass(frozen=True)
class Profile:
    """One optimization profile: graph input name to its shapes."""

    name: str
    shapes: Mapping[str, Shapes]


def choose_sizes(
    model: PatchedModel,
    *,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    max_kv_len: int | None = None,
    num_pages: int | None = None,
) -> Sizes:
    """Complete the sizes a user gave by what the graph fixes and by the defaults.

    Raises:
        InputError: a size is not positive, too large for int32 page ids and positions, or contradicts another size or
            the graph.
    """
    given = {
        "--max-batch": max_batch,
        "--max-seq-len": max_seq_len,
        "--max-kv-len": max_kv_len,
        "--num-pages": num_pages,
    }
    for option, value in given.items():
        if value is not None and not 1 <= value <= _INT32_MAX:
            raise InputError(option, value, f"an integer from 1 to {_INT32_MAX}", "correct the option")
    fixed = model.fixed
    positions = model.rope.positions
    width = fixed.get("M")
    kv_limit = min(positions or _INT32_MAX, (width or _INT32_MAX) * PAGE_SIZE)
    max_batch = _agree("--max-batch", max_batch, fixed.get("B"), DEFAULT_MAX_BATCH)
    if max_kv_len is None:
        max_kv_len = min(kv_limit, max(DEFAULT_MAX_KV_LEN, max_seq_len or 1, fixed.get("S", 1)))
    elif max_kv_len > kv_limit:
        what = f"rope table {model.rope.tensor} has" if kv_limit == positions else "page table of the graph holds"
        raise InputError(
            "--max-kv-len", max_kv_len, f"at most the {kv_limit} positions that the {what}", "lower it, or patch again"
        )
    max_seq_len = _agree("--max-seq-len", max_seq_len, fixed.get("S"), min(DEFAULT_MAX_SEQ_LEN, max_kv_len))
    if max_seq_len > max_kv_len:
        raise InputError(
            "--max-seq-len", max_seq_len, f"at most --max-kv-len ({max_kv_len})", "lower it, or raise --max-kv-len"
        )
    pages_per_seq = width or math.ceil(max_kv_len / PAGE_SIZE)
    default_pages = min(max_batch * pages_per_seq, _INT32_MAX)
    num_pages = _agree("--num-pages", num_pages, fixed.get("N"), default_pages)
    if 2 * num_pages - 1 > _INT32_MAX:
        raise InputError(
            "--num-pages",
            num_pages,
            f"at most {(_INT32_MAX + 1) // 2}, since page ids are int32 and go up to twice as many",
            "lower it, or lower --max-batch or --max-kv-len",
        )
    return Sizes(max_batch, max_seq_len, max_kv_len, num_pages, pages_per_seq, positions or max_kv_len)


def _agree(option: str, given: int | None, fixed: int | None, default: int) -> int:
    if given is not None and fixed is not None and given != fixed:
        raise InputError(option, given, f"{fixed}, which the graph fixes", f"leave {option} out, or export it dynamic")
    return given or fixed or default


def derive_profiles(
    model: PatchedModel, sizes: Sizes, *, single: bool = False, overrides: Sequence[str] = ()
) -> tuple[Profile, ...]:
    """The profiles of an engine, checked.

    Args:
        model: the patched model.
        sizes: the engine's capacities.
        single: one profile named `all` instead of `prefill` and `decode`.
        overrides: `NAME:[min]/[opt]/[max]` or `PROFILE:NAME:[min]/[opt]/[max]`, e.g. `input_ids:[1,1]/[1,64]/[2,128]`.

    Raises:
        InputError: a graph input has a dim that no size describes; an override is misspelt, names nothing, or
            contradicts the graph or other inputs; a shape is not min <= opt <= max.
    """
    ranges = _applicable(_ranges(sizes, single), model.fixed)
    chosen = _parse_overrides(overrides, model, tuple(ranges))
    profiles = tuple(
        Profile(name, {i: chosen.get((name, i)) or _derive(model, i, symbols) for i in model.inputs})
        for name, symbols in ranges.items()
    )
    for profile in profiles:
        for name, shapes in profile.shapes.items():
            _check(profile.name, name, shapes, model)
        _check_agreement(profile, model)
    return profiles


#: Contract symbol -> its (min, opt, max) in one profile.
Ranges = Mapping[str, tuple[int, int, int]]


def _ranges(sizes: Sizes, single: bool) -> dict[str, Ranges]:
    batch = (1, sizes.max_batch, sizes.max_batch)
    seq_len = (1, math.ceil(sizes.max_seq_len / 2), sizes.max_seq_len)
    capacity = {
        "B": batch,
        "N": (sizes.num_pages,) * 3,
        "M": (sizes.pages_per_seq,) * 3,
        "maxPos": (sizes.max_positions,) * 3,
    }
    if single:
        return {SINGLE: capacity | {"S": seq_len, "start": (0, 0, sizes.max_batch)}}
    return {
        PREFILL: capacity | {"S": seq_len, "start": (0, 0, 0)},
        DECODE: capacity | {"S": (1, 1, 1), "start": batch},
    }


def _applicable(ranges: Mapping[str, Ranges], fixed: Mapping[str, int]) -> dict[str, Ranges]:
    """The profiles that a graph with fixed dims can run: one exported for 12 tokens has no decode."""
    kept: dict[str, Ranges] = {}
    for name, symbols in ranges.items():
        if all(symbols[s][0] <= value <= symbols[s][2] for s, value in fixed.items() if s in symbols):
            kept[name] = {**symbols, **{s: (v, v, v) for s, v in fixed.items()}}
    if not kept:
        sizes = ", ".join(f"{symbol} = {value}" for symbol, value in fixed.items())
        raise InputError("graph dims", sizes, "sizes that prefill or decode allows", "export with dynamic dims")
    return kept


def _derive(model: PatchedModel, name: str, ranges: Ranges) -> Shapes:
    dims = model.inputs[name].dims
    if dims is None:
        raise _unknown(model, name)
    axes = []
    for dim, symbol in zip(dims, model.symbols[name], strict=True):
        if isinstance(dim, int):
            axes.append((dim, dim, dim))
        elif symbol is not None and symbol in ranges:
            axes.append(ranges[symbol])
        else:
            raise _unknown(model, name)
    return Shapes(*((tuple(axis[k] for axis in axes)) for k in range(3)))


def _unknown(model: PatchedModel, name: str) -> InputError:
    dims = model.inputs[name].dims
    spelled = _spell(tuple("?" if d is None else d for d in dims)) if dims is not None else "of unknown rank"
    blank = "[" + ",".join("?" * len(dims or ())) + "]"
    return InputError(
        f"graph input {name}",
        f"shape {spelled}",
        "dims that follow from batch, sequence length, pages and positions",
        f"give its shapes: --profile '{name}:{blank}/{blank}/{blank}'",
    )


_SHAPE = r"\[(?:\s*[0-9]+\s*(?:,\s*[0-9]+\s*)*)?\]"
_OVERRIDE = re.compile(rf"(?P<target>.+):\s*(?P<min>{_SHAPE})/(?P<opt>{_SHAPE})/(?P<max>{_SHAPE})")


def _parse_overrides(
    overrides: Sequence[str], model: PatchedModel, profiles: tuple[str, ...]
) -> dict[tuple[str, str], Shapes]:
    """(profile, input) -> shapes; an override that names its profile wins over one that does not."""
    general: dict[tuple[str, str], Shapes] = {}
    specific: dict[tuple[str, str], Shapes] = {}
    for text in overrides:
        match = _OVERRIDE.fullmatch(text.strip())
        if match is None:
            raise InputError(
                "--profile",
                text,
                "NAME:[min]/[opt]/[max], such as input_ids:[1,1]/[1,64]/[2,128]",
                "correct the option",
            )
        shapes = Shapes(*(tuple(int(d) for d in re.findall(r"\d+", match[k])) for k in ("min", "opt", "max")))
        target = match["target"]
        profile, _, name = target.partition(":")
        if target in model.inputs:
            general |= {(p, target): shapes for p in profiles}
        elif profile in profiles and name in model.inputs:
            specific[profile, name] = shapes
        else:
            raise InputError(
                "--profile",
                target,
                f"a graph input ({', '.join(model.inputs)}), or PROFILE:INPUT with one of {', '.join(profiles)}",
                "correct the name",
            )
    return general | specific


def _check(profile: str, name: str, shapes: Shapes, model: PatchedModel) -> None:
    dims = model.inputs[name].dims
    where = f"profile {profile}, input {name}"
    for kind, shape in (("min", shapes.min), ("opt", shapes.opt), ("max", shapes.max)):
        if dims is not None and len(shape) != len(dims):
            raise InputError(
                where,
                f"{kind} {_spell(shape)}",
                f"{len(dims)} dims {_spell(tuple(d or '?' for d in dims))}",
                "correct --profile",
            )
    for axis, values in enumerate(zip(shapes.min, shapes.opt, shapes.max, strict=True)):
        low, middle, high = values
        got = f"min {low}, opt {middle}, max {high}"
        if not low <= middle <= high:
            raise InputError(f"{where}, axis {axis}", got, "min <= opt <= max", "correct --profile")
        dim = dims[axis] if dims is not None else None
        if isinstance(dim, int) and {dim} != set(values):
            raise InputError(f"{where}, axis {axis}", got, f"{dim}, which the graph fixes", "correct --profile")
        if high > _INT32_MAX:
            raise InputError(f"{where}, axis {axis}", got, f"at most {_INT32_MAX}", "lower the sizes")


def _check_agreement(profile: Profile, model: PatchedModel) -> None:
    """Dims that stand for one size share at least one value, and the sizes fit each other, as far as overrides go."""
    bounds: dict[str, tuple[int, int]] = {}  # symbol -> least and most of every dim that stands for it
    for name, shapes in profile.shapes.items():
        for axis, symbol in enumerate(model.symbols[name]):
            if symbol is None:
                continue
            low, high = bounds.get(symbol, (0, _INT32_MAX))
            bounds[symbol] = max(low, shapes.min[axis]), min(high, shapes.max[axis])
            if bounds[symbol][0] > bounds[symbol][1]:
                raise InputError(
                    f"profile {profile.name}, input {name}, axis {axis}",
                    f"{shapes.min[axis]} to {shapes.max[axis]}",
                    f"{low} to {high}, as the same size ({symbol}) has in other inputs",
                    "correct --profile, or override all of them",
                )
    most = {symbol: high for symbol, (_, high) in bounds.items()}
    tokens = most.get("S", 0)
    rules = (
        ("kvcache_start_index", most.get("start", 0), most.get("B", _INT32_MAX), "the batch"),
        ("rope_rotary_cos_sin", tokens, most.get("maxPos", _INT32_MAX), "its positions"),
        ("kv_page_table", tokens, most.get("M", _INT32_MAX) * PAGE_SIZE, "the tokens of its pages"),
    )
    for name, size, limit, meaning in rules:
        if size > limit:
            raise InputError(
                f"profile {profile.name}, {name}", f"{size} at most", f"at most {limit}, {meaning}", "correct --profile"
            )


def _spell(shape: Sequence[object]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def profile_table(profiles: Sequence[Profile]) -> str:
    """The profiles as aligned plain text, one line an input."""
    rows = [("profile", "input", "min", "opt", "max")]
    for profile in profiles:
        for name, shapes in profile.shapes.items():
            rows.append((profile.name, name, _spell(shapes.min), _spell(shapes.opt), _spell(shapes.max)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
