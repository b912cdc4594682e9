"""Which blocks a row attends to, through the plugin, where the scores are known exactly; and what choosing costs."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_trt.reference import select_blocks
from tests.gpu.conftest import RecordError
from tests.support.node import (
    Inputs,
    call_inputs,
    geometry_of,
    launch,
    listed_blocks,
    needs_node,
    open_node,
    prompt,
    same_bits,
    selected_blocks,
    token,
)
from tests.support.scores import best, distributions, set_scores
from tests.support.timing import microseconds

pytestmark = needs_node
REAL = "real-fp16"


def decode_call(name: str, length: int, rows: int) -> Inputs:
    """Rows of one length; the keys and values are zeros, for only the choice is looked at."""
    from tests.support.cases import random_inputs

    inputs = random_inputs(
        geometry_of(name),
        [1] * rows,
        Mode.DECODE,
        dtype=np.float16,
        rng=np.random.default_rng(0),
        pages_per_seq=-(-length // 128),
        rotary_dims=64,
    )
    pages = inputs["past_key_value"].shape[1]
    slots = np.arange(rows * -(-length // 128), dtype=np.int32).reshape(rows, -1)
    table = np.stack([slots, slots + pages], axis=1)
    return inputs | {"kv_page_table": table, "context_lengths": np.full(rows, length, np.int32)}


@pytest.mark.quick
@pytest.mark.pitfall(1, 3, 5)
@pytest.mark.parametrize("blocks", [513, 4112, 16_448])
def test_exactly_the_best_blocks(blocks: int) -> None:
    """One row a distribution; the length leaves a tail, so that no block key is written. Two runs."""
    cases = distributions(blocks)
    g, inputs = geometry_of(REAL), decode_call(REAL, blocks * 4 + 1, len(cases))
    for row, scores in enumerate(cases.values()):
        set_scores(inputs, g, row, scores)
    context = open_node(REAL, inputs)
    first = launch(context, inputs)
    lists = listed_blocks(context)
    assert same_bits(launch(context), first)
    assert np.array_equal(listed_blocks(context)[:, : g.budget_blocks], lists[:, : g.budget_blocks])
    for row, (name, scores) in enumerate(cases.items()):
        assert np.array_equal(lists[row, : g.budget_blocks], best(scores, g.budget_blocks)), f"{name}, {blocks} blocks"


@pytest.mark.quick
@pytest.mark.pitfall(3)
@pytest.mark.parametrize("kind", ["all equal", "all negative"])
def test_without_a_difference_the_first_blocks_are_taken(kind: str) -> None:
    g, inputs = geometry_of(REAL), decode_call(REAL, 8001, 1)
    set_scores(inputs, g, 0, distributions(2000)[kind])
    context = open_node(REAL, inputs)
    launch(context, inputs)
    assert np.array_equal(selected_blocks(context, 0, 8001), np.arange(512))


@pytest.mark.quick
@pytest.mark.pitfall(3)
def test_of_tied_blocks_the_lowest_ids_are_taken() -> None:
    """400 high, 150 tied: the 112 lowest of the tied."""
    scores = distributions(2000)["400 high, 150 tied"]
    g, inputs = geometry_of(REAL), decode_call(REAL, 8001, 1)
    set_scores(inputs, g, 0, scores)
    context = open_node(REAL, inputs)
    launch(context, inputs)
    chosen = selected_blocks(context, 0, 8001)
    assert np.isin(np.flatnonzero(scores == 2), chosen).all()
    assert np.array_equal(chosen[scores[chosen] == 1], np.flatnonzero(scores == 1)[:112])


@pytest.mark.quick
@pytest.mark.pitfall(5)
@pytest.mark.parametrize("name", ["head-64", "group-7"])
def test_a_nan_query_or_key_has_one_outcome(name: str) -> None:
    """A query of NaN scores NaN everywhere: the lowest ids. A NaN key is never ahead of a finite one. Both modes."""
    g = geometry_of(name)
    length = g.indexer_budget + 203
    inputs = call_inputs(name, [length, length], Mode.PREFILL)
    ratio, count = g.indexer_compress_ratio, g.budget_blocks
    inputs["index_qk"][0, length - 1, :-1] = np.nan  # the last query of the first sequence
    inputs["index_qk"][1, 40, -g.indexer_head_dim :] = np.nan  # a key of the second
    context = open_node(name, inputs, inputs | token(inputs, [0, 0]))
    launch(context, inputs)
    lists = listed_blocks(context)
    last = length - 1 - g.list_width
    assert np.array_equal(lists[0, last], np.arange(count))
    assert not (lists[1, : last + 1] == 40 // ratio).any()
    launch(context, prompt(inputs, [length - 1, length - 1]))
    launch(context, token(inputs, [length - 1, length - 1]))
    for row in (0, 1):
        assert np.array_equal(selected_blocks(context, row, length), lists[row, last])


@pytest.mark.quick
@pytest.mark.pitfall(4)
@pytest.mark.parametrize("name", ["head-64", "group-7", "ratio-8"])
def test_prefill_and_decode_choose_the_same_blocks_among_ties(name: str) -> None:
    """Keys from five vectors, the same in every block of their kind and untouched by RoPE: hundreds of exact ties."""
    g = geometry_of(name)
    start, steps = g.indexer_budget + 60, 40
    inputs = call_inputs(name, [start + steps], Mode.PREFILL)
    rng, ratio, dim = np.random.default_rng(1), g.indexer_compress_ratio, g.indexer_head_dim
    kinds = np.zeros((5, dim), np.float32)
    kinds[:, dim - 2 :] = [[1, 0], [3, 4], [1, 2], [-1, 0], [0, 1]]
    of_block = rng.integers(0, 5, -(-(start + steps) // ratio))
    keys = kinds[of_block].repeat(ratio, 0)[: start + steps]
    inputs["index_qk"][0, :, -dim:] = keys.astype(inputs["index_qk"].dtype)
    inputs["index_qk"][0, :, :-dim] = np.tile(kinds[2], g.indexer_n_heads).astype(inputs["index_qk"].dtype)
    context = open_node(name, inputs, inputs | token(inputs, [0]))
    launch(context, inputs)
    lists = listed_blocks(context)[0]
    # (3, 4) and (1, 2) lie close to the query (1, 2); (-1, 0) scores zero
    direction = kinds[:, dim - 2 :] / np.linalg.norm(kinds[:, dim - 2 :], axis=1, keepdims=True)
    scores = np.maximum(direction @ direction[2], 0)
    launch(context, prompt(inputs, [start]))
    for at in range(start, start + steps):
        launch(context, token(inputs, [at]))
        chosen, visible = selected_blocks(context, 0, at + 1), (at + 1) // ratio
        assert np.array_equal(chosen, np.sort(select_blocks(scores[of_block[:visible]], g.budget_blocks)))
        if at >= g.list_width:
            assert np.array_equal(chosen, lists[at - g.list_width])


@pytest.mark.pitfall(2)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 32_768), (8, 4096)])
def test_a_decode_step_takes_as_long_for_any_distribution(rows: int, blocks: int, record_error: RecordError) -> None:
    """Whole enqueues, for scoring and selection overlap: concentrated at most twice normal."""
    g, inputs = geometry_of(REAL), decode_call(REAL, 4 * blocks + 1, rows)
    context = open_node(REAL, inputs)
    times = {}
    for kind in ("normal", "tiny steps", "one coarse bin", "all equal", "all negative"):
        for row in range(rows):
            set_scores(inputs, g, row, distributions(blocks)[kind])
        context.bind(inputs)
        times[kind] = microseconds(context.stream, context.enqueue)
        record_error(f"us, {kind}, {rows} rows", times[kind], None)
    for kind, time in times.items():
        record_error(f"{kind} over normal", time / times["normal"], 2.0)


@pytest.mark.pitfall(2)
def test_selecting_prefill_rows_takes_as_long_for_any_distribution(record_error: RecordError) -> None:
    """`select_rows` alone: 2048 rows of 8192 blocks."""
    from qsa_plugin.prefill_launchers import PrefillLaunchers
    from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
    from qsa_trt import device

    rows, blocks = 2048, 8192
    device.activate()
    capability = device.compute_capability()
    assert capability is not None
    spec = SPECIALISATIONS[REAL].on(arch_of(capability))
    stages, stream = PrefillLaunchers(spec, spec.geometry), device.Stream()
    counts, lists = device.Buffer.of(np.full(rows, blocks, np.int32)), device.Buffer(rows * 512 * 4)
    scores = device.Buffer(rows * blocks * 4)
    times = {}
    for kind in ("normal", "tiny steps", "one coarse bin", "all equal", "all negative"):
        values = np.maximum(distributions(blocks)[kind], 0).astype(np.float32)
        scores.write(np.tile(values, (rows, 1)))
        device.synchronize()

        def select() -> None:
            stages.select_rows(
                stream.handle,
                scores=scores.address,
                counts=counts.address,
                lists=lists.address,
                rows=rows,
                stride=blocks,
            )

        times[kind] = microseconds(stream, select, steps=5)
        record_error(f"us, {kind}", times[kind], None)
        chosen = lists.read((rows, 512), np.int32)
        assert (chosen == best(values.astype(np.float64), 512)).all()
    for kind, time in times.items():
        record_error(f"{kind} over normal", time / times["normal"], 2.0)
