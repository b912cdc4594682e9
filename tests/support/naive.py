"""A second, deliberately naive implementation of the operator, one token and one head at a time: a test oracle.

Written from the contract's sentences alone, with nothing shared with `qsa_trt.reference` but the geometry. Everything
is float64 between the roundings that the contract names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE, Geometry

Array = NDArray[Any]
Round = Callable[[Array], Array]


@dataclass
class Answer:
    """What one call returns, and what a comparison needs to know about it."""

    output: Array  # [B, S, Hq, D] float64
    pool: Array  # [2, N, P, Hkv, D+Id] float64
    written: Array  # bool, like pool: the elements that this call had to write
    lists: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (row, token) -> attended tokens
    #: (row, token) -> relative distance between the last chosen score and the best one left out; inf where both are
    #: zero, which is exact; absent where all blocks were chosen
    margins: dict[tuple[int, int], float] = field(default_factory=dict)


def rounding(dtype: Any) -> Round:
    """h(): to `dtype` and back to float64; None rounds nothing."""
    if dtype is None:
        return lambda x: x
    return lambda x: np.asarray(x, np.float64).astype(dtype).astype(np.float64)


class _Call:
    def __init__(self, geometry: Geometry, tensors: Mapping[str, Array], h: Round) -> None:
        self.g, self.h = geometry, h
        f64 = {name: np.asarray(value).astype(np.float64) for name, value in tensors.items()}
        self.qkv, self.index_qk, self.pool = f64["qkv"], f64["index_qk"], f64["past_key_value"].copy()
        self.rope = f64["rope_rotary_cos_sin"][0]
        self.table = np.asarray(tensors["kv_page_table"])
        self.lengths = [int(n) for n in np.asarray(tensors["context_lengths"])]
        self.gammas = [f64[n] for n in ("q_norm_gamma", "k_norm_gamma", "indexer_q_norm_gamma", "indexer_k_norm_gamma")]
        self.batch, self.steps = self.qkv.shape[:2]
        self.pages = self.pool.shape[1]
        output = np.zeros((self.batch, self.steps, geometry.num_q_heads, geometry.head_size))
        self.answer = Answer(output, self.pool, np.zeros(self.pool.shape, bool))

    # --- step 1 to 3: one head
    def rotate(self, x: Array, position: int) -> Array:
        half = self.rope.shape[1] // 2
        y = x.copy()
        for i in range(half):
            j, c, s = i + half, self.rope[position, i], self.rope[position, i + half]
            y[i], y[j] = x[i] * c - x[j] * s, x[j] * c + x[i] * s
        return y

    def inverse_rms(self, x: Array) -> float:
        return 1.0 / math.sqrt(sum(float(v) * float(v) for v in x) / len(x) + self.g.rms_norm_eps)

    def main_head(self, x: Array, gamma: Array, position: int) -> Array:
        h = self.h
        return h(self.rotate(h(h(x * self.inverse_rms(x)) * gamma), position))

    def indexer_head(self, x: Array, gamma: Array, position: int) -> Array:
        return self.h(self.rotate(x * self.inverse_rms(x) * (1.0 + gamma), position))

    def block_key(self, raw_keys: list[Array], block: int) -> Array:
        mean = np.zeros(self.g.indexer_head_dim)
        for raw in raw_keys:
            mean = mean + raw
        mean = self.h(mean / len(raw_keys))
        return self.indexer_head(mean, self.gammas[3], block * self.g.indexer_compress_ratio)

    # --- the pool
    def place(self, plane: int, row: int, token: int) -> tuple[int, int, int]:
        page = int(self.table[row, plane, token // PAGE_SIZE]) - plane * self.pages
        return plane, page, token % PAGE_SIZE

    def store(self, at: tuple[int, int, int], head: int, columns: slice, value: Array) -> None:
        self.pool[(*at, head, columns)] = value
        self.answer.written[(*at, head, columns)] = True

    def raw_of(self, row: int, step: int) -> Array:
        return self.index_qk[row, step, self.g.indexer_n_heads * self.g.indexer_head_dim :]

    def store_main(self, row: int, step: int, token: int) -> None:
        g, d = self.g, self.g.head_size
        for head in range(g.num_kv_heads):
            k_at, v_at = (g.num_q_heads + head) * d, (g.num_q_heads + g.num_kv_heads + head) * d
            key = self.main_head(self.qkv[row, step, k_at : k_at + d], self.gammas[1], token)
            self.store(self.place(0, row, token), head, slice(0, d), key)
            self.store(self.place(1, row, token), head, slice(0, d), self.qkv[row, step, v_at : v_at + d])

    # --- step 4 to 6: one query
    def choose(self, row: int, step: int, token: int) -> list[int]:
        g, r, width = self.g, self.g.indexer_compress_ratio, self.g.indexer_head_dim
        queries = [
            self.indexer_head(self.index_qk[row, step, i * width : (i + 1) * width], self.gammas[2], token)
            for i in range(g.indexer_n_heads)
        ]
        complete = (token + 1) // r
        scored = []
        for block in range(complete):
            kbar = self.pool[(*self.place(1, row, r * block), 0, slice(g.head_size, None))]
            scored.append((-sum(max(0.0, float(q @ kbar)) for q in queries) / math.sqrt(width), block))
        scored.sort()
        kept = min(g.budget_blocks, complete)
        if kept < complete:
            last, next_one = -scored[kept - 1][0], -scored[kept][0]
            self.answer.margins[row, token] = (last - next_one) / last if last else math.inf
        tokens = [r * block + i for _, block in scored[:kept] for i in range(r)]
        return tokens + list(range(r * complete, token + 1))

    def attend(self, row: int, step: int, token: int) -> None:
        g, d = self.g, self.g.head_size
        tokens = self.answer.lists[row, token] = self.choose(row, step, token)
        for head in range(g.num_q_heads):
            kv = head // (g.num_q_heads // g.num_kv_heads)
            query = self.main_head(self.qkv[row, step, head * d : (head + 1) * d], self.gammas[0], token)
            logits = [g.scale * float(query @ self.pool[(*self.place(0, row, t), kv, slice(0, d))]) for t in tokens]
            weights = [math.exp(x - max(logits)) for x in logits]
            total = np.zeros(d)
            for weight, t in zip(weights, tokens, strict=True):
                total = total + weight * self.pool[(*self.place(1, row, t), kv, slice(0, d))]
            self.answer.output[row, step, head] = self.h(total / sum(weights))

    # --- the two modes
    def prefill(self, row: int) -> None:
        g, r = self.g, self.g.indexer_compress_ratio
        tail = slice(g.head_size, None)
        length = max(0, min(self.lengths[row], self.steps))
        for t in range(length):
            self.store_main(row, t, t)
        for block in range(length // r):
            raw = [self.raw_of(row, r * block + i) for i in range(r)]
            self.store(self.place(1, row, r * block), 0, tail, self.block_key(raw, block))
        for t in range(length - length % r, length):
            self.store(self.place(0, row, t), 0, tail, self.raw_of(row, t))
        for t in range(length):
            self.attend(row, t, t)

    def decode(self, row: int) -> None:
        g, r = self.g, self.g.indexer_compress_ratio
        tail = slice(g.head_size, None)
        length, token = self.lengths[row], self.lengths[row] - 1
        if length <= 0 or length > self.table.shape[2] * PAGE_SIZE or length > self.rope.shape[0]:
            return
        for plane in range(2):
            for slot in range(token // PAGE_SIZE + 1):
                if not plane * self.pages <= self.table[row, plane, slot] < (plane + 1) * self.pages:
                    return
        self.store_main(row, 0, token)
        if (token + 1) % r:
            self.store(self.place(0, row, token), 0, tail, self.raw_of(row, 0))
        else:
            first = token + 1 - r
            raw = [self.pool[(*self.place(0, row, t), 0, tail)].copy() for t in range(first, token)]
            kbar = self.block_key([*raw, self.raw_of(row, 0)], first // r)
            self.store(self.place(1, row, first), 0, tail, kbar)
        self.attend(row, 0, token)


def naive_attention(geometry: Geometry, tensors: Mapping[str, Array], h: Round) -> Answer:
    """The operator over the eleven inputs by name; `h` rounds to the surface dtype."""
    call = _Call(geometry, tensors, h)
    decoding = np.asarray(tensors["kvcache_start_index"]).shape[0] > 0
    for row in range(call.batch):
        if decoding:
            call.decode(row)
        else:
            call.prefill(row)
    return call.answer
