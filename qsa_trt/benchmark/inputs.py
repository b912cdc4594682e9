"""Inputs of a case, made on the device from small random blocks: gigabytes of them would take the host minutes.

What decides the selection is never repeated within a sequence: indexer queries and keys of a prompt, and block keys of
a context up to 131,072 tokens. Projections of the main heads repeat every 4096 tokens, before RoPE.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import INPUTS, PAGE_SIZE, Geometry, Mode
from qsa_trt import device
from qsa_trt.plugin_host import PluginContext, tensor_itemsize
from qsa_trt.rope import default_inv_freq, rope_table

from .cases import ROTARY_DIMS, THETA, Case
from .overlap import correlation_for, pairwise_equal, raw_index_rows

Array = NDArray[Any]
Shapes = dict[str, tuple[int, ...]]

#: Distributions of decode's block scores.
SCORES = ("normal", "concentrated", "all equal", "five values", "400 high")
_TOKENS = 4096  # of the block of projections
_PAGES = 1031  # of the block of pool pages: 131,072 tokens, and a prime, so that the two planes do not coincide
_RANDOM_PAGES = 61  # of them are random in full, the others in their block keys alone
_POSITIONS = 131072  # of the rope table, which repeats after them


def shapes_of_case(case: Case, geometry: Geometry) -> Shapes:
    """Shapes of all inputs and outputs of one call."""
    g, batch, slots = geometry, case.batch, case.pages_a_sequence
    tokens = case.length if case.mode is Mode.PREFILL else 1
    pool = (2, batch * slots, PAGE_SIZE, g.num_kv_heads, g.pool_width)
    return {
        "qkv": (batch, tokens, g.qkv_width),
        "index_qk": (batch, tokens, g.index_width),
        "past_key_value": pool,
        "context_lengths": (batch,),
        "rope_rotary_cos_sin": (1, slots * PAGE_SIZE, ROTARY_DIMS),
        "kvcache_start_index": (0 if case.mode is Mode.PREFILL else batch,),
        "kv_page_table": (batch, 2, slots),
        "q_norm_gamma": (g.head_size,),
        "k_norm_gamma": (g.head_size,),
        "indexer_q_norm_gamma": (g.indexer_head_dim,),
        "indexer_k_norm_gamma": (g.indexer_head_dim,),
        "attn_output": (batch, tokens, g.num_q_heads, g.head_size),
        "present_key_value": pool,
    }


def device_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Memory that the tensors take; both pools are one."""
    names = [name for name in shapes if name != "present_key_value"]
    return sum(int(np.prod(shapes[name], dtype=np.int64)) * tensor_itemsize(name) for name in names)


def fill(buffer: device.Buffer, block: Array) -> None:
    """Fill a device buffer with repetitions of `block`."""
    from cuda.bindings import driver

    data = np.ascontiguousarray(block).view(np.uint8).reshape(-1)[: buffer.nbytes]
    buffer.write(data)
    done = data.nbytes
    while done < buffer.nbytes:
        size = min(done, buffer.nbytes - done)  # done is a multiple of the block until the last copy
        device.check(driver.cuMemcpyDtoD(buffer.address + done, buffer.address, size))
        done += size


