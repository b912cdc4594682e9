"""Finding layers: every strategy sees the same anchors, decoys and broken layers are refused by name."""

from __future__ import annotations

import ast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.errors import RefusedError
from qsa_trt.patching import node_names, scopes, structure, weight_names
from qsa_trt.patching.anchors import Anchors
from qsa_trt.patching.detect import find_layers, patched_nodes
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.patching.norms import find_norms
from tests.support.graphs import LAYER, add_constant, first_layer, insert, load, node, reroute, strip_names

DYNAMO = ["layer-dynamo-18-eager", "layer-dynamo-20-sdpa", "layer-dynamo-23-sdpa"]


def find(strategy: object, model: onnx.ModelProto) -> list[Anchors]:
    index = GraphIndex(model)
    return strategy.find(index, find_norms(index))  # type: ignore[attr-defined,no-any-return]


def tensors(anchors: Anchors) -> object:
    """What must not depend on the strategy."""
    gammas = {name: norm.gamma for name, norm in anchors.norms.items()}
    gate = anchors.gate
    return dict(anchors.projections), gammas, gate.query, gate.gate, gate.attention, gate.multiply.output


@pytest.mark.parametrize("name", [*DYNAMO, "real_layer_fp16", "qsa2_raw", "qsa2_decode", "qsa_lm"])
def test_scopes_and_structure_agree(name: str) -> None:
    by_scope, by_structure = find(scopes, load(name)), find(structure, strip_names(load(name)))
    assert len(by_scope) == (2 if name.startswith("qsa") else 1)
    assert [tensors(a) for a in by_scope] == [tensors(a) for a in by_structure]
    assert {a.strategy for a in by_scope} == {"scopes"}


@pytest.mark.parametrize("name", ["layer-script-18-eager", "layer-script-static-eager"])
def test_node_names_and_structure_agree(name: str) -> None:
    by_name, by_structure = find(node_names, load(name)), find(structure, load(name))
    assert [tensors(a) for a in by_name] == [tensors(a) for a in by_structure]
    assert [(a.layer, a.strategy) for a in by_name] == [("self_attn", "node names")]


@pytest.mark.parametrize("layer", [0, 1])
def test_names_in_a_part_of_the_model(layer: int) -> None:
    """A strategy that sees one of two layers leaves the model to the next one."""
    model = load()
    for n in model.graph.node:
        if any(f"layers.{layer}.self_attn" in e.value for e in n.metadata_props):
            del n.metadata_props[:]
    found = find_layers(GraphIndex(model))
    assert [tensors(a) for a in found] == [tensors(a) for a in find_layers(GraphIndex(load()))]
    assert {a.strategy for a in found} == {"weight names"}


FOLDED = "pkg.onnxscript.optimizer.folded_from"


def weight_named(name: str, *, renamed: bool) -> onnx.ModelProto:
    """No metadata of nodes, no names of nodes; names of weights in metadata, or as names of the initializers."""
    model = load(name)
    folded = {v.name: e.value for v in model.graph.value_info for e in v.metadata_props if e.key == FOLDED}
    strip_names(model)
    for value in model.graph.value_info:
        if value.name in folded and not renamed:
            value.metadata_props.add(key=FOLDED, value=folded[value.name])
    if renamed:
        new = {t: n for t, text in folded.items() for n in ast.literal_eval(text) if n.endswith(".weight")}
        for n in model.graph.node:
            n.input[:] = [new.get(t, t) for t in n.input]
        for tensor in model.graph.initializer:
            tensor.name = new.get(tensor.name, tensor.name)
        del model.graph.value_info[:]
    return model


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("name", [*DYNAMO, "real_layer_fp16", "qsa2_decode", "qsa_lm"])
def test_weight_names_and_scopes_agree(name: str, renamed: bool) -> None:
    model = weight_named(name, renamed=renamed)
    by_weight, by_scope = find(weight_names, model), find(scopes, load(name))
    assert [a.layer for a in by_weight] == [a.layer for a in by_scope]
    assert {a.strategy for a in find_layers(GraphIndex(model))} == {"weight names"}
    for a, b in zip(by_weight, by_scope, strict=True):
        assert (a.projections, a.gate.attention) == (b.projections, b.gate.attention)
        assert {n: norm.output for n, norm in a.norms.items()} == {n: norm.output for n, norm in b.norms.items()}


