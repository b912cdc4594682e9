"""Costs that must not depend on what is not there: capacity, dead rows, the name of the device."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import PAGE_SIZE, Mode
from tests.gpu.conftest import RecordError
from tests.support.node import Inputs, call_inputs, launch, needs_node, open_node, same_bits
from tests.support.timing import microseconds

pytestmark = needs_node
REAL = "real-fp16"


def with_capacity(inputs: Inputs, tokens: int) -> Inputs:
    """The same call in page tables and rope tables of more tokens."""
    batch, _, slots = inputs["kv_page_table"].shape
    table = np.full((batch, 2, tokens // PAGE_SIZE), -1, np.int32)
    table[:, :, :slots] = inputs["kv_page_table"]
    rope = np.zeros((1, tokens, inputs["rope_rotary_cos_sin"].shape[2]), np.float32)
    rope[:, : inputs["rope_rotary_cos_sin"].shape[1]] = inputs["rope_rotary_cos_sin"]
    return inputs | {"kv_page_table": table, "rope_rotary_cos_sin": rope}


@pytest.mark.pitfall(39)
@pytest.mark.parametrize("rows", [1, 16])
def test_a_decode_step_costs_what_is_live(rows: int, record_error: RecordError) -> None:
    """8K tokens in tables of 8K and of 1M: within 10 %."""
    inputs = call_inputs(REAL, [8190] * rows, Mode.DECODE, poison=False)
    times = []
    for capacity in (8192, 2**20):
        call = with_capacity(inputs, capacity)
        context = open_node(REAL, call)
        context.bind(call)
        times.append(microseconds(context.stream, context.enqueue, repeats=31))
        record_error(f"us in tables of {capacity}, {rows} rows", times[-1], None)
    record_error(f"1M over 8K, {rows} rows", times[1] / times[0], 1.1)


@pytest.mark.pitfall(39)
def test_a_prompt_costs_what_its_activations_hold(record_error: RecordError) -> None:
    """4096 tokens in tables of 4K and of 1M: within 10 %, bit for bit."""
    inputs = call_inputs(REAL, [4096], Mode.PREFILL, poison=False)
    times, outputs = [], []
    for capacity in (4096, 2**20):
        call = with_capacity(inputs, capacity)
        context = open_node(REAL, call)
        outputs.append(launch(context, call))
        times.append(microseconds(context.stream, context.enqueue, steps=5))
        record_error(f"us in tables of {capacity}", times[-1], None)
    assert same_bits(*outputs)
    record_error("1M over 4K", times[1] / times[0], 1.1)
