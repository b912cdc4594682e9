"""The reference against Hugging Face's own `qwen4_exp` attention, live."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE, Mode
from qsa_trt.metrics import BF16_TIE_BAND, FP16_TIE_BAND, row_error, same_index_sets, tie_rows
from qsa_trt.paging import blank_dead_entries, empty_pool, page_table, pages_for
from qsa_trt.reference import qsa_attention
from tests.support.cases import GEOMETRIES, REAL, decode_step, start_index
from tests.support.hf import HfAttention
from tests.support.requirements import needs_oracle

Array = NDArray[Any]
pytestmark = needs_oracle

SMALL_GEOMETRIES = [name for name in GEOMETRIES if name != "real"]
#: Both sides are fp32 and sum in different orders; logits of some tens make 1e-6 of it, the rest is margin.
FP32_BOUND = 1e-5


def prefill_inputs(layer: HfAttention, hidden: Array, lengths: list[int], room: int = 0) -> dict[str, Array]:
    """A prefill call of the layer's weights on a NaN pool with shuffled pages and room for more tokens."""
    pages = pages_for(hidden.shape[1] + room)
    num_pages = len(lengths) * pages
    table = page_table(len(lengths), pages, num_pages, rng=np.random.default_rng(0))
    return layer.contract_inputs(hidden) | {
        "past_key_value": empty_pool(layer.geometry, num_pages, layer.numpy_dtype, np.nan),
        "context_lengths": np.array(lengths, np.int32),
        "kvcache_start_index": start_index(Mode.PREFILL, lengths),
        "kv_page_table": blank_dead_entries(table, np.array(lengths) + room),
    }


def assert_decided(scores: Array, budget_blocks: int) -> None:
    """No row's k-th and next score are so close, without being equal, that another BLAS could order them otherwise."""
    close, equal = (tie_rows(scores, budget_blocks, band) for band in (2e-6, 0))  # 16 ulp of fp32
    assert (close == equal).all(), "choose another seed"


@pytest.mark.parametrize("name", SMALL_GEOMETRIES)
def test_prefill(name: str):
    g, length = GEOMETRIES[name], 200
    layer = HfAttention(g)
    hidden = layer.random_hidden(1, length)
    expected = layer.run(hidden)
    result = qsa_attention(prefill_inputs(layer, hidden, [length]), g)
    assert_decided(result.scores[0], g.budget_blocks)
    assert same_index_sets(result.index_lists, expected.index_lists(g.list_width)).all()
    assert row_error(result.attn_output, expected.attn_output).max() < FP32_BOUND


@pytest.mark.parametrize("name", SMALL_GEOMETRIES)
def test_ragged_batch(name: str):
    g, lengths = GEOMETRIES[name], [129, 1, 140, 0, 66]
    layer = HfAttention(g, seed=2)
    hidden = layer.random_hidden(len(lengths), max(lengths))
    expected = layer.run(hidden, lengths=lengths)
    lists = expected.index_lists(g.list_width)
    inputs = prefill_inputs(layer, hidden, lengths)
    for b, length in enumerate(lengths):
        inputs["qkv"][b, length:] = inputs["index_qk"][b, length:] = np.nan
    result = qsa_attention(inputs, g)
    for b, length in enumerate(lengths):
        assert_decided(result.scores[b], g.budget_blocks)
        live = slice(length)
        assert same_index_sets(result.index_lists[b, live], lists[b, live]).all()
        assert row_error(result.attn_output[b, live], expected.attn_output[b, live]).max(initial=0) < FP32_BOUND
        assert (result.attn_output[b, length:] == 0).all()