@pytest.mark.parametrize("text", ["", "[", "7", "['a'", "None"])
def test_damaged_weight_names_are_ignored(text: str) -> None:
    model = strip_names(load())
    for value in model.graph.value_info:
        value.metadata_props.add(key=FOLDED, value=text)
    assert find(weight_names, model) == []


def test_layers_come_in_graph_order() -> None:
    assert [a.layer for a in find_layers(GraphIndex(load()))] == [LAYER, LAYER.replace("0", "1")]


def test_structure_ignores_decoy_siblings() -> None:
    """Another projection of the same hidden states, gated by a Sigmoid of its own, is none of the five."""
    model, layer = strip_names(load()), first_layer()
    hidden = node(model, layer.projections["k_proj"]).input[0]
    weight = add_constant(model, "decoy_weight", np.ones((32, 128), np.float32))
    for i, (op, inputs) in enumerate([("MatMul", [hidden, weight]), ("Relu", ["decoy0"]), ("Sigmoid", ["decoy0"])]):
        insert(model, helper.make_node(op, inputs, [f"decoy{i}"]), after=inputs[0])
        model.graph.output.append(helper.make_tensor_value_info(f"decoy{i}", TensorProto.FLOAT, None))
    assert tensors(find(structure, model)[0]) == tensors(layer)


@pytest.mark.parametrize("name", ["plain_qwen3"])
def test_model_without_qsa(name: str) -> None:
    with pytest.raises(RefusedError) as error:
        find_layers(GraphIndex(load(name)))
    assert str(error.value).startswith("no QSA attention in this model; looked for modules named")
    assert "self_attn.indexer.index_qk_proj" in str(error.value) and "TopK over Relu scores" in str(error.value)


def plain_attention(topk: bool) -> onnx.ModelProto:
    """Dense attention as in Qwen3, by hand; `topk` adds a router: a TopK over a softmax of a linear projection."""
    rng = np.random.default_rng(0)
    weights = {f"w{c}": rng.standard_normal((16, 16), np.float32) for c in "qkvor"}
    nodes = [helper.make_node("MatMul", ["x", f"w{c}"], [c]) for c in "qkv"]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "v"], ["a"]),
        helper.make_node("MatMul", ["a", "wo"], ["y"]),
    ]
    if topk:
        weights["two"] = np.array([2])
        nodes += [
            helper.make_node("MatMul", ["y", "wr"], ["r"]),
            helper.make_node("Relu", ["r"], ["rr"]),
            helper.make_node("Softmax", ["rr"], ["rp"]),
            helper.make_node("TopK", ["rp", "two"], ["best", "experts"]),
        ]
    outputs = ["y", "best"] if topk else ["y"]
    graph = helper.make_graph(
        nodes,
        "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "s", 16])],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
        [onnx.numpy_helper.from_array(v, k) for k, v in weights.items() if topk or k != "wr"],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize("topk", [False, True])
def test_plain_attention_and_routers_are_no_qsa(topk: bool) -> None:
    with pytest.raises(RefusedError, match="no QSA attention in this model; looked for"):
        find_layers(GraphIndex(plain_attention(topk)))


@pytest.mark.pitfall(35)
@pytest.mark.parametrize("op", ["QsaAttention", "QsaAttentionPlugin"])
@pytest.mark.parametrize("where", ["graph", "body", "function"])
def test_patched_nodes_are_seen_everywhere(op: str, where: str) -> None:
    model = plain_attention(False)
    qsa = helper.make_node(op, ["x"], ["o"], domain="trt_edgellm")
    if where == "graph":
        model.graph.node.append(qsa)
    elif where == "body":
        body = helper.make_graph([qsa], "body", [], [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)])
        model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body))
    else:
        model.functions.append(helper.make_function("f", "F", ["x"], ["o"], [qsa], model.opset_import))
    assert [n.op_type for n in patched_nodes(model)][:1] == [op]
    assert not patched_nodes(plain_attention(True))


