"""Layers in local functions are patched; those in bodies of If, Loop and Scan are refused; other bodies stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.errors import RefusedError
from qsa_trt.patching.bodies import check_bodies
from qsa_trt.patching.graph_index import GraphIndex
from tests.support.compare import BOUND, errors, patch
from tests.support.forms import as_sparse_ops
from tests.support.graphs import add_constant, first_layer, insert, load, node, reroute

DOMAIN = "pkg.model"


def into_function(model: onnx.ModelProto, output: str, name: str) -> None:
    """Move the nodes between the projections' activations of layer 0 and a tensor into a local function."""
    index, hidden = GraphIndex(model), node(model, first_layer().projections["k_proj"]).input[0]
    moved = index.descendants([hidden], follow=index.ancestors([output], stop=[hidden]).__contains__)
    made = {t for n in moved for t in n.outputs}
    reads = list(dict.fromkeys(t for n in moved for t in n.reads if t not in made))
    leaving = sorted(t for t in made if any(r not in moved for r in index.readers(t)))
    body = [n.proto for n in sorted(moved, key=lambda n: n.position)]
    opset = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function(DOMAIN, name, reads, leaving, body, opset))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    left = [n.proto for n in index.nodes if n not in moved]
    left.append(helper.make_node(name, reads, leaving, name=f"call_{name}", domain=DOMAIN))
    waiting = {t for n in left for t in n.output}
    del model.graph.node[:]
    while left:  # in topological order again
        ready = next(n for n in left if waiting.isdisjoint(n.input))
        left.remove(ready)
        waiting -= set(ready.output)
        model.graph.node.append(ready)


@pytest.mark.parametrize("where", ["attention", "indexer"])
def test_layer_in_a_local_function(where: str, tmp_path: Path) -> None:
    """The whole attention up to the gate, or a part of it, stands in a function that the graph calls."""
    model = load()
    into_function(model, "mul_926" if where == "attention" else "topk__0", "Attention")
    onnx.checker.check_model(model)
    assert max(errors(model, tmp_path)) <= BOUND
    patched = onnx.load(tmp_path / "out.onnx")
    assert [f.name for f in patched.functions] == ["QsaAttention"]


def test_inlined_functions_are_named(tmp_path: Path) -> None:
    model = load()
    into_function(model, "mul_926", "Attention")
    assert "local functions were inlined: Attention" in patch(model, tmp_path).warnings


def test_functions_that_cannot_be_inlined(tmp_path: Path) -> None:
    model = load()
    into_function(model, "mul_926", "Attention")
    model.functions[0].opset_import[0].version = 17
    with pytest.raises(RefusedError, match="local function Attention: onnx cannot inline it"):
        patch(model, tmp_path)


def branch(nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)])


def in_if(model: onnx.ModelProto) -> None:
    """The whole model runs in a branch; the other one has zeros."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    zeros = helper.make_node("ConstantOfShape", ["if_shape"], ["if_zeros"])
    shape = helper.make_node("Constant", [], ["if_shape"], value_ints=[1, 1, 128])
    bodies = {"then_branch": branch(nodes, "logits"), "else_branch": branch([shape, zeros], "if_zeros")}
    model.graph.input.append(helper.make_tensor_value_info("run", TensorProto.BOOL, []))
    model.graph.node.append(helper.make_node("If", ["run"], ["result"], name="whole_model", **bodies))
    model.graph.output[0].name = "result"


def in_loop(model: onnx.ModelProto) -> None:
    """The whole model runs in a loop."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    nodes.append(helper.make_node("Identity", ["go_on"], ["go_on_out"]))
    body = helper.make_graph(
        nodes,
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("go_on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, None),
        ],
    )
    add_constant(model, "trips", np.array(1))
    model.graph.node.append(helper.make_node("Loop", ["trips", ""], ["result"], name="whole_model", body=body))
    model.graph.output[0].name = "result"


def nested(model: onnx.ModelProto) -> None:
    in_if(model)
    inner = model.graph.node[0]
    model.graph.input.append(helper.make_tensor_value_info("outer", TensorProto.BOOL, []))
    empty = branch([helper.make_node("Constant", [], ["nothing"], value_floats=[0.0])], "nothing")
    node_if = helper.make_node(
        "If", ["outer"], ["outer_result"], name="outer_if", then_branch=branch([inner], "result"), else_branch=empty
    )
    del model.graph.node[:]
    model.graph.node.append(node_if)
    model.graph.output[0].name = "outer_result"


