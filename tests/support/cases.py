"""Geometries and well-formed random inputs that tests of the reference, the ONNX body and the kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qsa_plugin.contract import PAGE_SIZE, Geometry, Mode
from qsa_trt.paging import SequencePages, blank_dead_entries, empty_pool, flat_pages, page_table, pages_for
from qsa_trt.rope import default_inv_freq, rope_table

Array = NDArray[Any]
INT32_MAX = np.iinfo(np.int32).max


def geometry(heads: str, head_size: int, indexer: str, budget: int, ratio: int, **more: Any) -> Geometry:
    """`geometry("24/2", 256, "4x128", 2048, 4)`: query/KV heads, head size, indexer heads x dim, budget, ratio."""
    q_heads, kv_heads = map(int, heads.split("/"))
    index_heads, index_dim = map(int, indexer.split("x"))
    return Geometry(q_heads, kv_heads, head_size, index_heads, index_dim, budget, ratio, **more)


#: Qwen3.8-Flash-Next.
REAL = geometry("24/2", 256, "4x128", 2048, 4)
#: The real model's shape in small: grouped heads, ratio 4, a budget that short contexts pass.
SMALL = geometry("4/2", 16, "2x8", 32, 4)
#: One of everything; the budget is one block.
TINY = geometry("1/1", 8, "1x8", 4, 4)
#: What each covers: REAL and SMALL aside, no grouping, one KV head, an indexer wider than the head, other ratios.
GEOMETRIES: dict[str, Geometry] = {
    "real": REAL,
    "small": SMALL,
    "tiny": TINY,
    "multi-head": geometry("3/3", 32, "4x16", 48, 4),
    "multi-query": geometry("8/1", 16, "3x32", 64, 4),
    "ratio-1": geometry("2/1", 16, "2x16", 24, 1),
    "ratio-2": geometry("4/2", 24, "2x12", 20, 2),
    "ratio-8": geometry("6/2", 16, "1x16", 40, 8),
    "ratio-16": geometry("4/2", 16, "2x16", 64, 16, attention_scale=0.3, rms_norm_eps=1e-5),
}


def default_rotary(geometry: Geometry) -> int:
    """An even number of rotary dims that fits both kinds of heads: a quarter of the head, as in the real model."""
    return max(2, min(geometry.head_size // 4, geometry.indexer_head_dim) // 2 * 2)


def random_inputs(
    geometry: Geometry,
    lengths: Sequence[int],
    mode: Mode,
    *,
    dtype: DTypeLike = np.float32,
    rng: np.random.Generator,
    seq_len: int | None = None,
    pages_per_seq: int | None = None,
    spare_pages: int = 1,
    max_positions: int | None = None,
    rotary_dims: int | None = None,
    theta: float = 1e4,
    shuffle: bool = True,
    poison: bool = False,
    quick: bool = False,
) -> dict[str, Array]:
    """The eleven inputs of one call, well-formed: independent page ids, right padding, unlike norm weights.

    A decode call finds random state (keys, values, block keys, raw keys of the open block) in its pool, as if
    `lengths - 1` tokens had gone before.

    Args:
        geometry: the node's attributes.
        lengths: `context_lengths`; in decode the new token included.
        mode: prefill or decode.
        dtype: surface dtype.
        rng: source of everything random.
        seq_len: S in prefill; default the longest length.
        pages_per_seq: M; default what the longest length needs.
        spare_pages: pages that belong to no sequence.
        max_positions: rows of the rope table; default M * P.
        rotary_dims: default `default_rotary(geometry)`.
        theta: rope base.
        shuffle: shuffle the page ids, K and V independently.
        poison: NaN in padding and inactive activations and in every pool element that the contract does not call live;
            INT_MAX in page table entries past the length.
        quick: draw large tensors from one run of random numbers, each row from another place: ten times as fast.
    """
    draw = pieces if quick else _normal
    longest = max(*lengths, 1)
    seq_len = 1 if mode is Mode.DECODE else longest if seq_len is None else seq_len
    pages_per_seq = pages_for(max(longest, seq_len)) if pages_per_seq is None else pages_per_seq
    num_pages = len(lengths) * pages_per_seq + spare_pages
    table = page_table(len(lengths), pages_per_seq, num_pages, rng=rng if shuffle else None)
    pool = empty_pool(geometry, num_pages, dtype, np.nan if poison else 0.0)
    qkv = draw(rng, (len(lengths), seq_len, geometry.qkv_width), dtype)
    index_qk = draw(rng, (len(lengths), seq_len, geometry.index_width), dtype)
    if mode is Mode.DECODE:
        _fill_history(geometry, pool, table, [length - 1 for length in lengths], rng, draw)
    if poison:
        for b, length in enumerate(lengths):
            live = min(length, seq_len)
            qkv[b, live:] = index_qk[b, live:] = np.nan
    rotary_dims = default_rotary(geometry) if rotary_dims is None else rotary_dims
    max_positions = pages_per_seq * PAGE_SIZE if max_positions is None else max_positions
    d, index_d = geometry.head_size, geometry.indexer_head_dim
    return {
        "qkv": qkv,
        "index_qk": index_qk,
        "past_key_value": pool,
        "context_lengths": np.array(lengths, np.int32),
        "rope_rotary_cos_sin": rope_table(max_positions, default_inv_freq(rotary_dims, theta)),
        "kvcache_start_index": start_index(mode, lengths),
        "kv_page_table": blank_dead_entries(table, np.array(lengths), INT32_MAX if poison else -1),
        "q_norm_gamma": 1 + _normal(rng, (d,), dtype) / 4,
        "k_norm_gamma": 1 + _normal(rng, (d,), dtype) / 4,
        "indexer_q_norm_gamma": _normal(rng, (index_d,), dtype) / 4,
        "indexer_k_norm_gamma": _normal(rng, (index_d,), dtype) / 4,
    }


def start_index(mode: Mode, lengths: Sequence[int]) -> NDArray[np.int32]:
    """`kvcache_start_index`: empty in prefill, the past lengths in decode."""
    return np.array([] if mode is Mode.PREFILL else [length - 1 for length in lengths], np.int32)


def decode_step(
    inputs: dict[str, Array], pool: Array, lengths: Sequence[int], qkv: Array, index_qk: Array
) -> dict[str, Array]:
    """The inputs of a decode call that follows the call of `inputs`.

    Args:
        inputs: any earlier call on the same sequences; rope table and gammas are taken from it, and the page table,
            whose entries must be live up to the new lengths.
        pool: `present_key_value` of the call before.
        lengths: total lengths, the new token included.
        qkv: `[B, 1, (Hq+2*Hkv)*D]`.
        index_qk: `[B, 1, (Ih+1)*Id]`.
    """
    return inputs | {
        "qkv": qkv,
        "index_qk": index_qk,
        "past_key_value": pool,
        "context_lengths": np.array(lengths, np.int32),
        "kvcache_start_index": start_index(Mode.DECODE, lengths),
    }


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def pieces(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Normal numbers `[..., width]`: rows are pieces of one run of 2**19, at random places."""
    *rows, width = shape
    count = math.prod(rows)
    if count * width < 2**19:
        return _normal(rng, shape, dtype)
    run = _normal(rng, (2**19 + width,), dtype)
    windows = np.lib.stride_tricks.sliding_window_view(run, width)
    return windows[rng.integers(0, 2**19, count)].reshape(shape)


def _fill_history(
    geometry: Geometry,
    pool: Array,
    table: NDArray[np.int32],
    past_lengths: Sequence[int],
    rng: np.random.Generator,
    draw: Callable[..., Array],
) -> None:
    flat, ratio = flat_pages(pool), geometry.indexer_compress_ratio
    kv_shape = (geometry.num_kv_heads, geometry.head_size)
    for b, length in enumerate(past_lengths):
        pages = SequencePages.of(table, b, geometry.head_size)
        tokens = np.arange(length)
        first_tokens = np.arange(0, length // ratio * ratio, ratio)
        open_tokens = np.arange(len(first_tokens) * ratio, length)
        flat[pages.key(tokens)] = draw(rng, (tokens.size, *kv_shape), pool.dtype)
        flat[pages.value(tokens)] = draw(rng, (tokens.size, *kv_shape), pool.dtype)
        for index in (pages.block_key(first_tokens), pages.raw_index_key(open_tokens)):
            flat[index] = draw(rng, flat[index].shape, pool.dtype)
