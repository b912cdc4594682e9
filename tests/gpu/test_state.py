"""What a pool remembers: pages used again, copied, shared by requests in turn; where the output pool lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import Mode, PoolIO
from qsa_plugin.errors import ContractError
from qsa_trt import device
from qsa_trt.paging import flat_pages, page_table
from qsa_trt.plugin_host import PluginContext
from tests.support.node import (
    Inputs,
    call_inputs,
    geometry_of,
    launch,
    needs_node,
    open_node,
    prompt,
    same_bits,
    same_outputs,
    token,
)

pytestmark = [*needs_node, pytest.mark.quick]
#: 36 tokens of budget, so that a short prompt passes it.
NAME = "budget-odd-blocks"
TOTAL = 170


def request(seed: int, table: Any = None) -> Inputs:
    """One sequence of `TOTAL` tokens as one prefill call; `table` `[1, 2, M]` replaces its pages."""
    whole = call_inputs(NAME, [TOTAL], Mode.PREFILL, seed=seed, pages_per_seq=2, spare_pages=4)
    return whole if table is None else whole | {"kv_page_table": table}


def node(whole: Inputs) -> PluginContext:
    return open_node(NAME, whole, whole | token(whole, [0]))


def generate(context: PluginContext, whole: Inputs, prompt_length: int, pool: Any = None) -> list[Any]:
    """Outputs of a prompt and of every token after it; the pool on the device stays unless `pool` is given."""
    first = prompt(whole, [prompt_length])
    if pool is None:
        del first["past_key_value"]
    else:
        first["past_key_value"] = pool
    outputs = [launch(context, first)]
    return outputs + [launch(context, token(whole, [at])) for at in range(prompt_length, TOTAL)]


def all_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


@pytest.mark.pitfall(22)
def test_a_short_request_in_the_pages_of_a_long_one_equals_a_fresh_pool() -> None:
    """A fills pages, block keys and raw keys; B prefills 9 tokens into them and decodes past the budget."""
    long, short = request(1), request(2)
    fresh = generate(node(short), short, 9, short["past_key_value"])
    used = node(long)
    generate(used, long, 100, long["past_key_value"])
    assert all_same(generate(used, short, 9), fresh)


@pytest.mark.pitfall(22)
def test_copied_pages_continue_equally() -> None:
    """The pages of 50 tokens are copied elsewhere; the rest is decoded there."""
    whole = request(3)
    context = node(whole)
    stay = generate(context, whole, 50, whole["past_key_value"])
    pages = whole["past_key_value"].shape[1]
    free = np.setdiff1d(np.arange(pages), whole["kv_page_table"][0, 0])[:2]
    free_v = np.setdiff1d(np.arange(pages, 2 * pages), whole["kv_page_table"][0, 1])[:2]
    moved = np.stack([free, free_v])[None].astype(np.int32)
    pool = context.run(prompt(whole, [50])).present_key_value
    flat = flat_pages(pool)
    flat[moved[0]] = flat[whole["kv_page_table"][0]]
    flat[whole["kv_page_table"][0]] = np.nan
    context.bind({"past_key_value": pool, "kv_page_table": moved})
    assert all_same([launch(context, token(whole, [at])) for at in range(50, TOTAL)], stay[1:])


@pytest.mark.pitfall(22)
def test_two_requests_in_turn_in_one_pool_equal_their_solo_runs() -> None:
    tables = page_table(2, 2, 6, rng=np.random.default_rng(5))
    one, two = request(4, tables[:1]), request(5, tables[1:])
    solo = [generate(node(whole), whole, 30, whole["past_key_value"]) for whole in (one, two)]
    context = node(one)
    context.bind(one)  # a pool of NaN
    shared: list[list[Any]] = [[], []]
    for at in range(29, TOTAL):
        for whole, outputs in zip((one, two), shared, strict=True):
            call = prompt(whole, [30]) if at == 29 else token(whole, [at])
            call = call | {"kv_page_table": whole["kv_page_table"]} | {k: whole[k] for k in whole if "gamma" in k}
            call.pop("past_key_value", None)
            outputs.append(launch(context, call))
    assert all_same(shared[0], solo[0])
    assert all_same(shared[1], solo[1])


@pytest.mark.pitfall(23)
def test_a_prompt_under_the_budget_leaves_what_decode_past_it_needs() -> None:
    """9 tokens of prompt, or 70: the outputs of the tokens after 70 are the same bit for bit."""
    whole = request(6)
    short = generate(node(whole), whole, 9, whole["past_key_value"])
    long = generate(node(whole), whole, 70, whole["past_key_value"])
    assert all_same(short[1 + 70 - 9 :], long[1:])


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
def test_three_ways_of_pool_io_compute_the_same(mode: Mode) -> None:
    """In place, alias and copy; a copy leaves the input pool as it was, also where it holds NaN."""
    inputs = call_inputs(NAME, [60, 0, 129], mode)
    results = {}
    for pool_io in PoolIO:
        context = open_node(NAME, inputs, geometry=geometry_of(NAME, pool_io=int(pool_io)))
        results[pool_io] = context.run(inputs)
        past = context.buffers["past_key_value"]
        assert (past is context.buffers["present_key_value"]) == (pool_io is not PoolIO.COPY)
        if pool_io is PoolIO.COPY:
            pool = inputs["past_key_value"]
            assert same_bits(past.read(pool.shape, pool.dtype), pool)
    assert same_outputs(results[PoolIO.IN_PLACE], results[PoolIO.ALIAS])
    assert same_outputs(results[PoolIO.IN_PLACE], results[PoolIO.COPY])


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("pool_io", list(PoolIO), ids=[pool_io.option for pool_io in PoolIO])
def test_pools_at_the_wrong_addresses_are_refused(pool_io: PoolIO) -> None:
    """Nothing is launched: output and both pools stay as they were. The next call works."""
    inputs = call_inputs(NAME, [60], Mode.DECODE)
    context = open_node(NAME, inputs, geometry=geometry_of(NAME, pool_io=int(pool_io)))
    expected = context.run(inputs)
    context.bind(inputs)
    context.poison()
    right = context.buffers["present_key_value"]
    other = context.buffers["past_key_value"] if pool_io is PoolIO.COPY else device.Buffer(right.nbytes)
    context.buffers["present_key_value"] = other
    with pytest.raises(ContractError, match="present_key_value"):
        context.enqueue()
    pool, context.buffers["present_key_value"] = inputs["past_key_value"], right
    output = context.read().attn_output
    assert (output.view(np.uint16) == 0xFFFF).all()
    assert same_bits(context.buffers["past_key_value"].read(pool.shape, pool.dtype), pool)
    assert same_outputs(context.run(inputs), expected)