class InputMaker:
    """Binds the inputs of cases, the same whichever cases are run; the random blocks are made once.

    Args:
        geometry: the node's attributes.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def bind(self, context: PluginContext, case: Case) -> None:
        """Place, fill and announce every tensor of the case."""
        context.shapes = shapes_of_case(case, self._geometry)
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        context.bind(self.small(rng, case))
        for name, block in (("qkv", self._projections), ("rope_rotary_cos_sin", self._rope)):
            fill(context.buffers[name], block)
        if case.mode is Mode.DECODE:  # a prefill makes the pool that it reads
            fill(context.buffers["past_key_value"], self._pool(rng, case))
        device.synchronize()  # copies on the device are not waited for, and the context's stream would not

    def small(self, rng: np.random.Generator, case: Case) -> dict[str, Array]:
        """The inputs that are made on the host: all but the projections, the rope table and the pool."""
        shapes = shapes_of_case(case, self._geometry)
        gammas = {tensor.name: _normal(rng, shapes[tensor.name]) / 4 for tensor in INPUTS if "gamma" in tensor.name}
        for name in ("q_norm_gamma", "k_norm_gamma"):
            gammas[name] += 1
        gammas["indexer_q_norm_gamma"] = pairwise_equal(gammas["indexer_q_norm_gamma"], ROTARY_DIMS)
        lengths = np.full(shapes["context_lengths"], context_length(case), np.int32)
        return {name: gamma.astype(np.float16) for name, gamma in gammas.items()} | {
            "index_qk": self._index_rows(rng, case).reshape(shapes["index_qk"]),
            "context_lengths": lengths,
            "kvcache_start_index": lengths[: shapes["kvcache_start_index"][0]] - 1,
            "kv_page_table": page_table(rng, case),
        }

    def _index_rows(self, rng: np.random.Generator, case: Case) -> Array:
        g = self._geometry
        if case.mode is Mode.PREFILL:
            target = case.jaccard
            correlation = 0.0 if target is None else correlation_for(g, case.length, target)
            return raw_index_rows(rng, g, self._rope, case.length, correlation)
        if case.scores == "normal":
            return _normal(rng, (case.batch, g.index_width)).astype(np.float16)
        return np.tile(_direction(g), g.indexer_n_heads + 1).astype(np.float16)

    def _pool(self, rng: np.random.Generator, case: Case) -> Array:
        """Pages of the pool, fp16 `[pages, P, Hkv, D+Id]`, perhaps fewer than it has."""
        if case.scores == "normal":
            return self._pages
        g, plane = self._geometry, case.pages_a_sequence
        pages = np.resize(self._pages, (2 * plane, *self._pages.shape[1:]))
        kept = pages[plane:, :: g.indexer_compress_ratio, 0, g.head_size :]  # [pages, blocks a page, Id] of the V plane
        kept[:] = block_keys(rng, g, case.scores, kept.shape[0] * kept.shape[1]).reshape(kept.shape)
        return pages

    @functools.cached_property
    def _projections(self) -> Array:
        return _normal(np.random.default_rng(0), (_TOKENS, self._geometry.qkv_width)).astype(np.float16)

    @functools.cached_property
    def _rope(self) -> Array:
        return rope_table(_POSITIONS, default_inv_freq(ROTARY_DIMS, THETA))

    @functools.cached_property
    def _pages(self) -> Array:
        g, rng = self._geometry, np.random.default_rng(1)
        random = _normal(rng, (_RANDOM_PAGES, PAGE_SIZE, g.num_kv_heads, g.pool_width)).astype(np.float16)
        pages = np.resize(random, (_PAGES, *random.shape[1:]))
        pages[:, :, 0, g.head_size :] = _normal(rng, (_PAGES, PAGE_SIZE, g.indexer_head_dim))
        return pages


def context_length(case: Case) -> int:
    """Live length of every sequence. With made scores the last block stays open: the kernels make no block key."""
    return case.length if case.scores == "normal" else case.length - 1


def page_table(rng: np.random.Generator, case: Case) -> NDArray[np.int32]:
    """int32 `[B, 2, M]`: live pages shuffled, K and V independently; -1 past them."""
    live, pages = -(-case.length // PAGE_SIZE), case.batch * case.pages_a_sequence
    table = np.full((case.batch, 2, case.pages_a_sequence), -1, np.int32)
    for plane in (0, 1):
        table[:, plane, :live] = rng.permutation(pages)[: case.batch * live].reshape(case.batch, live) + plane * pages
    return table


def block_keys(rng: np.random.Generator, geometry: Geometry, kind: str, count: int) -> Array:
    """Block keys fp16 `[count, Id]` whose scores against the query of `_direction` have this distribution."""
    scale = {
        "concentrated": np.ones(count),
        "all equal": np.ones(count),
        "five values": rng.integers(2, 7, count) / 4,
        "400 high": np.where(rng.permutation(count) < 400, 2.0, 1.0),
    }[kind]
    keys = scale[:, None] * _direction(geometry)
    if kind == "concentrated":  # a thousandth of the score, many steps of fp16 in every element
        keys += 0.01 * _normal(rng, keys.shape)
    return keys.astype(np.float16)


def _direction(geometry: Geometry) -> Array:
    """fp32 `[Id]`: ones where RoPE changes nothing, so that a query along it has a positive product everywhere."""
    return np.where(np.arange(geometry.indexer_head_dim) < ROTARY_DIMS, 0, 1).astype(np.float32)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)
