"""The QsaAttention contract in NumPy, readable as its definition.

Prefill and decode are one path: the tokens of this call are written to the pool, and every row then reads the
sequence's keys, values and block keys back from it. All that is stored there was rounded to the surface dtype before,
so reading it back loses nothing.

Notation: T tokens of this call, Hq query heads, Hkv KV heads, D head size, Ih indexer heads, Id indexer head dim,
R compress ratio, G complete blocks, W index list width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qsa_plugin.contract import INPUTS, Call, Geometry, Mode, check_call
from qsa_plugin.errors import InputError

from .paging import SequencePages, flat_pages

Array = NDArray[Any]


@dataclass(frozen=True)
class QsaResult:
    """What one call returns.

    Attributes:
        attn_output: surface `[B, S, Hq, D]`; exact zeros in padding and inactive rows.
        present_key_value: surface `[2, N, P, Hkv, D+Id]`, a new array.
        index_lists: int32 `[B, S, W]`: the tokens each row attends to, -1 to the right. Selected blocks stand in
            order of rank, then the causal tail; only the set is part of the contract.
        scores: one array `[S, G]` a sequence in the inside dtype, G the complete blocks of its live length (0 when it
            is inactive); -inf past each row's complete blocks and in padding rows. `metrics.tie_rows` reads it.
    """

    attn_output: Array
    present_key_value: Array
    index_lists: NDArray[np.int32]
    scores: tuple[Array, ...]


@dataclass(frozen=True)
class Arithmetic:
    """The two dtypes of a call: `compute` inside, `surface` wherever a value is stored."""

    compute: np.dtype[Any]
    surface: np.dtype[Any]

    def h(self, x: Array) -> Array:
        """Round to the surface dtype and hand back in the inside dtype; what is on the surface only changes dtype."""
        return x.astype(self.surface).astype(self.compute)


@dataclass(frozen=True)
class Layer:
    """The tensors of a call that are the same for every sequence, in the inside dtype."""

    geometry: Geometry
    arithmetic: Arithmetic
    q_gamma: Array  # [D], folded to 1+w
    k_gamma: Array  # [D], folded to 1+w
    index_q_gamma: Array  # [Id], 1+w
    index_k_gamma: Array  # [Id], 1+w
    cos: Array  # [maxPos, rotary/2]
    sin: Array  # [maxPos, rotary/2]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sequence in this call, ready for the pool and the scorer."""

    positions: NDArray[np.int64]  # [T]
    q: Array  # [T, Hq, D], normed and roped
    k: Array  # [T, Hkv, D], normed and roped
    v: Array  # [T, Hkv, D]
    index_q: Array  # [T, Ih, Id], normed and roped
    raw_index_k: Array  # [T, Id]


def qsa_attention(
    inputs: Mapping[str, Array],
    geometry: Geometry,
    *,
    compute: DTypeLike = np.float32,
    rounding: DTypeLike | None = None,
) -> QsaResult:
    """Run one call of QsaAttention.

    The pool of `inputs` is never modified. Rows that the device alone can judge are stored as zeros and write
    nothing to the pool: length 0 or less; a decode length beyond the page table or the rope table; a live page id out
    of range (the contract says so for decode; prefill has the same outcome). Page table entries past the length are
    never followed. A score that is NaN ranks below all others, lower block ids first.

    Args:
        inputs: the eleven tensors by their contract names. The shape of `kvcache_start_index` selects the mode.
        geometry: the node's attributes.
        compute: dtype of the arithmetic, float32 or float64.
        rounding: the surface dtype: what h() rounds to, what inputs 0-2 and 7-10 are rounded to on entry and what
            both outputs have. Default: the dtype of `qkv`. float32 or float64 switch rounding off.

    Raises:
        ContractError: shapes that the contract forbids.
        InputError: a `compute` dtype other than these two.
    """
    call = check_call(geometry, {tensor.name: inputs[tensor.name].shape for tensor in INPUTS})
    arithmetic = Arithmetic(_inside_dtype(compute), np.dtype(inputs["qkv"].dtype if rounding is None else rounding))
    layer = _layer(inputs, geometry, arithmetic)
    pool = inputs["past_key_value"].astype(arithmetic.surface, order="C")  # a copy
    output = np.zeros((call.batch, call.seq_len, geometry.num_q_heads, geometry.head_size), arithmetic.surface)
    lists = np.full((call.batch, call.seq_len, geometry.list_width), -1, np.int32)
    scores = []
    with np.errstate(all="ignore"):  # NaN and inf follow the contract's rules, not NumPy's warnings
        for b in range(call.batch):
            positions = live_positions(call, int(inputs["context_lengths"][b]))
            pages = SequencePages.of(inputs["kv_page_table"], b, geometry.head_size)
            if not pages.in_range(len_after(positions), call.num_pages):
                positions = positions[:0]
            rows = slice(positions.size)
            tokens = prepare(layer, inputs["qkv"][b, rows], inputs["index_qk"][b, rows], positions)
            write_pool(layer, pool, pages, tokens)
            live_scores, lists[b, rows], output[b, rows] = attend_rows(layer, pool, pages, tokens)
            scores.append(_padded_rows(live_scores, call.seq_len))
    return QsaResult(output, pool, lists, tuple(scores))


