"""The whole decode chain on the GPU against the reference: boundaries, poison, batches, graphs, repeatability."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_plugin.specialisation import SPECIALISATIONS, Specialisation
from qsa_trt import device
from tests.gpu.conftest import RecordError
from tests.support.cases import random_inputs
from tests.support.decode import DecodeHost, compare
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu
#: fp32 inside on both sides: one rounding of the output may flip, and one of q or k, which moves a softmax a little.
OUTPUT_ULPS = 2.0
#: A written pool element may round the other way once.
POOL_ULPS = 1.01


def surface_dtype(spec: Specialisation) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(np.float16 if spec.surface == "float16" else ml_dtypes.bfloat16)


def band(spec: Specialisation) -> float:
    """Tie band of the scores: index queries and block keys that round the other way move them by an epsilon."""
    return 9.8e-4 if spec.surface == "float16" else 7.8e-3


def short_lengths(spec: Specialisation) -> list[int]:
    """Around block ends and page ends; 0 is an inactive row."""
    r = spec.indexer_compress_ratio
    return list(dict.fromkeys([1, 2, 3, r - 1, r, 0, r + 1, 2 * r, 33, 65, 127, 128, 129, 255, 256]))


def budget_lengths(spec: Specialisation) -> list[int]:
    """Around the budget, where selection begins, and well past it; few where a row is large."""
    r, budget = spec.indexer_compress_ratio, spec.indexer_budget
    if budget > 2048:
        return [budget + r - 1, budget + r, budget + 2 * r + 1]
    return [budget - 1, budget, budget + r - 1, budget + r, budget + 2 * r + 1, 2 * budget + 77]


def many_rows(spec: Specialisation) -> list[int]:
    """Rows that are scored between rows that are not."""
    r = spec.indexer_compress_ratio
    first, *others = budget_lengths(spec)
    return [0, first, 1, others[-1], r, 129, *others, 0, 2, others[0] + 1, 255]


def host_of(
    name: str, lengths: list[int], seed: int = 7, portable: bool = False, **more: Any
) -> tuple[Specialisation, DecodeHost]:
    spec = SPECIALISATIONS[name]
    inputs = dict(inputs_of(name, tuple(lengths), seed, tuple(more.items())))
    return spec, DecodeHost(spec.geometry, inputs, portable)


@functools.lru_cache(maxsize=1)  # the native and the portable case of a test follow each other
def inputs_of(name: str, lengths: tuple[int, ...], seed: int, more: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    spec = SPECIALISATIONS[name]
    return random_inputs(
        spec.geometry,
        lengths,
        Mode.DECODE,
        dtype=surface_dtype(spec),
        rng=np.random.default_rng(seed),
        rotary_dims=spec.rotary_dims,
        poison=True,
        quick=True,
        **dict(more),
    )


@pytest.mark.pitfall(9, 10, 11, 12, 13, 14, 16)
@pytest.mark.parametrize("lengths_of", [short_lengths, budget_lengths, many_rows])
@pytest.mark.parametrize("name", list(SPECIALISATIONS))
def test_boundaries_match_the_reference(
    name: str, lengths_of: Callable[[Specialisation], list[int]], record_error: RecordError
) -> None:
    """Kinds 9 to 14, 16: all boundaries in one batch, shuffled pages, NaN in all that is not live."""
    spec, host = host_of(name, lengths_of(SPECIALISATIONS[name]))
    deviation = compare(spec.geometry, host.inputs, host.run(), band(spec))
    print(name, lengths_of.__name__, deviation)
    record_error("output ulps", deviation.output_ulps, OUTPUT_ULPS)
    record_error("pool ulps", deviation.pool_ulps, POOL_ULPS)


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("more", [[], [1, 3000, 9001, 0, 2056, 5999]], ids=["few", "many"])
@pytest.mark.parametrize("name", ["real-fp16", "real-bf16", "group-7", "smallest"])
def test_long_contexts_match_the_reference(
    name: str, more: list[int], portable: bool, record_error: RecordError
) -> None:
    """Thousands of blocks to choose from; the path that any device can run too."""
    spec, host = host_of(name, [9000, 20011, 2052, *more], portable=portable)
    deviation = compare(spec.geometry, host.inputs, host.run(), band(spec))
    print(name, deviation)
    record_error("output ulps", deviation.output_ulps, OUTPUT_ULPS)
    record_error("pool ulps", deviation.pool_ulps, POOL_ULPS)


@pytest.mark.pitfall(14)
@pytest.mark.parametrize("lengths", [[1, 5000, 2051, 0], [1, 5000, 2051, 0, 2060, 3, 4000, 2052, 129]], ids=["4", "9"])
def test_rows_of_a_batch_equal_the_rows_alone(lengths: list[int]) -> None:
    """Kind 14, bit for bit. The splits of a row depend on the batch size, so a row alone runs in a batch as wide."""
    batch = len(lengths)
    _, host = host_of("real-fp16", lengths)
    together = host.run()
    for row, length in enumerate(lengths):
        host.buffers["past_key_value"].write(host.inputs["past_key_value"])
        host.buffers["context_lengths"].write(np.where(np.arange(batch) == row, length, 0).astype(np.int32))
        alone = host.run()
        assert np.array_equal(alone.output[row].view(np.uint16), together.output[row].view(np.uint16))
        assert not alone.output[np.arange(batch) != row].any()


@pytest.mark.pitfall(19)
@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("times", [1, 3], ids=["few", "many"])
def test_a_hundred_runs_are_bitwise_equal(times: int, portable: bool) -> None:
    """Kind 19: the merge order is fixed, counters and partials are garbage before each run.

    The lengths do not complete a block, so a step overwrites what it wrote before with the same values.
    """
    _, host = host_of("real-fp16", [33, 65, 1, 7001] * times, portable=portable)
    first = host.run()
    for _ in range(100):
        again = host.run()
        assert np.array_equal(first.output.view(np.uint16), again.output.view(np.uint16))
        assert np.array_equal(first.blocks[3], again.blocks[3])


@pytest.mark.pitfall(25)
@pytest.mark.parametrize("times", [1, 5], ids=["few", "many"])
def test_a_graph_replays_with_other_lengths(times: int) -> None:
    """Kind 25: captured at one length, replayed across the dense/sparse switch; equal to eager, bit for bit."""
    _, host = host_of("real-fp16", [6000, 6000] * times)
    graph = host.stream.capture(host.enqueue)
    assert graph.nodes == 2
    for lengths in ([1, 2], [2051, 2052], [2053, 127], [6000, 1], [4, 0], [5999, 6000]):
        host.buffers["context_lengths"].write(np.array(lengths * times, np.int32))
        host.buffers["past_key_value"].write(np.nan_to_num(host.inputs["past_key_value"]))
        eager = host.run()
        host.buffers["past_key_value"].write(np.nan_to_num(host.inputs["past_key_value"]))
        host.output.poison()
        host.workspace.poison()
        device.synchronize()
        graph.launch()
        host.stream.synchronize()
        replayed = host.result()
        assert np.array_equal(eager.output.view(np.uint16), replayed.output.view(np.uint16))
        assert np.array_equal(eager.pool.view(np.uint16), replayed.pool.view(np.uint16))


@pytest.mark.pitfall(24, 25)
@pytest.mark.parametrize("times", [1, 5], ids=["few", "many"])
def test_an_enqueue_captured_behind_a_copy_sees_what_was_copied(times: int) -> None:
    """Kinds 24 and 25: the first kernel may start early behind a kernel, and must wait behind anything else."""
    from cuda.bindings import driver

    _, host = host_of("real-fp16", [6000, 2500] * times)
    backup = device.Buffer.of(np.nan_to_num(host.inputs["past_key_value"]))
    pool = host.buffers["past_key_value"]

    def copy_and_enqueue() -> None:
        device.check(driver.cuMemcpyDtoDAsync(pool.address, backup.address, backup.nbytes, host.stream.handle))
        host.enqueue()

    pool.write(np.nan_to_num(host.inputs["past_key_value"]))
    eager = host.run()
    graph = host.stream.capture(copy_and_enqueue)
    for _ in range(20):
        pool.poison()
        host.output.poison()
        host.workspace.poison()
        device.synchronize()
        graph.launch()
        host.stream.synchronize()
        replayed = host.result()
        assert np.array_equal(eager.output.view(np.uint16), replayed.output.view(np.uint16))
        assert np.array_equal(eager.pool.view(np.uint16), replayed.pool.view(np.uint16))


@pytest.mark.pitfall(25)
@pytest.mark.parametrize("times", [1, 6], ids=["few", "many"])
def test_a_thousand_replays_are_equal(times: int) -> None:
    """Kind 25. Neither length completes a block, so a step overwrites its own pool rows with the same values."""
    _, host = host_of("real-fp16", [6001, 33] * times)
    first = host.run()
    graph = host.stream.capture(host.enqueue)
    for _ in range(1000):
        graph.launch()
    host.stream.synchronize()
    last = host.result()
    assert np.array_equal(first.output.view(np.uint16), last.output.view(np.uint16))
    assert np.array_equal(first.pool.view(np.uint16), last.pool.view(np.uint16))


@pytest.mark.pitfall(17)
def test_forbidden_device_values_store_zeros_and_write_nothing() -> None:
    """Kind 17: too long for the page table or the rope table, negative, live page ids out of range."""
    spec, host = host_of("group-1", [300, 200, 100, 50, 290, 299], max_positions=299)
    lengths = np.array([300, 400, -5, 50, 290, 299], np.int32)
    table = host.inputs["kv_page_table"].copy()
    pages = host.inputs["past_key_value"].shape[1]
    table[3, 0, 0] = pages  # a K id in V's range
    table[4, 1, 2] = pages - 1  # a V id in K's range, in a page that is only read
    host.inputs |= {"context_lengths": lengths, "kv_page_table": table}
    host.buffers["context_lengths"].write(lengths)
    host.buffers["kv_page_table"].write(table)
    result = host.run()
    assert not result.output[:5].any()
    assert result.output[5].any()
    compare(spec.geometry, host.inputs, result, band(spec))


@pytest.mark.pitfall(18)
def test_chosen_scale_and_large_values() -> None:
    """Kind 18: dots beyond 65,504 stay finite."""
    spec, host = host_of("group-16", [3000, 700])
    host.inputs["q_norm_gamma"] = np.full_like(host.inputs["q_norm_gamma"], 200)
    host.buffers["q_norm_gamma"].write(host.inputs["q_norm_gamma"])
    result = host.run()
    assert np.isfinite(result.output.astype(np.float32)).all()
    assert compare(spec.geometry, host.inputs, result, band(spec)).rows_with_other_sets <= 1


@pytest.mark.pitfall(22)
def test_long_request_after_a_short_one_in_the_same_pages() -> None:
    """Kind 22, decode's half: 40 steps from a stale pool equal 40 steps from a NaN pool."""
    spec = SPECIALISATIONS["budget-odd-blocks"]
    _, host = host_of("budget-odd-blocks", [90])
    start = host.inputs["past_key_value"]
    stale = np.where(np.isnan(start), np.random.default_rng(3).standard_normal(start.shape), start).astype(start.dtype)
    outputs = []
    for pool in (start, stale):
        host.buffers["past_key_value"].write(pool)
        steps = []
        for length in range(90, 128):
            host.buffers["context_lengths"].write(np.array([length], np.int32))
            steps.append(host.run().output)
        outputs.append(np.stack(steps))
    assert np.isfinite(outputs[0]).all()
    assert np.array_equal(outputs[0], outputs[1])
    assert spec.indexer_budget < 90
