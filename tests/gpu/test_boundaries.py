"""Block, budget and page ends through the plugin, batches of unlike lengths, single tokens, padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_trt.paging import SequencePages, flat_pages
from tests.gpu.conftest import RecordError
from tests.support.node import (
    OUTPUT_ULPS,
    POOL_ULPS,
    bits,
    call_inputs,
    deviation,
    dtype_of,
    epsilon,
    geometry_of,
    launch,
    listed_blocks,
    needs_node,
    open_node,
    queries_of,
    same_bits,
    selected_blocks,
    ulps,
)
from tests.support.requirements import needs_oracle

pytestmark = [*needs_node, *needs_oracle, pytest.mark.quick]
BOTH_MODES = pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
BOTH_SURFACES = pytest.mark.parametrize("name", ["real-fp16", "real-bf16"])


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([1, 2, 3], marks=pytest.mark.pitfall(9), id="tail-only"),
        pytest.param([4, 8, 2048], marks=pytest.mark.pitfall(10), id="no-tail"),
        pytest.param([2047, 2048, 2049, 2050, 2051, 2052, 2053], marks=pytest.mark.pitfall(11), id="budget"),
        pytest.param([127, 128, 129, 256], marks=pytest.mark.pitfall(12), id="page-ends"),
    ],
)
@BOTH_SURFACES
def test_decode_at_its_boundaries(name: str, lengths: list[int], record_error: RecordError) -> None:
    """Against the reference; NaN wherever nothing is live, shuffled K and V pages."""
    check(name, lengths, Mode.DECODE, record_error)


@pytest.mark.pitfall(9, 10, 11, 12)
@pytest.mark.parametrize("lengths", [[1, 2, 3, 4, 8, 127, 128, 129, 256], [2053, 2048]], ids=["short", "budget"])
@BOTH_SURFACES
def test_prefill_at_its_boundaries(name: str, lengths: list[int], record_error: RecordError) -> None:
    """A prompt of 2053 tokens has rows of every length up to that; those of 1 to 256 also end there."""
    check(name, lengths, Mode.PREFILL, record_error)


def check(name: str, lengths: list[int], mode: Mode, record_error: RecordError) -> None:
    """One call against the reference."""
    inputs = call_inputs(name, lengths, mode)
    found = deviation(open_node(name, inputs), inputs)
    record_error("output ulps", found.output_ulps, OUTPUT_ULPS)
    record_error("pool ulps", found.pool_ulps, POOL_ULPS)


@pytest.mark.pitfall(9, 11)
@BOTH_SURFACES
def test_up_to_the_budget_decode_is_dense_attention(name: str, record_error: RecordError) -> None:
    """An oracle of its own: PyTorch's attention over all keys and values that the pool holds after the step."""
    import torch

    lengths = [1, 2, 3, 2047, 2050, 2051]
    g, inputs = geometry_of(name), call_inputs(name, lengths, Mode.DECODE)
    context = open_node(name, inputs)
    outputs = context.run(inputs)
    queries = queries_of(context, inputs)
    flat = flat_pages(outputs.present_key_value)
    for row, length in enumerate(lengths):
        pages = SequencePages.of(inputs["kv_page_table"], row, g.head_size)
        key, value = (flat[index(np.arange(length))].astype(np.float64) for index in (pages.key, pages.value))
        q, k, v = (torch.from_numpy(np.ascontiguousarray(x)).cuda() for x in (queries[row].astype(float), key, value))
        k, v = (x.transpose(0, 1).repeat_interleave(g.group_size, 0) for x in (k, v))  # [Hq, length, D]
        dense = torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v, scale=g.scale)[:, 0]
        # softmax weights are rounded to the surface before the product with V, and the output once more
        record_error("ulps", ulps(outputs.attn_output[row, 0], dense.cpu().numpy()), OUTPUT_ULPS)
        assert np.array_equal(selected_blocks(context, row, length), np.arange(length // g.indexer_compress_ratio))


@pytest.mark.pitfall(11)
@BOTH_MODES
def test_the_first_token_past_the_budget_leaves_one_block_out(mode: Mode) -> None:
    """2052 tokens: 512 of 513 blocks, and no tail."""
    inputs = call_inputs("real-fp16", [2052], mode)
    context = open_node("real-fp16", inputs)
    launch(context, inputs)
    blocks = listed_blocks(context)[0]
    chosen = blocks[:512] if mode is Mode.DECODE else blocks[-1]
    assert np.unique(chosen).size == 512
    assert chosen.min() >= 0
    assert chosen.max() <= 512


@pytest.mark.pitfall(10, 12)
@pytest.mark.parametrize("length", [4, 128, 256, 2052])
def test_the_block_that_this_token_completes_is_selectable(length: int) -> None:
    """Its key lies in the V tail of its first token, in the last slot of the page where a page ends; it is listed."""
    name = "real-fp16"
    g, inputs = geometry_of(name), call_inputs(name, [length], Mode.DECODE)
    pages = SequencePages.of(inputs["kv_page_table"], 0, g.head_size)
    query = inputs["index_qk"][0, 0].reshape(-1, g.indexer_head_dim)
    query[:] = query[0]  # every head and the key are one vector, so that the block scores highest
    inputs["indexer_q_norm_gamma"][:] = inputs["indexer_k_norm_gamma"][:] = 0
    flat = flat_pages(inputs["past_key_value"])
    flat[pages.raw_index_key(np.arange(length - 4, length - 1))] = query[0]
    context = open_node(name, inputs)
    outputs = context.run(inputs)
    where = pages.block_key(np.array([length - 4]))
    written = flat_pages(outputs.present_key_value)[where].astype(np.float32)
    assert np.isfinite(written).all(), "no key was written for the completed block"  # the pool held NaN there
    assert selected_blocks(context, 0, length)[-1] == length // 4 - 1
    assert deviation(context, inputs).output_ulps <= OUTPUT_ULPS


@pytest.mark.pitfall(13)
@BOTH_MODES
def test_a_block_key_is_rounded_normed_and_rotated_at_its_first_token(mode: Mode) -> None:
    """Recomputed here step by step; rotation at the last token or a norm before rounding would show."""
    name, length = "real-fp16", 1024
    g, inputs = geometry_of(name), call_inputs(name, [length], mode)
    ratio, width, block = g.indexer_compress_ratio, g.indexer_head_dim, length // g.indexer_compress_ratio - 1
    first = block * ratio
    pages = SequencePages.of(inputs["kv_page_table"], 0, g.head_size)
    if mode is Mode.PREFILL:
        raw = inputs["index_qk"][0, first:length, -width:].astype(np.float32)
    else:
        earlier = flat_pages(inputs["past_key_value"])[pages.raw_index_key(np.arange(first, length - 1))]
        raw = np.concatenate([earlier, inputs["index_qk"][0, :, -width:]]).astype(np.float32)

    def key(position: int, round_first: bool = True) -> Any:
        mean = (raw[0] + raw[1] + raw[2] + raw[3]) / np.float32(4)
        mean = mean.astype(np.float16).astype(np.float32) if round_first else mean
        weight = 1 + inputs["indexer_k_norm_gamma"].astype(np.float32)
        x = mean / np.sqrt((mean * mean).mean() + np.float32(g.rms_norm_eps)) * weight
        cos, sin = np.split(inputs["rope_rotary_cos_sin"][0, position], 2)
        half = cos.size
        y = x.copy()
        y[:half] = x[:half] * cos - x[half : 2 * half] * sin
        y[half : 2 * half] = x[half : 2 * half] * cos + x[:half] * sin
        return y

    context = open_node(name, inputs)
    pool = flat_pages(context.run(inputs).present_key_value)
    stored = pool[pages.block_key(np.array([first]))][0].astype(np.float32)
    expected = key(first)
    step = np.abs(expected).max() * epsilon(dtype_of(name))
    assert np.abs(stored - expected).max() <= 0.51 * step  # rounded once
    assert np.abs(stored - key(length - 1)).max() > 20 * step
    unrounded = np.abs(stored - key(first, round_first=False))
    assert np.abs(stored - expected).sum() < unrounded.sum()


@pytest.mark.pitfall(14)
@pytest.mark.parametrize(
    ("name", "mode"), [("real-fp16", Mode.DECODE), ("group-7", Mode.DECODE), ("group-7", Mode.PREFILL)]
)
def test_rows_of_a_batch_equal_the_rows_alone(name: str, mode: Mode, record_error: RecordError) -> None:
    """Bit for bit in a call of the same shapes; a call of batch 1 may split its sums in another way."""
    lengths = [1, 5000, 2051, 0]
    inputs = call_inputs(name, lengths, mode)
    context = open_node(name, inputs)
    together = context.run(inputs)
    g, lists = context.host.geometry, listed_blocks(context)
    assert not together.attn_output[3].any()
    for row, length in enumerate(lengths[:3]):
        alone = np.where(np.arange(4) == row, length, 0).astype(np.int32)
        rows = launch(context, {"past_key_value": inputs["past_key_value"], "context_lengths": alone})
        assert same_bits(rows[row], together.attn_output[row])
        assert not np.delete(rows, row, axis=0).any()
        single = {key: inputs[key][row : row + 1] for key in ("qkv", "index_qk", "kv_page_table", "context_lengths")}
        single["kvcache_start_index"] = inputs["kvcache_start_index"][row : row + 1]
        one = inputs | single
        other = open_node(name, one)
        record_error("ulps alone in a batch of 1", ulps(launch(other, one)[0], together.attn_output[row]), 1.01)
        chosen = listed_blocks(other)[0]
        if mode is Mode.DECODE:
            count = -(-length // g.indexer_compress_ratio) if length <= g.list_width else g.budget_blocks
            assert np.array_equal(chosen[:count], lists[row, :count])
        else:
            live = max(length - g.list_width, 0)
            assert np.array_equal(chosen[:live], lists[row, :live])


@pytest.mark.pitfall(14)
@BOTH_MODES
def test_a_length_of_zero_leaves_the_pool_alone(mode: Mode) -> None:
    inputs = call_inputs("real-fp16", [0, 0], mode, seq_len=5 if mode is Mode.PREFILL else None)
    inputs["past_key_value"] = np.random.default_rng(0).standard_normal(inputs["past_key_value"].shape, np.float32)
    inputs["past_key_value"] = inputs["past_key_value"].astype(np.float16)
    outputs = open_node("real-fp16", inputs).run(inputs)
    assert not bits(outputs.attn_output).any()
    assert same_bits(outputs.present_key_value, inputs["past_key_value"])


@pytest.mark.pitfall(15)
@BOTH_SURFACES
def test_a_single_token_attends_to_itself(name: str) -> None:
    """A softmax over one token is 1: the output is its value, bit for bit."""
    inputs = call_inputs(name, [1, 1, 0], Mode.PREFILL)
    g = geometry_of(name)
    outputs = open_node(name, inputs).run(inputs)
    value = inputs["qkv"][:2, 0, -g.num_kv_heads * g.head_size :].reshape(2, g.num_kv_heads, g.head_size)
    assert same_bits(outputs.attn_output[:2, 0], value.repeat(g.group_size, 1))
    assert not bits(outputs.attn_output[2]).any()


@pytest.mark.pitfall(15, 16)
@BOTH_SURFACES
def test_padding_never_touches_the_pool(name: str) -> None:
    """Ragged prompts whose padding is NaN, then the same with garbage in it: pool and outputs bit for bit equal."""
    g = geometry_of(name)
    inputs = call_inputs(name, [130, 7], Mode.PREFILL, seq_len=200)
    context = open_node(name, inputs)
    with_nan = context.run(inputs)
    garbage = inputs | {key: np.nan_to_num(inputs[key], nan=3.0) for key in ("qkv", "index_qk")}
    with_garbage = context.run(garbage)
    assert same_bits(with_nan.attn_output, with_garbage.attn_output)
    assert same_bits(with_nan.present_key_value, with_garbage.present_key_value)
    for b, length in enumerate((130, 7)):
        assert not bits(with_nan.attn_output[b, length:]).any()
    live = np.isfinite(with_nan.present_key_value[..., : g.head_size].astype(np.float32)).all((-1, -2))
    assert live.sum() == 2 * 137  # K and V rows of as many tokens; the pool held NaN