def live_positions(call: Call, context_length: int) -> NDArray[np.int64]:
    """Positions of the tokens that this call computes for one sequence; none where the row is inactive."""
    if call.mode is Mode.PREFILL:
        return np.arange(min(context_length, call.seq_len))
    return np.arange(context_length - 1, context_length) if 0 < context_length <= call.max_kv_len else np.arange(0)


def len_after(positions: NDArray[np.int64]) -> int:
    """Live length of a sequence once the tokens at `positions` are in it."""
    return int(positions[-1]) + 1 if positions.size else 0


def prepare(layer: Layer, qkv: Array, index_qk: Array, positions: NDArray[np.int64]) -> Tokens:
    """Unpack the raw projections of one sequence and apply steps 1 and 2: norm and RoPE.

    Args:
        layer: the call's shared tensors.
        qkv: `[T, (Hq+2*Hkv)*D]`.
        index_qk: `[T, (Ih+1)*Id]`.
        positions: `[T]`.
    """
    g, a = layer.geometry, layer.arithmetic
    heads = a.h(qkv).reshape(-1, g.num_q_heads + 2 * g.num_kv_heads, g.head_size)
    q, k, v = np.split(heads, [g.num_q_heads, g.num_q_heads + g.num_kv_heads], axis=1)
    index_heads = a.h(index_qk).reshape(-1, g.indexer_n_heads + 1, g.indexer_head_dim)
    index_q, raw_index_k = index_heads[:, :-1], index_heads[:, -1]
    cos, sin = layer.cos[positions, None], layer.sin[positions, None]  # [T, 1, rotary/2]
    return Tokens(
        positions,
        q=a.h(rotate(main_norm(q, layer.q_gamma, g.rms_norm_eps, a), cos, sin)),
        k=a.h(rotate(main_norm(k, layer.k_gamma, g.rms_norm_eps, a), cos, sin)),
        v=v,
        index_q=a.h(rotate(rms_norm(index_q, g.rms_norm_eps) * layer.index_q_gamma, cos, sin)),
        raw_index_k=raw_index_k,
    )


