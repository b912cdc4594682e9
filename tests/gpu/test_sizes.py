"""Sizes at which 32-bit offsets, small grids and square workspaces break."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE, Mode
from qsa_trt.paging import empty_pool, flat_pages, page_table
from tests.gpu.conftest import RecordError
from tests.support.cases import pieces, random_inputs, start_index
from tests.support.node import (
    OUTPUT_ULPS,
    POOL_ULPS,
    Inputs,
    bits,
    call_inputs,
    dtype_of,
    geometry_of,
    launch,
    listed_blocks,
    needs_node,
    open_node,
    same_bits,
    selected_blocks,
    token,
    ulps,
)
from tests.support.spot_rows import SpotRows

pytestmark = needs_node
REAL = "real-fp16"
LARGE = 2**31


@pytest.mark.pitfall(20)
def test_a_pool_beyond_two_billion_elements(record_error: RecordError) -> None:
    """Live pages first and last, in prefill and the step after it: the bits of a small pool, nothing else written."""
    small = call_inputs(REAL, [2501], Mode.PREFILL, spare_pages=0, poison=False)
    small["context_lengths"][:] = 2500
    g, slots = geometry_of(REAL), small["kv_page_table"].shape[2]
    pages = 11_000
    ids = np.where(np.arange(slots) % 2, pages - 1 - np.arange(slots) // 2, np.arange(slots) // 2)
    table = np.stack([ids, pages + ids[::-1]])[None].astype(np.int32)
    pool = np.zeros((2, pages, PAGE_SIZE, g.num_kv_heads, g.pool_width), np.float16)
    assert pool.size > LARGE
    large = small | {"past_key_value": pool, "kv_page_table": table}
    contexts = [open_node(REAL, inputs, inputs | token(inputs, [0])) for inputs in (small, large)]
    for call in (None, token(small, [2500])):
        one, other = (
            launch(context, inputs if call is None else call)
            for context, inputs in zip(contexts, (small, large), strict=True)
        )
        assert same_bits(one, other)
    after = contexts[1].read().present_key_value
    flat = flat_pages(after)
    assert same_bits(flat[table[0]], flat_pages(contexts[0].read().present_key_value)[small["kv_page_table"][0]])
    flat[table[0]] = 0
    assert not after.view(np.uint64).any(), "a page that no sequence owns was written"
    record_error("elements in units of 2^31", after.size / LARGE, None)


@pytest.mark.pitfall(8, 20, 21)
def test_a_prompt_of_131072_tokens(record_error: RecordError) -> None:
    """Rows times blocks pass 2^31. Spot rows against the reference, on the pool that the call wrote."""
    seq_len, length = 131_072, 131_069
    rng, g = np.random.default_rng(3), geometry_of(REAL)
    slots = seq_len // PAGE_SIZE
    inputs = call_inputs(REAL, [1], Mode.PREFILL, max_positions=seq_len) | {
        "qkv": pieces(rng, (1, seq_len, g.qkv_width), np.float16),
        "index_qk": pieces(rng, (1, seq_len, g.index_width), np.float16),
        "past_key_value": empty_pool(g, slots, np.float16, np.nan),
        "context_lengths": np.array([length], np.int32),
        "kv_page_table": page_table(1, slots, slots, rng=rng),
    }
    assert seq_len * (seq_len // g.indexer_compress_ratio) > LARGE
    context = open_node(REAL, inputs)
    output = launch(context, inputs)
    lists = listed_blocks(context)[0]
    spot = SpotRows(g, inputs, context.read().present_key_value)
    record_error("workspace GiB", context.host.workspace_size / 2**30, 3.0)
    record_error("pool ulps", spot.pool_ulps(0, np.arange(0, length - 4, 4 * 2999)), POOL_ULPS)
    assert not bits(output[0, length:]).any()
    assert np.isfinite(output[0, :length:97].astype(np.float32)).all()
    for row in (0, 2050, 2051, 2052, 5000, 32_767, 65_535, 65_536, 69_999, 100_001, length - 1):
        chosen = np.arange((row + 1) // 4) if row < g.list_width else lists[row - g.list_width].astype(np.int64)
        record_error("output ulps", spot.output_ulps(0, row, row, chosen, output[0, row]), OUTPUT_ULPS)


@pytest.mark.pitfall(8)
def test_seventy_thousand_sequences(record_error: RecordError) -> None:
    """A token of prompt each, and one of decode: batches beyond 65,535."""
    name, batch = "smallest", 70_000
    g, rng = geometry_of(name), np.random.default_rng(4)
    inputs = call_inputs(name, [1] * batch, Mode.PREFILL, poison=False)
    step = token(inputs, [0] * batch)
    step["context_lengths"][:] = 2
    step["qkv"] = rng.standard_normal(step["qkv"].shape, np.float32).astype(np.float16)
    context = open_node(name, inputs, inputs | step)
    prefill, decode = launch(context, inputs), launch(context, step)
    value = inputs["qkv"][:, :, -g.num_kv_heads * g.head_size :].reshape(batch, 1, g.num_kv_heads, g.head_size)
    assert same_bits(prefill, value.repeat(g.group_size, 2))
    some = np.array([0, 1, 65_535, 65_536, 69_999])
    few = {key: inputs[key][some] for key in ("qkv", "index_qk", "context_lengths")}
    pages = inputs["past_key_value"][:, :5]
    table = np.stack([np.arange(5), np.arange(5, 10)], axis=1)[:, :, None].astype(np.int32)
    few = inputs | few | {"past_key_value": pages, "kv_page_table": table}
    few_step = {key: step[key][some] for key in step}
    other = open_node(name, few, few | few_step)
    launch(other, few)
    record_error("ulps", ulps(decode[some], launch(other, few_step)), 1.01)  # splits may differ with the batch


def long_pool(name: str, pages: int, rng: np.random.Generator) -> NDArray[Any]:
    """A pool of random numbers that is cheap to make: 32 pages, again and again."""
    g = geometry_of(name)
    shape = (2, 32, PAGE_SIZE, g.num_kv_heads, g.pool_width)
    some = rng.standard_normal(shape, np.float32).astype(dtype_of(name))
    return np.concatenate([some] * -(-pages // 32), axis=1)[:, :pages]


def long_decode(name: str, lengths: list[int], slots: int) -> Inputs:
    """A decode call over long contexts: pages in random order, each of one sequence."""
    rng, g = np.random.default_rng(5), geometry_of(name)
    needed = [-(-length // PAGE_SIZE) for length in lengths]
    pages = sum(needed)
    table = np.full((len(lengths), 2, slots), -1, np.int32)
    for plane in (0, 1):
        ids = np.split(rng.permutation(pages) + plane * pages, np.cumsum(needed)[:-1])
        for row, mine in enumerate(ids):
            table[row, plane, : mine.size] = mine
    base = random_inputs(
        g,
        [1],
        Mode.DECODE,
        dtype=dtype_of(name),
        rng=rng,
        max_positions=slots * PAGE_SIZE,
        rotary_dims=64 if name == REAL else None,
    )
    shape = (len(lengths), 1)
    return base | {
        "qkv": rng.standard_normal((*shape, g.qkv_width), np.float32).astype(dtype_of(name)),
        "index_qk": rng.standard_normal((*shape, g.index_width), np.float32).astype(dtype_of(name)),
        "past_key_value": np.ascontiguousarray(long_pool(name, pages, rng)),
        "context_lengths": np.array(lengths, np.int32),
        "kvcache_start_index": start_index(Mode.DECODE, lengths),
        "kv_page_table": table,
    }


@pytest.mark.pitfall(1, 8)
def test_a_context_of_a_million_tokens(record_error: RecordError) -> None:
    """262,143 blocks, most of them tied with others, next to a short row. Both against the reference."""
    lengths = [2**20 - 1, 8190]
    inputs = long_decode(REAL, lengths, 8192)
    context = open_node(REAL, inputs)
    output = launch(context, inputs)
    spot = SpotRows(geometry_of(REAL), inputs, inputs["past_key_value"])
    for row, length in enumerate(lengths):
        spot.write(row, 0, length - 1)
        chosen = selected_blocks(context, row, length)
        record_error("output ulps", spot.output_ulps(row, 0, length - 1, chosen, output[row, 0]), OUTPUT_ULPS)


@pytest.mark.pitfall(20)
def test_rows_times_blocks_beyond_two_billion_in_decode(record_error: RecordError) -> None:
    """4200 rows in tables of a million tokens: the scores of the last row lie past 2^31 elements."""
    name, slots = "smallest", 8192
    lengths = [2**20 - 1] + [1] * 4198 + [2**20 - 3]
    inputs = long_decode(name, lengths, slots)
    g = geometry_of(name)
    assert len(lengths) * (slots * PAGE_SIZE // g.indexer_compress_ratio) > LARGE
    context = open_node(name, inputs)
    output = launch(context, inputs)
    value = inputs["qkv"][1:-1, :, -g.head_size :].reshape(-1, 1, 1, g.head_size)
    assert same_bits(output[1:-1], value)
    spot = SpotRows(g, inputs, inputs["past_key_value"])
    for row in (0, len(lengths) - 1):
        spot.write(row, 0, lengths[row] - 1)
        chosen = selected_blocks(context, row, lengths[row])
        record_error("output ulps", spot.output_ulps(row, 0, lengths[row] - 1, chosen, output[row, 0]), OUTPUT_ULPS)
    record_error("workspace GiB", context.host.workspace_size / 2**30, None)


@pytest.mark.pitfall(11)
def test_a_prompt_past_a_budget_of_8192(record_error: RecordError) -> None:
    """4096 blocks of two tokens: the first sparse rows, and the last."""
    name = "budget-8192"
    g, rng = geometry_of(name), np.random.default_rng(6)
    length = g.indexer_budget + 300
    slots = -(-length // PAGE_SIZE)
    inputs = call_inputs(name, [1], Mode.PREFILL, max_positions=slots * PAGE_SIZE) | {
        "qkv": pieces(rng, (1, length, g.qkv_width), np.float16),
        "index_qk": pieces(rng, (1, length, g.index_width), np.float16),
        "past_key_value": empty_pool(g, slots, np.float16, np.nan),
        "context_lengths": np.array([length], np.int32),
        "kv_page_table": page_table(1, slots, slots, rng=rng),
    }
    context = open_node(name, inputs)
    output = launch(context, inputs)
    lists = listed_blocks(context)[0]
    spot = SpotRows(g, inputs, context.read().present_key_value)
    record_error("pool ulps", spot.pool_ulps(0, np.arange(0, length - 2, 2 * 401)), POOL_ULPS)
    for row in (0, 1, 8191, 8192, 8193, 8194, 8300, length - 1):
        chosen = np.arange((row + 1) // 2) if row < g.list_width else lists[row - g.list_width].astype(np.int64)
        record_error("output ulps", spot.output_ulps(0, row, row, chosen, output[0, row]), OUTPUT_ULPS)
