"""Layouts that would be wrong without a word are refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from qsa_plugin.errors import RefusedError
from qsa_trt.patching.attributes import read_attributes
from qsa_trt.patching.layout import check_layout
from qsa_trt.patching.verify import check_layer
from tests.support.graphs import add_constant, anchors_of, first_layer, insert, load, node, reroute

NAMES = ("layer-dynamo-18-eager", "layer-dynamo-23-sdpa", "layer-script-18-eager", "qsa2_decode", "qsa_lm")


def check(model: onnx.ModelProto) -> None:
    index, anchors = anchors_of(model)
    for a in anchors:
        cut = check_layer(index, a)
        check_layout(index, cut, read_attributes(index, cut, {}, 0).geometry)


def refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(RefusedError) as error:
        check(model)
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_real_exports_pass(name: str) -> None:
    check(load(name))


def test_projection_without_a_batch() -> None:
    """Rows of tokens, as Gemm makes them."""
    model, layer = load(), first_layer()
    key = layer.projections["k_proj"]
    hidden = node(model, key).input[0]
    rows = add_constant(model, "rows", np.array([-1, 32]))
    insert(model, helper.make_node("Reshape", [hidden, rows], ["flat_rows"]), after=hidden)
    reroute(model, hidden, "flat_rows", only=key)
    del model.graph.value_info[:]
    assert "the shape of k_proj is [?, 128]; [B, S, 128] was expected" in refusal(model)


def test_index_key_before_the_queries() -> None:
    model, layer = load(), first_layer()
    split = next(n for n in model.graph.node if layer.projections["index_qk_proj"] in n.input and n.op_type == "Split")
    first, second = split.output
    split.output[:] = [second, first]
    sizes = next(t for t in model.graph.initializer if t.name == split.input[1])
    sizes.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(sizes)[::-1].copy(), sizes.name))
    assert "index_qk_proj is not seen to hold its queries first, then its key" in refusal(model)


def test_values_by_dim_instead_of_by_head() -> None:
    """[B, S, D, Hkv]: the same width, another order."""
    model, layer = load(), first_layer()
    value = layer.projections["v_proj"]
    reshape = next(n for n in model.graph.node if n.op_type == "Reshape" and n.input[0] == value)
    reshape.input[1] = add_constant(model, "by_dim", np.array([0, 0, 64, 2]))
    swap = helper.make_node("Transpose", ["by_dim_values"], [reshape.output[0]], perm=[0, 1, 3, 2])
    reshape.output[0] = "by_dim_values"
    insert(model, swap, after="by_dim_values")
    assert "it does not split v_proj into heads of 64" in refusal(model)


def test_gate_on_transposed_heads() -> None:
    """[B, Hq, S, D] on both sides of the gate: the node's output would have to be transposed."""
    model, layer = load("layer-dynamo-20-sdpa"), first_layer("layer-dynamo-20-sdpa")
    sigmoid = next(n for n in model.graph.node if n.op_type == "Sigmoid")
    insert(
        model, helper.make_node("Transpose", [layer.gate.gate], ["gate_t"], perm=[0, 2, 1, 3]), after=layer.gate.gate
    )
    sigmoid.input[0] = "gate_t"
    assert "neither half of q_proj reaches a Sigmoid" in refusal(model)


def test_query_split_on_transposed_heads() -> None:
    model, layer = load(), first_layer()
    heads = layer.gate.heads
    insert(model, helper.make_node("Transpose", [heads], ["heads_t"], perm=[0, 2, 1, 3]), after=heads)
    reroute(model, heads, "heads_t", only=layer.gate.query)
    assert "is not split into two halves per head" in refusal(model)


def test_gate_on_rows_of_tokens() -> None:
    """[B*S, Hq*D]: batch and sequence are one dim where the gate multiplies."""
    model, layer = load("layer-dynamo-20-sdpa"), first_layer("layer-dynamo-20-sdpa")
    rows = add_constant(model, "rows", np.array([-1, 128]))
    for tensor in (layer.gate.attention, next(n for n in model.graph.node if n.op_type == "Sigmoid").input[0]):
        node(model, tensor).input[1] = rows
    del model.graph.value_info[:]
    assert "the gate multiplies a tensor of shape [?, 128]; [B, S, 128] was expected" in refusal(model)


def test_a_fifth_norm() -> None:
    """Normed values: the operator knows none."""
    model, layer = load(), first_layer()
    value = layer.projections["v_proj"]
    heads = next(n for n in model.graph.node if n.op_type == "Reshape" and n.input[0] == value).output[0]
    gamma = add_constant(model, "value_gamma", np.linspace(1, 2, 64, dtype=np.float32))
    norm = helper.make_node("SimplifiedLayerNormalization", [heads, gamma], ["normed_values"], name="node_v_norm")
    insert(model, norm, after=heads)
    reroute(model, heads, "normed_values")
    assert "node_v_norm (SimplifiedLayerNormalization): a fifth RMSNorm lies in the cut; QSA has four" in refusal(model)