@pytest.mark.parametrize("move", [in_if, in_loop, nested])
def test_layers_in_a_body_are_refused(move: object, tmp_path: Path) -> None:
    model = load()
    move(model)  # type: ignore[operator]
    onnx.checker.check_model(model)
    name = "outer_if (If)" if move is nested else f"whole_model ({'If' if move is in_if else 'Loop'})"
    with pytest.raises(RefusedError) as error:
        patch(model, tmp_path)
    assert f"node_topk__1 (TopK): this indexer lies in a body of {name}, and a pool cannot go" in str(error.value)
    assert not (tmp_path / "out.onnx").exists()


def test_layers_in_a_scan_are_refused() -> None:
    """One sequence after the other."""
    model = load()
    nodes = [*model.graph.node, helper.make_node("Identity", ["count"], ["count_out"])]
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes,
        "body",
        [info("count", TensorProto.INT64, []), *model.graph.input],
        [info("count_out", TensorProto.INT64, []), info("logits", TensorProto.FLOAT, None)],
    )
    del model.graph.node[:]
    add_constant(model, "zero_sequences", np.array(0))
    inputs = ["zero_sequences", "input_ids", "attention_mask"]
    scan = helper.make_node("Scan", inputs, ["sequences", "result"], name="sequences", body=body, num_scan_inputs=2)
    model.graph.node.append(scan)
    model.graph.output[0].name = "result"
    with pytest.raises(RefusedError, match=r"this indexer lies in a body of sequences \(Scan\), and a pool cannot go"):
        check_bodies(GraphIndex(model))


def test_sparse_operators_in_a_body_are_refused(tmp_path: Path) -> None:
    model = as_sparse_ops()
    in_if(model)
    del model.graph.output[1:]
    with pytest.raises(
        RefusedError, match=r"SparseAttentionIndexer \(SparseAttentionIndexer\): this indexer lies in a body"
    ):
        patch(model, tmp_path)


def test_body_beside_the_attention_stays(tmp_path: Path) -> None:
    """An If whose branches read a projection, which the cut leaves."""
    model, key = load(), first_layer().projections["k_proj"]
    add_constant(model, "always", np.array(True))
    bodies = {
        "then_branch": branch([helper.make_node("Relu", [key], ["then_out"])], "then_out"),
        "else_branch": branch([helper.make_node("Neg", [key], ["else_out"])], "else_out"),
    }
    insert(model, helper.make_node("If", ["always"], ["spy"], name="spy", **bodies), after=key)
    model.graph.output.append(helper.make_tensor_value_info("spy", TensorProto.FLOAT, None))
    assert max(errors(model, tmp_path)) <= BOUND
    assert "spy" in [n.name for n in onnx.load(tmp_path / "out.onnx").graph.node]


def test_mask_made_in_a_body_goes(tmp_path: Path) -> None:
    """An If that makes a part of the mask from positions goes with the mask."""
    model = load()
    add_constant(model, "always", np.array(True))
    mask = "bitwise_and_1"
    bodies = {
        name: helper.make_graph(
            [helper.make_node("Identity", [mask], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.BOOL, None)],
        )
        for name in ("then_branch", "else_branch")
    }
    insert(model, helper.make_node("If", ["always"], ["chosen_mask"], name="mask_if", **bodies), after=mask)
    for n in model.graph.node:
        if n.name != "mask_if":
            n.input[:] = ["chosen_mask" if t == mask else t for t in n.input]
    assert max(errors(model, tmp_path)) <= BOUND
    assert "mask_if" not in [n.name for n in onnx.load(tmp_path / "out.onnx").graph.node]


def test_body_inside_the_cut_that_reads_a_cut_tensor(tmp_path: Path) -> None:
    """What a body adds to the scores would be lost without a word."""
    model = load()
    add_constant(model, "always", np.array(True))
    bodies = {
        "then_branch": branch([helper.make_node("Neg", ["val_738"], ["then_out"])], "then_out"),
        "else_branch": branch([helper.make_node("Identity", ["val_738"], ["else_out"])], "else_out"),
    }
    insert(model, helper.make_node("If", ["always"], ["more"], name="more", **bodies), after="val_738")
    insert(model, helper.make_node("Add", ["val_738", "more"], ["sum"], name="sum"), after="more")
    reroute(model, "val_738", "sum", only="val_739")
    with pytest.raises(RefusedError, match=r"more \(If\): its body reads val_738, which the cut would remove"):
        patch(model, tmp_path)


def test_dead_bodies_are_no_reason(tmp_path: Path) -> None:
    model = load()
    other = load()
    in_if(other)
    other.graph.node[0].output[0] = "unused"
    model.graph.input.extend(v for v in other.graph.input if v.name == "run")
    model.graph.node.append(other.graph.node[0])
    check_bodies(GraphIndex(model))