class TestBrokenLayers:
    """Each refusal names the layer, the node and the reason; both strategies refuse."""

    @staticmethod
    def refusal(model: onnx.ModelProto) -> str:
        with pytest.raises(RefusedError) as error:
            find_layers(GraphIndex(model))
        with pytest.raises(RefusedError):
            find(structure, strip_names(model))
        return str(error.value)

    @pytest.mark.parametrize(
        ("norm", "module"),
        [
            ("q_norm", "q_norm"),
            ("k_norm", "k_norm"),
            ("indexer_q_norm", "indexer.q_layernorm"),
            ("indexer_k_norm", "indexer.k_layernorm"),
        ],
    )
    def test_missing_gamma(self, norm: str, module: str) -> None:
        model, layer = load(), first_layer()
        broken = layer.norms[norm]
        reroute(model, broken.output, broken.source)  # no norm at all
        text = self.refusal(model)
        assert text.startswith(f"layer {LAYER}: {LAYER}.{module}: no RMSNorm with a constant weight (gamma)")
        assert text.endswith("; nothing was patched")

    def test_gate_comes_first_in_each_head(self) -> None:
        model, layer = load(), first_layer()
        split = node(model, layer.gate.query)
        split.output[:] = [layer.gate.gate, layer.gate.query]
        text = self.refusal(model)
        assert f"layer {LAYER}: node_sigmoid" in text and "must be interleaved per head" in text

    def test_gate_is_not_interleaved_per_head(self) -> None:
        """All queries, then all gates: the same widths, another meaning of the weights."""
        model, layer = load(), first_layer()
        split, heads = node(model, layer.gate.query), node(model, layer.gate.heads)
        split.input[0] = heads.input[0]
        next(a for a in split.attribute if a.name == "axis").i = 2
        del model.graph.value_info[:]
        assert "must be interleaved per head" in self.refusal(model)

    def test_no_output_gate(self) -> None:
        model, layer = load(), first_layer()
        sigmoid = next(
            n for n in model.graph.node if n.op_type == "Sigmoid" and n.output[0] in layer.gate.multiply.inputs
        )
        sigmoid.op_type = "Tanh"
        assert "neither half of q_proj reaches a Sigmoid (the output gate)" in self.refusal(model)

    def test_q_projection_without_halves(self) -> None:
        model, layer = load(), first_layer()
        split = node(model, layer.gate.query)
        split.op_type = "Identity"
        assert "is not split into two halves per head" in self.refusal(model)

    def test_gate_is_used_twice(self) -> None:
        model, layer = load(), first_layer()
        sigmoid = next(
            n for n in model.graph.node if n.op_type == "Sigmoid" and n.output[0] in layer.gate.multiply.inputs
        )
        insert(model, helper.make_node("Mul", [sigmoid.output[0]] * 2, ["square"]), after=sigmoid.output[0])
        model.graph.output.append(helper.make_tensor_value_info("square", TensorProto.FLOAT, None))
        assert "the gate feeds 2 Mul nodes; one was expected" in self.refusal(model)


def open_weight(model: onnx.ModelProto, tensor: str) -> None:
    """Make the weight behind a projection a graph input: no constant any more."""
    producer = node(model, tensor)
    weight = producer.input[1]
    model.graph.input.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, None))
    reroute(model, weight, "weight", only=tensor)


class TestBrokenStructures:
    """What the structure alone says of a broken layer."""

    @staticmethod
    def refusal(model: onnx.ModelProto) -> str:
        with pytest.raises(RefusedError) as error:
            find(structure, strip_names(model))
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_indexer_without_a_projection(self) -> None:
        model = load()
        model.graph.input.append(helper.make_tensor_value_info("loose", TensorProto.FLOAT, None))
        reroute(model, first_layer().projections["index_qk_proj"], "loose")
        assert "no linear projection (index_qk) is behind the indexer's scores" in self.refusal(model)

    def test_value_is_no_projection(self) -> None:
        model = load()
        open_weight(model, first_layer().projections["v_proj"])
        assert (
            "besides the query, its sibling projections are 1 normed keys and 0 values; one of each was expected"
            in self.refusal(model)
        )

    def test_no_gated_sibling(self) -> None:
        model, layer = load(), first_layer()
        sigmoid = next(
            n for n in model.graph.node if n.op_type == "Sigmoid" and n.output[0] in layer.gate.multiply.inputs
        )
        sigmoid.op_type = "Tanh"
        assert "0 of its 3 sibling projections have an output gate (Sigmoid)" in self.refusal(model)

    def test_missing_norm(self) -> None:
        model, broken = load(), first_layer().norms["q_norm"]
        reroute(model, broken.output, broken.source)
        assert "q_norm: no RMSNorm with a constant weight (gamma) was found where this norm belongs" in self.refusal(
            model
        )


def test_a_module_without_its_projection_is_refused() -> None:
    model = load()
    del node(model, first_layer().projections["k_proj"]).metadata_props[:]
    with pytest.raises(RefusedError, match=r"k_proj: 0 tensors leave this module; one projection was expected"):
        find(scopes, model)
