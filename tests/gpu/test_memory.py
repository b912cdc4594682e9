"""What may be read and written: garbage in scratch, dead page ids, ids and lengths out of range, the workspace."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_trt import device
from qsa_trt.plugin_host import PluginContext
from tests.gpu.conftest import RecordError
from tests.support.node import (
    OUTPUT_ULPS,
    call_inputs,
    deviation,
    needs_node,
    open_node,
    same_outputs,
)
from tests.support.requirements import needs_oracle

pytestmark = [*needs_node, *needs_oracle, pytest.mark.quick]
BOTH_MODES = pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
#: 512 tokens of budget, seven query heads a KV head, bf16.
NAME = "group-7"
#: Below the budget, above it, past a page end, inactive.
LENGTHS = [700, 33, 129, 0, 515]


def fill_workspace(context: PluginContext, word: int) -> None:
    """Set every 32-bit word of the workspace."""
    workspace = context.buffers["workspace"]
    device.check(workspace._driver.cuMemsetD32(workspace.address, word, workspace.nbytes // 4))
    device.synchronize()


@pytest.mark.pitfall(6, 16, 19)
@BOTH_MODES
def test_what_lies_in_the_workspace_changes_nothing(mode: Mode) -> None:
    """NaN, infinities, the largest number, zeros, ones: all that an enqueue reads there, it wrote before."""
    inputs = call_inputs(NAME, LENGTHS, mode)
    context = open_node(NAME, inputs)
    expected = context.run(inputs)
    for word in (0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0, 1, 0x3F800000):
        context.bind(inputs)
        context.buffers["attn_output"].poison()
        fill_workspace(context, word)
        context.enqueue()
        assert same_outputs(context.read(), expected), f"{word:#x} in the workspace shows"


@pytest.mark.pitfall(16)
@BOTH_MODES
def test_nan_around_everything_that_is_live(mode: Mode, record_error: RecordError) -> None:
    """Unused slots, stale tails, padding activations: finite outputs, padding exactly zero, everything written."""
    more = {"seq_len": 730} if mode is Mode.PREFILL else {}
    inputs = call_inputs(NAME, LENGTHS, mode, **more)
    context = open_node(NAME, inputs)
    record_error("output ulps", deviation(context, inputs).output_ulps, OUTPUT_ULPS)
    output = context.read().attn_output.astype(np.float32)
    assert np.isfinite(output).all()
    for b, length in enumerate(LENGTHS):
        assert not output[b, length if mode is Mode.PREFILL else min(length, 1) :].any()


@pytest.mark.pitfall(17)
@BOTH_MODES
def test_page_ids_past_the_length_are_never_followed(mode: Mode) -> None:
    inputs = call_inputs(NAME, LENGTHS, mode, pages_per_seq=9)
    context = open_node(NAME, inputs)
    expected = context.run(inputs)
    dead = inputs["kv_page_table"] == np.iinfo(np.int32).max
    assert dead.any()
    for value in (-1, 10**9, -(2**31), inputs["past_key_value"].shape[1] * 2):
        table = np.where(dead, np.int32(value), inputs["kv_page_table"])
        assert same_outputs(context.run(inputs | {"kv_page_table": table}), expected)


#: (plane, slot, id) in terms of N pages: what no live entry may hold.
BAD_IDS = {
    "k minus one": (0, 0, lambda n: -1),
    "k in the range of v": (0, 1, lambda n: n),
    "k far away": (0, 1, lambda n: 10**9),
    "v in the range of k": (1, 0, lambda n: n - 1),
    "v past the end": (1, 1, lambda n: 2 * n),
    "v int max": (1, 1, lambda n: 2**31 - 1),
}


@pytest.mark.pitfall(17)
@pytest.mark.parametrize("bad", list(BAD_IDS))
@BOTH_MODES
def test_a_live_page_id_out_of_range_silences_its_sequence_alone(mode: Mode, bad: str) -> None:
    """Zeros, and not a byte of the pool written; the other sequences are computed."""
    inputs = call_inputs(NAME, [200, 140], mode)
    plane, slot, page = BAD_IDS[bad]
    table = inputs["kv_page_table"].copy()
    table[0, plane, slot] = page(inputs["past_key_value"].shape[1])
    silent = inputs | {"context_lengths": np.array([0, 140], np.int32)}
    context = open_node(NAME, inputs)
    expected = context.run(silent)
    outputs = context.run(inputs | {"kv_page_table": table})
    assert not outputs.attn_output[0].view(np.uint16).any()
    assert outputs.attn_output[1].view(np.uint16).any()
    assert same_outputs(outputs, expected)


@pytest.mark.pitfall(17)
@pytest.mark.parametrize(
    ("length", "positions"),
    [(257, 256), (1000, 256), (2**31 - 1, 256), (-1, 256), (-(2**31), 256), (0, 256), (201, 200), (256, 200)],
)
def test_a_decode_length_out_of_range_silences_its_sequence_alone(length: int, positions: int) -> None:
    """Past the two pages of the table, past the rope table, negative."""
    inputs = call_inputs(NAME, [150, 140], Mode.DECODE, pages_per_seq=2, max_positions=positions)
    context = open_node(NAME, inputs)
    expected = context.run(inputs | {"context_lengths": np.array([0, 140], np.int32)})
    outputs = context.run(inputs | {"context_lengths": np.array([length, 140], np.int32)})
    assert not outputs.attn_output[0].view(np.uint16).any()
    assert same_outputs(outputs, expected)


@pytest.mark.pitfall(17)
def test_prefill_lengths_are_clipped_to_the_tokens_of_the_call() -> None:
    inputs = call_inputs(NAME, [150, 150, 150], Mode.PREFILL)
    context = open_node(NAME, inputs)
    expected = context.run(inputs | {"context_lengths": np.array([150, 150, 0], np.int32)})
    outputs = context.run(inputs | {"context_lengths": np.array([151, 2**31 - 1, -7], np.int32)})
    assert same_outputs(outputs, expected)


@pytest.mark.pitfall(18)
@pytest.mark.parametrize("name", ["real-fp16", "group-16"])
@BOTH_MODES
def test_dots_beyond_the_range_of_fp16_stay_finite(name: str, mode: Mode, record_error: RecordError) -> None:
    """Queries of norm 200 * 16: raw dots of 100,000 and more; the scale is applied in fp32."""
    inputs = call_inputs(name, [2100, 90], mode)
    inputs["q_norm_gamma"][:] = 400
    inputs["k_norm_gamma"][:] = 4
    context = open_node(name, inputs)
    outputs = context.run(inputs)
    for b, length in enumerate((2100, 90)):
        assert np.isfinite(outputs.attn_output[b, : length if mode is Mode.PREFILL else 1].astype(np.float32)).all()
    if mode is Mode.DECODE:
        context.bind(inputs)
        record_error("output ulps", deviation(context, inputs).output_ulps, None)


@pytest.mark.pitfall(19)
def test_empty_splits_and_other_streams() -> None:
    """Contexts of fewer tiles than splits; poisoned partials and counters; the same bits from any stream."""
    inputs = call_inputs("real-fp16", [1, 33, 65, 7001], Mode.DECODE)
    context = open_node("real-fp16", inputs)
    expected = context.run(inputs)
    streams = [device.Stream() for _ in range(3)]
    for run in range(30):
        context.poison()
        stream = streams[run % 3]
        context.enqueue(stream.handle)
        stream.synchronize()
        assert same_outputs(context.read(), expected)


@pytest.mark.pitfall(21)
def test_calls_of_every_size_in_the_workspace_of_the_largest() -> None:
    """Random smaller shapes of both modes in one context; canaries intact, and the results those of a context of
    their own."""
    rng = np.random.default_rng(11)
    largest = call_inputs(NAME, [900] * 3, Mode.PREFILL, pages_per_seq=10)
    decode = call_inputs(NAME, [1280] * 3, Mode.DECODE, pages_per_seq=10)
    context = open_node(NAME, largest, decode)
    for _ in range(16):
        mode = (Mode.PREFILL, Mode.DECODE)[int(rng.integers(2))]
        batch = int(rng.integers(1, 4))
        lengths = [int(length) for length in rng.integers(0, 900, batch)]
        inputs = call_inputs(NAME, lengths, mode, seed=int(rng.integers(100)))
        inside = context.run(inputs)  # reads all canaries
        assert same_outputs(inside, open_node(NAME, inputs).run(inputs)), f"{mode}, {lengths}"
    assert context.host.workspace_size == context.buffers["workspace"].nbytes


@pytest.mark.pitfall(21)
@BOTH_MODES
def test_the_real_workspace_holds_what_it_must(mode: Mode) -> None:
    """The real geometry in a workspace of exactly the reported size."""
    inputs = call_inputs("real-fp16", [2300, 2200], mode)
    context = open_node("real-fp16", inputs)
    context.run(inputs)
    assert context.buffers["workspace"].nbytes == context.host.workspace_size
    assert context.buffers["workspace"].intact()
