"""The whole prefill chain on the GPU against the reference: boundaries, poison, batches, graphs, repeatability."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_plugin.specialisation import SPECIALISATIONS, Specialisation
from qsa_trt import device
from tests.gpu.conftest import RecordError
from tests.support.cases import random_inputs
from tests.support.prefill import PrefillHost, PrefillResult, compare
from tests.support.requirements import needs_gpu, needs_oracle

pytestmark = [*needs_gpu, *needs_oracle]
#: fp32 inside on both sides: one rounding of the output may flip, and one of q or k, which moves a softmax a little.
OUTPUT_ULPS = 2.0
#: A key is rounded twice before RoPE and once after it: two of the three may flip in one element.
POOL_ULPS = 2.0
#: Rows of a sequence of the largest models are large: past the budget only where that is at most so many tokens.
LONGEST_BUDGET = 2048


def surface_dtype(spec: Specialisation):
    import ml_dtypes

    return np.dtype(np.float16 if spec.surface == "float16" else ml_dtypes.bfloat16)


def band(spec: Specialisation) -> float:
    """Tie band of the scores: index queries and block keys that round the other way move them by an epsilon."""
    return 9.8e-4 if spec.surface == "float16" else 7.8e-3


def host_of(
    name: str, lengths: list[int], seed: int = 7, portable: bool = False, **more
) -> tuple[Specialisation, PrefillHost]:
    spec = SPECIALISATIONS[name]
    inputs = dict(inputs_of(name, tuple(lengths), seed, tuple(more.items())))
    return spec, PrefillHost(spec.geometry, inputs, portable)


@functools.lru_cache(maxsize=1)  # the native and the portable case of a test follow each other
def inputs_of(name: str, lengths: tuple[int, ...], seed: int, more: tuple[tuple[str, int], ...]):
    spec = SPECIALISATIONS[name]
    return random_inputs(
        spec.geometry,
        lengths,
        Mode.PREFILL,
        dtype=surface_dtype(spec),
        rng=np.random.default_rng(seed),
        rotary_dims=spec.rotary_dims,
        poison=True,
        quick=True,
        **dict(more),
    )


def check(record_error: RecordError, name: str, lengths: list[int], **more) -> None:
    spec, host = host_of(name, lengths, **more)
    deviation = compare(spec.geometry, host.inputs, host.run(), band(spec))
    print(name, lengths, deviation)
    record_error("output ulps", deviation.output_ulps, OUTPUT_ULPS)
    record_error("pool ulps", deviation.pool_ulps, POOL_ULPS)


def same(one: PrefillResult, other: PrefillResult) -> bool:
    return np.array_equal(one.output.view(np.uint16), other.output.view(np.uint16)) and np.array_equal(
        one.pool.view(np.uint16), other.pool.view(np.uint16)
    )


@pytest.mark.pitfall(9, 10, 11, 12, 14, 15, 16)
@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("name", list(SPECIALISATIONS))
def test_short_prompts_match_the_reference(name: str, portable: bool, record_error: RecordError) -> None:
    """Kinds 9 to 12, 14 to 16: block ends, page ends, an inactive sequence, padding, shuffled pages, NaN around."""
    r = SPECIALISATIONS[name].indexer_compress_ratio
    check(record_error, name, [1, 2, 3, r, 0, r + 1, 2 * r - 1, 127, 128, 129, 256], seq_len=259, portable=portable)


@pytest.mark.pitfall(11)
@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("name", [n for n, s in SPECIALISATIONS.items() if s.indexer_budget <= LONGEST_BUDGET])
def test_prompts_around_and_past_the_budget_match_the_reference(
    name: str, portable: bool, record_error: RecordError
) -> None:
    """Kind 11: the last dense rows, the first sparse ones, a ragged end. Rows of every length lie in the longest."""
    spec = SPECIALISATIONS[name]
    budget = spec.indexer_budget
    check(
        record_error,
        name,
        [budget + spec.indexer_compress_ratio, budget + 203],
        seq_len=budget + 211,
        portable=portable,
    )


@pytest.mark.pitfall(11)
@pytest.mark.parametrize("length", [2050, 2051, 2052])
def test_the_real_budget_boundary(length: int, record_error: RecordError) -> None:
    """Kind 11: prompts that end where sparse rows begin."""
    check(record_error, "real-fp16", [length])


@pytest.mark.parametrize("name", ["real-fp16", "real-bf16"])
def test_long_prompts_match_the_reference(name: str, record_error: RecordError) -> None:
    check(record_error, name, [5003, 3000])


@pytest.mark.pitfall(14)
def test_sequences_of_a_batch_equal_the_sequences_alone() -> None:
    """Kind 14, bit for bit."""
    lengths = [1, 3000, 2051, 0]
    _, host = host_of("real-fp16", lengths)
    together = host.run()
    for row, length in enumerate(lengths):
        host.buffers["context_lengths"].write(np.where(np.arange(4) == row, length, 0).astype(np.int32))
        alone = host.run()
        assert np.array_equal(alone.output[row].view(np.uint16), together.output[row].view(np.uint16))
        assert not alone.output[np.arange(4) != row].any()


def test_runs_are_bitwise_equal() -> None:
    _, host = host_of("real-fp16", [2700, 2300])
    first = host.run()
    for _ in range(20):
        assert same(first, host.run())


@pytest.mark.pitfall(25)
def test_a_graph_replays_with_other_lengths() -> None:
    """Kind 25: captured at one length, replayed across the dense/sparse switch; equal to eager, bit for bit."""
    _, host = host_of("real-fp16", [2600, 2600])
    host.inputs["past_key_value"] = np.nan_to_num(host.inputs["past_key_value"])
    graph = host.stream.capture(host.enqueue)
    assert graph.nodes == 8
    for lengths in ([1, 2], [2051, 2052], [2053, 127], [2600, 1], [4, 0], [2599, 2600]):
        host.buffers["context_lengths"].write(np.array(lengths, np.int32))
        eager = host.run()
        host.prepare()
        graph.launch()
        host.stream.synchronize()
        assert same(eager, host.result())


@pytest.mark.pitfall(17)
def test_forbidden_device_values_store_zeros_and_write_nothing() -> None:
    """Kind 17: lengths past S are clipped, negative ones inactive; a live page id out of range stops its sequence."""
    spec, host = host_of("group-1", [300, 300, 100, 50, 290, 299])
    lengths = np.array([300, 2**31 - 1, -5, 50, 290, 299], np.int32)
    table = host.inputs["kv_page_table"].copy()
    pages = host.inputs["past_key_value"].shape[1]
    table[3, 0, 0] = pages  # a K id in V's range
    table[4, 1, 2] = pages - 1  # a V id in K's range
    host.inputs |= {"context_lengths": lengths, "kv_page_table": table}
    host.buffers["context_lengths"].write(lengths)
    host.buffers["kv_page_table"].write(table)
    result = host.run()
    assert not result.output[2:5].any()
    assert result.output[1].any()
    compare(spec.geometry, host.inputs, result, band(spec))


@pytest.mark.pitfall(18)
def test_large_values_stay_finite() -> None:
    """Kind 18: dots beyond 65,504."""
    spec, host = host_of("group-16", [2300, 700])
    host.inputs["q_norm_gamma"] = np.full_like(host.inputs["q_norm_gamma"], 200)
    host.buffers["q_norm_gamma"].write(host.inputs["q_norm_gamma"])
    deviation = compare(spec.geometry, host.inputs, host.run(), band(spec))
    print(deviation)


@pytest.mark.pitfall(26)
def test_nothing_is_allocated_or_loaded_in_a_capture() -> None:
    """Kind 26: a capture in thread-local mode fails on the first forbidden call."""
    _, host = host_of("group-7", [700])
    graph = host.stream.capture(host.enqueue)
    assert graph.nodes == 8
    eager = host.run()
    host.prepare()
    graph.launch()
    host.stream.synchronize()
    device.check(host.output._driver.cuCtxSynchronize())
    assert same(eager, host.result())
