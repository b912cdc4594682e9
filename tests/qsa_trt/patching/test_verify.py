"""What must not be cut is refused, naming layer, node and reason; dense caches go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.errors import RefusedError
from qsa_trt.patching.verify import PlainCut, cache_outputs, check_coverage, check_layer
from tests.support.graphs import LAYER, add_constant, anchors_of, first_layer, insert, load, node, reroute

KEY = first_layer().norms["k_norm"].output  # a tensor inside the cut


def cuts(model: onnx.ModelProto) -> list[PlainCut]:
    index, anchors = anchors_of(model)
    found = [check_layer(index, a) for a in anchors]
    check_coverage(index, found)
    cache_outputs(index, found)
    return found


def caches(model: onnx.ModelProto) -> tuple[str, ...]:
    index, anchors = anchors_of(model)
    return cache_outputs(index, [check_layer(index, a) for a in anchors])


def refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(RefusedError) as error:
        cuts(model)
    text = str(error.value)
    assert text.endswith("; nothing was patched") and "\n" not in text
    return text


def expose(model: onnx.ModelProto, tensor: str) -> None:
    model.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))


def attach(model: onnx.ModelProto, op: str, tensor: str, output: str) -> None:
    """A new reader of a tensor whose result is a graph output."""
    insert(model, helper.make_node(op, [tensor], [output], name=f"node_{output}"), after=tensor)
    expose(model, output)


def test_cut_holds_attention_and_selection() -> None:
    for cut, layer in zip(cuts(load()), anchors_of(load())[1], strict=True):
        ops = {n.op for n in cut.nodes}
        assert {"Softmax", "TopK", "Relu"} <= ops and cut.softmax.op == "Softmax" and len(cut.topks) == 1
        assert not any(t in n.outputs for n in cut.nodes for t in layer.projections.values())


def test_reader_outside_the_cut() -> None:
    model = load()
    attach(model, "Neg", KEY, "spy")
    assert refusal(model) == (
        f"layer {LAYER}: node_spy (Neg): it reads {KEY}, which the cut would remove; nothing was patched"
    )


@pytest.mark.pitfall(35)
def test_reader_inside_an_if() -> None:
    """A body that takes a cut tensor from outside is a reader like any other."""
    model = load()
    body = helper.make_graph(
        [helper.make_node("Neg", [KEY], ["inner"])], "body", [], [helper.make_tensor_value_info("inner", 1, None)]
    )
    yes = add_constant(model, "yes", np.array(True))
    branch = helper.make_node("If", [yes], ["spy"], name="node_if", then_branch=body, else_branch=body)
    insert(model, branch, after=KEY)
    expose(model, "spy")
    assert f"node_if (If): it reads {KEY}" in refusal(model)


def test_reader_without_effect_is_none() -> None:
    model = load()
    insert(model, helper.make_node("Neg", [KEY], ["unread"]), after=KEY)
    assert len(cuts(model)) == 2


def test_reader_of_a_projection_is_allowed() -> None:
    """Projections stay in the graph, so anybody may read them."""
    model, layer = load(), first_layer()
    attach(model, "Neg", layer.projections["v_proj"], "spy")
    assert caches(model) == ()


def test_cut_tensor_as_graph_output() -> None:
    model = load()
    expose(model, KEY)
    assert f"graph output {KEY} is a tensor that the cut would remove" in refusal(model)


def test_caches_of_a_prefill_graph_go() -> None:
    """present.N.key straight from the roped key, by its name, through a cast."""
    model = load()
    insert(model, helper.make_node("Cast", [KEY], ["present.0.key"], to=TensorProto.FLOAT16), after=KEY)
    expose(model, "present.0.key")
    assert caches(model) == ("present.0.key",)


def test_caches_of_a_decode_graph_go() -> None:
    kinds = ("keys", "values", "indexer_keys")
    expected = {f"output.cache.layers.{i}.{kind}" for i in range(2) for kind in kinds}
    assert set(caches(load("qsa2_decode"))) == expected


def test_residual_into_the_attention() -> None:
    """Hidden states that join behind the projections would be lost."""
    model, layer = load(), first_layer()
    value, hidden = layer.projections["v_proj"], node(model, layer.projections["v_proj"]).input[0]
    weight = add_constant(model, "extra_weight", np.ones((32, 128), np.float32))
    insert(model, helper.make_node("MatMul", [hidden, weight], ["extra"], name="node_extra"), after=value)
    insert(model, helper.make_node("Add", [value, "extra"], ["value_plus"], name="node_plus"), after="extra")
    reroute(model, value, "value_plus")
    assert "node_extra (MatMul): it feeds the attention with the layer's activations" in refusal(model)


def test_gate_half_into_the_attention() -> None:
    model, layer = load(), first_layer()
    both = helper.make_node("Add", [layer.gate.query, layer.gate.gate], ["mixed"])
    insert(model, both, after=layer.gate.query)
    reader = next(n for n in model.graph.node if layer.gate.query in n.input and "mixed" not in n.output)
    reroute(model, layer.gate.query, "mixed", only=reader.output[0])
    assert "feeds the attention with the layer's activations past the four projections" in refusal(model)


def test_two_softmaxes() -> None:
    model = load()
    softmax = cuts(model)[0].softmax
    again = helper.make_node("Softmax", [softmax.output], ["again"])
    insert(model, again, after=softmax.output)
    reroute(model, softmax.output, "again")
    assert "2 Softmax or Attention nodes lie in the cut; one was expected" in refusal(model)


def test_norm_of_the_wrong_projection() -> None:
    """A strategy that mixes up two norms is found out."""
    index, anchors = anchors_of(load())
    norms = anchors[0].norms
    swapped = replace(anchors[0], norms={**norms, "q_norm": norms["k_norm"], "k_norm": norms["q_norm"]})
    with pytest.raises(RefusedError, match="q_norm should norm q_proj in the cut, but norms k_proj"):
        check_layer(index, swapped)


def test_softcap() -> None:
    model = load("layer-dynamo-23-sdpa")
    attention = next(n for n in model.graph.node if n.op_type == "Attention")
    next(a for a in attention.attribute if a.name == "softcap").f = 30.0
    assert "it caps its scores (softcap)" in refusal(model)


def test_interleaved_rope() -> None:
    model = load()
    step = add_constant(model, "step_two", np.array([2]))
    index, layers = anchors_of(model)
    views = {"Transpose", "Reshape"}
    slices = [n for _, n in index.forward(layers[0].norms["k_norm"].output, views) if n.op == "Slice"]
    node(model, slices[0].output).input[4] = step
    assert "interleaved RoPE pairs; QSA rotates halves" in refusal(model)


def test_every_indexer_must_be_covered() -> None:
    """Half of a model is never patched."""
    index, anchors = anchors_of(load())
    with pytest.raises(RefusedError, match="this indexer belongs to no layer that could be found"):
        check_coverage(index, [check_layer(index, anchors[0])])


def test_another_selection_than_topk() -> None:
    model = load()
    next(n for n in model.graph.node if n.op_type == "TopK").op_type = "MyTopK"
    assert "no TopK (the indexer's choice of blocks) lies in the cut" in refusal(model)


def test_a_value_that_nothing_reads() -> None:
    model, layer = load(), first_layer()
    reroute(model, layer.projections["v_proj"], layer.projections["k_proj"])
    attach(model, "Neg", layer.projections["v_proj"], "spy")
    assert f"the attention does not depend on v_proj ({layer.projections['v_proj']})" in refusal(model)


def test_router_whose_softmax_follows_its_topk() -> None:
    """A mixture of experts chooses by TopK too; it is no attention."""
    model, layer = load(), first_layer()
    hidden = node(model, layer.projections["k_proj"]).input[0]
    add_constant(model, "router_weight", np.ones((32, 8), np.float32))
    add_constant(model, "two", np.array([2]))
    for new, after in (
        (helper.make_node("MatMul", [hidden, "router_weight"], ["router"]), hidden),
        (helper.make_node("TopK", ["router", "two"], ["best", "experts"]), "router"),
        (helper.make_node("Softmax", ["best"], ["shares"]), "best"),
    ):
        insert(model, new, after=after)
    expose(model, "shares")
    assert len(cuts(model)) == 2