def rms_norm(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last dim, without a weight."""
    inv = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.asarray(x * inv)


def main_norm(x: Array, gamma: Array, eps: float, arithmetic: Arithmetic) -> Array:
    """RMSNorm of main query and key heads: rounded before the weight and after it."""
    return arithmetic.h(arithmetic.h(rms_norm(x, eps)) * gamma)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on the first `rotary` dims of `x` in non-interleaved pairs (i, i + rotary/2); the other dims pass.

    `cos` and `sin` broadcast against `x[..., :rotary/2]`.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def pooled_block_keys(layer: Layer, raw_keys: Array, first_tokens: NDArray[np.int64]) -> Array:
    """Step 3: the block key of R raw keys.

    Args:
        layer: the call's shared tensors.
        raw_keys: `[G, R, Id]`.
        first_tokens: `[G]` position of each block's first token, where the block key is rotated.

    Returns:
        `[G, Id]`.
    """
    a, eps = layer.arithmetic, layer.geometry.rms_norm_eps
    total = raw_keys[:, 0]
    for r in range(1, raw_keys.shape[1]):  # in token order: the order of an fp32 sum shows in its last bit
        total = total + raw_keys[:, r]
    mean = a.h(total / a.compute.type(raw_keys.shape[1]))
    normed = rms_norm(mean, eps) * layer.index_k_gamma
    return a.h(rotate(normed, layer.cos[first_tokens], layer.sin[first_tokens]))


def write_pool(layer: Layer, pool: Array, pages: SequencePages, tokens: Tokens) -> None:
    """Store the tokens' keys and values, the block keys they complete, and the raw keys of the block left open."""
    if not tokens.positions.size:
        return
    ratio, flat = layer.geometry.indexer_compress_ratio, flat_pages(pool)
    start, end = int(tokens.positions[0]), len_after(tokens.positions)
    flat[pages.key(tokens.positions)] = tokens.k
    flat[pages.value(tokens.positions)] = tokens.v

    open_block = start // ratio * ratio  # first token of the block that `start` falls in
    earlier = layer.arithmetic.h(flat[pages.raw_index_key(np.arange(open_block, start))])
    raw_keys = np.concatenate([earlier, tokens.raw_index_k])  # tokens open_block .. end-1
    complete = end // ratio * ratio - open_block  # how many of them lie in complete blocks
    first_tokens = np.arange(open_block, open_block + complete, ratio)
    blocks = raw_keys[:complete].reshape(-1, ratio, raw_keys.shape[-1])
    flat[pages.block_key(first_tokens)] = pooled_block_keys(layer, blocks, first_tokens)
    still_open = np.arange(max(open_block + complete, start), end)
    flat[pages.raw_index_key(still_open)] = raw_keys[still_open - open_block]


def attend_rows(
    layer: Layer, pool: Array, pages: SequencePages, tokens: Tokens
) -> tuple[Array, NDArray[np.int32], Array]:
    """Steps 4 to 6 for the rows of one sequence whose tokens are in the pool.

    Returns:
        scores `[T, G]`, index lists `[T, W]` and outputs `[T, Hq, D]`.
    """
    g, h, flat = layer.geometry, layer.arithmetic.h, flat_pages(pool)
    length = len_after(tokens.positions)
    keys = h(flat[pages.key(np.arange(length))]).swapaxes(0, 1)  # [Hkv, length, D]
    values = h(flat[pages.value(np.arange(length))]).swapaxes(0, 1)  # [Hkv, length, D]
    first_tokens = np.arange(length // g.indexer_compress_ratio) * g.indexer_compress_ratio
    scores = block_scores(tokens.index_q, h(flat[pages.block_key(first_tokens)]))
    lists = np.full((tokens.positions.size, g.list_width), -1, np.int32)
    outputs = np.zeros(tokens.q.shape, layer.arithmetic.surface)
    for row, position in enumerate(tokens.positions):
        visible = (int(position) + 1) // g.indexer_compress_ratio
        scores[row, visible:] = -np.inf
        selected = index_list(g, scores[row, :visible], int(position))
        lists[row, : selected.size] = selected
        outputs[row] = attend(tokens.q[row], keys[:, selected], values[:, selected], g.scale)
    return scores, lists, outputs


def block_scores(index_q: Array, block_keys: Array) -> Array:
    """Step 4: sum over indexer heads of max(0, q . kbar), over sqrt(Id).

    Args:
        index_q: `[T, Ih, Id]`.
        block_keys: `[G, Id]`.

    Returns:
        `[T, G]`, every block, visible or not. `einsum` sums each dot in one order, wherever it stands in the batch;
        a BLAS product does not, and would break exact ties.
    """
    total = np.zeros((index_q.shape[0], block_keys.shape[0]), index_q.dtype)
    for head in range(index_q.shape[1]):
        total += np.maximum(np.einsum("td,gd->tg", index_q[:, head], block_keys), 0)  # NaN stays NaN
    return np.asarray(total / index_q.dtype.type(math.sqrt(index_q.shape[-1])))


def select_blocks(scores: Array, count: int) -> NDArray[np.int64]:
    """The `count` best blocks by (score descending, block id ascending); NaN ranks lowest, -0.0 equals +0.0.

    Args:
        scores: `[G]`.
        count: blocks wanted; all are taken where there are no more.

    Returns:
        Block ids in order of rank.
    """
    return np.asarray(np.argsort(-scores, kind="stable")[:count])  # NumPy sorts NaN last


def index_list(geometry: Geometry, scores: Array, position: int) -> NDArray[np.int64]:
    """Step 5: the tokens of the selected blocks, then the causal tail. `scores` holds the visible blocks alone."""
    ratio = geometry.indexer_compress_ratio
    blocks = select_blocks(scores, geometry.budget_blocks)
    in_blocks = blocks[:, None] * ratio + np.arange(ratio)  # [blocks, R]
    return np.concatenate([in_blocks.ravel(), np.arange(scores.size * ratio, position + 1)])


def attend(q: Array, keys: Array, values: Array, scale: float) -> Array:
    """Step 6: softmax attention of one row over its list.

    Args:
        q: `[Hq, D]`.
        keys: `[Hkv, n, D]`.
        values: `[Hkv, n, D]`.
        scale: softmax scale.

    Returns:
        `[Hq, D]`.
    """
    grouped = q.reshape(keys.shape[0], -1, q.shape[-1])  # [Hkv, Hq/Hkv, D]
    logits = grouped @ keys.swapaxes(1, 2) * q.dtype.type(scale)  # [Hkv, Hq/Hkv, n]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray((weights @ values / weights.sum(axis=-1, keepdims=True)).reshape(q.shape))


def _inside_dtype(compute: DTypeLike) -> np.dtype[Any]:
    dtype = np.dtype(compute)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InputError("compute", dtype, "float32 or float64", "choose the dtype of the arithmetic inside")
    return dtype


def _layer(inputs: Mapping[str, Array], geometry: Geometry, arithmetic: Arithmetic) -> Layer:
    h = arithmetic.h
    table = inputs["rope_rotary_cos_sin"][0].astype(arithmetic.compute)  # [maxPos, rotary], never rounded
    cos, sin = np.split(table, 2, axis=-1)
    return Layer(
        geometry,
        arithmetic,
        q_gamma=h(inputs["q_norm_gamma"]),
        k_gamma=h(inputs["k_norm_gamma"]),
        index_q_gamma=1 + h(inputs["indexer_q_norm_gamma"]),
        index_k_gamma=1 + h(inputs["indexer_k_norm_gamma"]),
        cos=cos,
        sin=sin,
    )


def _padded_rows(scores: Array, seq_len: int) -> Array:
    padded = np.full((seq_len, scores.shape[1]), -np.inf, scores.dtype)
    padded[: scores.shape[0]] = scores
    return padded
