"""Shapes, types and addresses that the contract forbids: an error before any launch, and a context that goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_plugin.errors import ContractError
from qsa_trt import device
from qsa_trt.plugin_host import PluginContext
from tests.support.node import Inputs, call_inputs, needs_node, open_node, same_bits, same_outputs

pytestmark = [*needs_node, pytest.mark.quick]
NAME = "head-64"
#: Mode, tensor, its forbidden shape, and what the message must say besides the tensor and the shape.
SHAPES: dict[str, tuple[Mode, str, tuple[int, ...], str]] = {
    "two tokens in decode": (Mode.DECODE, "qkv", (2, 2, 768), "S = 1 in decode"),
    "start index of another length": (Mode.DECODE, "kvcache_start_index", (1,), "shape [0] (prefill) or [2] (decode)"),
    "a start index in prefill": (Mode.PREFILL, "qkv", (2, 300, 768), "S = 1 in decode"),
    "start index of two dims": (Mode.DECODE, "kvcache_start_index", (2, 1), "shape [start]"),
    "qkv too narrow": (Mode.DECODE, "qkv", (2, 1, 767), "shape [B, S, 768]"),
    "index_qk too narrow": (Mode.PREFILL, "index_qk", (2, 300, 159), "shape [B, S, 160]"),
    "pool without tails": (Mode.DECODE, "past_key_value", (2, 7, 128, 2, 64), "shape [2, N, 128, 2, 96]"),
    "pool of other pages": (Mode.DECODE, "past_key_value", (2, 7, 64, 2, 96), "shape [2, N, 128, 2, 96]"),
    "pool of one plane": (Mode.PREFILL, "past_key_value", (1, 7, 128, 2, 96), "shape [2, N, 128, 2, 96]"),
    "empty pool": (Mode.PREFILL, "past_key_value", (2, 0, 128, 2, 96), "at least one page"),
    "gamma of another width": (Mode.DECODE, "q_norm_gamma", (63,), "shape [64]"),
    "indexer gamma of another width": (Mode.DECODE, "indexer_k_norm_gamma", (31,), "shape [32]"),
    "odd rotary dims": (Mode.DECODE, "rope_rotary_cos_sin", (1, 384, 23), "an even last dim from 2 to 32"),
    "rope table of two batches": (Mode.DECODE, "rope_rotary_cos_sin", (2, 100, 24), "shape [1, maxPos, rotary]"),
    "rope table too short": (Mode.PREFILL, "rope_rotary_cos_sin", (1, 299, 24), "at least S = 300 positions"),
    "page table too short": (Mode.PREFILL, "kv_page_table", (2, 2, 2), "at least ceil(S / 128) = 3 pages"),
    "page table of one plane": (Mode.DECODE, "kv_page_table", (2, 1, 3), "shape [B, 2, M]"),
    "lengths of another batch": (Mode.DECODE, "context_lengths", (1,), "B = 2"),
    "index_qk of another batch": (Mode.PREFILL, "index_qk", (1, 300, 160), "B = 2"),
    "index_qk of other tokens": (Mode.PREFILL, "index_qk", (2, 299, 160), "S = 300"),
    "page table of another batch": (Mode.DECODE, "kv_page_table", (1, 2, 3), "B = 2"),
}
#: What else is bound so that the case is about nothing but its tensor.
ALSO: dict[str, dict[str, tuple[int, ...]]] = {
    "two tokens in decode": {"index_qk": (2, 2, 160)},
    "a start index in prefill": {"kvcache_start_index": (2,)},
}


def valid(mode: Mode) -> Inputs:
    """Two sequences past the budget of 256, three pages each and one to spare."""
    return call_inputs(NAME, [300, 281], mode, pages_per_seq=3)


@pytest.mark.parametrize("case", list(SHAPES))
def test_a_forbidden_shape_raises_before_any_launch(case: str) -> None:
    """Tensor, value and expectation are said; output and pool keep every byte; the next valid call is right."""
    mode, tensor, shape, expectation = SHAPES[case]
    inputs = valid(mode)
    context = open_node(NAME, inputs)
    expected = context.run(inputs)
    context.bind(inputs)
    context.poison()
    announce(context, {tensor: shape} | ALSO.get(case, {}))
    with pytest.raises(ContractError) as raised:
        context.enqueue()
    message = str(raised.value)
    assert raised.value.what == tensor
    assert str(list(shape)) in message
    assert expectation in message
    assert_untouched(context, inputs)
    assert same_outputs(context.run(inputs), expected)


def announce(context: PluginContext, shapes: dict[str, tuple[int, ...]]) -> None:
    """Describe some tensors by other shapes, as TensorRT would; the memory stays, for nobody may look at it."""
    from qsa_plugin import tensorrt
    from qsa_trt.plugin_host import runtime_descs

    context._descs = runtime_descs(tensorrt(), context.shapes | shapes, context.host.surface)
    context.plugin.on_shape_change(*context._descs)


def assert_untouched(context: PluginContext, inputs: Inputs) -> None:
    """The poisoned output and the pool hold what they held before."""
    outputs = context.read()
    assert (outputs.attn_output.view(np.uint16) == 0xFFFF).all()
    assert same_bits(outputs.present_key_value, inputs["past_key_value"])
    workspace = context.buffers["workspace"]
    assert (workspace.read((workspace.nbytes,), np.uint8) == device.POISON).all()


@pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
@pytest.mark.parametrize(
    ("what", "said"),
    [("workspace", "a multiple of 256"), ("attn_output", "shape [2, "), ("type", "HALF"), ("other type", "INT32")],
)
def test_other_forbidden_calls_raise_before_any_launch(mode: Mode, what: str, said: str) -> None:
    """A workspace that is not aligned, an output of another shape, tensors of another type."""
    inputs = valid(mode)
    context = open_node(NAME, inputs)
    expected = context.run(inputs)
    context.bind(inputs)
    context.poison()
    workspace = context.buffers["workspace"]
    if what == "workspace":
        context.buffers["workspace"] = Shifted(workspace, 128)  # type: ignore[assignment]
    elif what == "attn_output":
        announce(context, {"attn_output": (2, 1, 8, 63)})
    else:
        index, other = (0, "FLOAT") if what == "type" else (3, "FLOAT")
        retype(context, index, other)
    with pytest.raises(ContractError, match=what if what in ("workspace", "attn_output") else "got FLOAT") as raised:
        context.enqueue()
    assert said in str(raised.value)
    context.buffers["workspace"] = workspace
    assert_untouched(context, inputs)
    assert same_outputs(context.run(inputs), expected)


class Shifted:
    """A buffer seen from an address some bytes further on."""

    def __init__(self, buffer: device.Buffer, offset: int) -> None:
        self.address = buffer.address + offset


def retype(context: PluginContext, index: int, dtype: str) -> None:
    """Describe one input by another type."""
    from qsa_plugin import tensorrt

    inputs: list[Any] = context._descs[0]
    inputs[index].type = getattr(tensorrt().DataType, dtype)
    context.plugin.on_shape_change(*context._descs)