@pytest.mark.parametrize("name", SMALL_GEOMETRIES)
@pytest.mark.parametrize("length", [2, 119])
def test_prefill_then_decode(name: str, length: int):
    """24 steps of a batch of two with the module's own cache; from 119 over a page end, from 2 over the budget."""
    g, steps = GEOMETRIES[name], 24
    layer, lengths = HfAttention(g, seed=3), [length, length]
    hidden = layer.random_hidden(2, length + steps)
    cache = layer.new_cache()
    layer.run(hidden[:, :length], cache=cache)
    inputs = prefill_inputs(layer, hidden[:, :length], lengths, room=steps)
    pool = qsa_attention(inputs, g).present_key_value
    for t in range(length, length + steps):
        token = hidden[:, t : t + 1]
        expected = layer.run(token, cache=cache)
        projected = layer.contract_inputs(token)
        step = decode_step(inputs, pool, [t + 1, t + 1], projected["qkv"], projected["index_qk"])
        result = qsa_attention(step, g)
        pool = result.present_key_value
        for b in (0, 1):
            assert_decided(result.scores[b], g.budget_blocks)
        assert same_index_sets(result.index_lists, expected.index_lists(g.list_width)).all()
        assert row_error(result.attn_output, expected.attn_output).max() < FP32_BOUND


@pytest.mark.slow
def test_real_geometry_around_the_budget():
    """24/2 heads of 256, 4 x 128, budget 2048: contexts 2047 to 2053 in prefill and in decode after it."""
    first, total = 2046, 2053
    layer = HfAttention(REAL, theta=1e7, max_positions=17 * PAGE_SIZE)
    hidden = layer.random_hidden(1, total)
    cache = layer.new_cache()
    rows = [layer.run(hidden[:, :first], cache=cache)]
    rows += [layer.run(hidden[:, t : t + 1], cache=cache) for t in range(first, total)]
    lists = np.concatenate([row.index_lists(REAL.list_width)[0] for row in rows])
    outputs = np.concatenate([row.attn_output[0] for row in rows])

    inputs = prefill_inputs(layer, hidden, [total])
    whole = qsa_attention(inputs, REAL)
    assert_decided(whole.scores[0], REAL.budget_blocks)
    assert (lists[first:] >= 0).sum(axis=1).tolist() == [2047, 2048, 2049, 2050, 2051, 2048, 2049]
    assert same_index_sets(whole.index_lists[0], lists).all()
    assert row_error(whole.attn_output[0], outputs).max() < FP32_BOUND

    # Causal: the state that a prefill of the first 2046 tokens leaves is what these rows of the projections give.
    short = inputs | {name: inputs[name][:, :first] for name in ("qkv", "index_qk")}
    pool = qsa_attention(short | {"context_lengths": np.array([first])}, REAL).present_key_value
    for t in range(first, total):
        token = slice(t, t + 1)
        step = decode_step(inputs, pool, [t + 1], inputs["qkv"][:, token], inputs["index_qk"][:, token])
        result = qsa_attention(step, REAL)
        pool = result.present_key_value
        assert same_index_sets(result.index_lists[0], lists[token]).all()
        assert row_error(result.attn_output[0], outputs[token]).max() < FP32_BOUND


@pytest.mark.parametrize("name", SMALL_GEOMETRIES)
@pytest.mark.parametrize(("dtype", "band"), [("float16", FP16_TIE_BAND), ("bfloat16", BF16_TIE_BAND)])
def test_half_precision(name: str, dtype: str, band: float):
    """The module rounds in other places, so blocks within the band of the k-th score may differ, and no others."""
    g, length = GEOMETRIES[name], 150
    layer = HfAttention(g, dtype=dtype)
    hidden = layer.random_hidden(1, length)
    expected = layer.run(hidden)
    lists = expected.index_lists(g.list_width)[0]
    result = qsa_attention(prefill_inputs(layer, hidden, [length]), g)
    same = same_index_sets(result.index_lists[0], lists)
    for row in np.flatnonzero(~same):
        scores = result.scores[0][row, : (row + 1) // g.indexer_compress_ratio]
        kth = np.sort(scores)[-g.budget_blocks]
        differing = np.setxor1d(result.index_lists[0, row], lists[row])
        blocks = np.unique(differing[differing >= 0] // g.indexer_compress_ratio)
        assert np.abs(scores[blocks] - kth).max() <= band * scores.max()
    assert same.mean() > 0.9
    # Cosines, RoPE products, keys, queries and the output: each rounding of the module's adds up to half an epsilon.
    bound = 8 * float(ml_dtypes.finfo(layer.numpy_dtype).eps)
    assert row_error(result.attn_output[0], expected.attn_output[0])[same].max() < bound
