"""Decode equals the prefill row of the same token: index sets, outputs, and the pool that both leave."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_trt.paging import SequencePages, flat_pages
from tests.gpu.conftest import RecordError
from tests.support.node import (
    bits,
    call_inputs,
    launch,
    listed_blocks,
    needs_node,
    open_node,
    prompt,
    selected_blocks,
    token,
    ulps,
)

pytestmark = needs_node
#: Both round the same fp32 result once, and may sum its terms in another order.
OUTPUT_ULPS = 1.01


@pytest.mark.pitfall(4, 11, 12, 23)
@pytest.mark.parametrize(
    ("name", "start", "steps"),
    [
        ("real-fp16", 1, 300),
        ("real-fp16", 1900, 310),  # across 2047 .. 2053 and the page ends at 1920, 2048 and 2176
        ("real-bf16", 2040, 300),
        ("real-fp16", 4099, 300),
        ("ratio-8", 2047, 300),
        pytest.param("budget-odd-blocks", 20, 300, marks=pytest.mark.quick),
        pytest.param("group-7", 505, 300, marks=pytest.mark.quick),
        ("group-7", 2050, 300),
        ("head-64", 2053, 300),
        ("smallest", 2047, 330),
    ],
)
def test_steps_equal_rows(name: str, start: int, steps: int, record_error: RecordError) -> None:
    """A prompt of `start` tokens and `steps` of decode against one prompt of all tokens."""
    total = start + steps
    whole = call_inputs(name, [total], Mode.PREFILL, seed=start)
    context = open_node(name, whole, whole | token(whole, [0]))
    g = context.host.geometry
    ratio = g.indexer_compress_ratio
    rows = launch(context, whole)[0]  # [total, Hq, D]
    at_once, lists = context.read().present_key_value, listed_blocks(context)[0]
    launch(context, prompt(whole, [start]))
    outputs = []
    for at in range(start, total):
        outputs.append(launch(context, token(whole, [at]))[0, 0])
        expected = lists[at - g.list_width] if at >= g.list_width else np.arange((at + 1) // ratio)
        assert np.array_equal(selected_blocks(context, 0, at + 1), expected), f"other blocks at token {at}"
    record_error("ulps", ulps(np.stack(outputs), rows[start:]), OUTPUT_ULPS)
    one_by_one = context.read().present_key_value
    pages, tokens = SequencePages.of(whole["kv_page_table"], 0, g.head_size), np.arange(total)
    complete = total // ratio * ratio
    for where in (
        pages.key(tokens),
        pages.value(tokens),
        pages.block_key(np.arange(0, complete, ratio)),
        pages.raw_index_key(np.arange(complete, total)),
    ):
        assert np.array_equal(bits(flat_pages(one_by_one)[where]), bits(flat_pages(at_once)[where]))
