"""Fused operators as plain ones, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.errors import RefusedError
from qsa_trt.patching.fused_ops import restore, to_plain
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.recording import open_session
from tests.support.compare import BOUND, errors, patch
from tests.support.forms import drop_dead
from tests.support.graphs import add_constant, load, node, strip_names
from tests.support.mutations import THROUGH

A, B = [2, 3, 4, 5], [2, 3, 6, 5]


def model(nodes: list[onnx.NodeProto], *, b_is_weight: bool = False) -> onnx.ModelProto:
    """a [2, 3, 4, 5] and b [2, 3, 6, 5] to y."""
    b = np.random.default_rng(0).standard_normal(B, np.float32)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("a", A), ("b", B))][: 2 - b_is_weight],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(b, "b")] if b_is_weight else [],
    )
    for name, value in {"last": np.array([-1]), "third": np.array([2])}.items():
        graph.initializer.append(numpy_helper.from_array(value, name))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def product(**attributes: Any) -> list[onnx.NodeProto]:
    return [helper.make_node("FusedMatMul", ["a", "b"], ["y"], name="p", domain="com.microsoft", **attributes)]


def softmax(*, axes: str = "last", keepdims: int = 1, of: str = "a") -> list[onnx.NodeProto]:
    return [
        helper.make_node("ReduceMax", ["a", "last"], ["m"], keepdims=keepdims),
        helper.make_node("Sub", [of, "m"], ["s"]),
        helper.make_node("Exp", ["s"], ["e"]),
        helper.make_node("ReduceSum", ["e", axes], ["t"], keepdims=keepdims),
        helper.make_node("Div", ["e", "t"], ["y"], name="divide"),
    ]


def result(model: onnx.ModelProto) -> np.ndarray:
    rng = np.random.default_rng(1)
    values = {"a": rng.standard_normal(A, np.float32), "b": rng.standard_normal(B, np.float32)}
    return np.asarray(open_session(model).run(["y"], {v.name: values[v.name] for v in model.graph.input})[0])


PLAIN = {
    "transposed": (product(transB=1), ["Transpose", "MatMul"]),
    "scaled": (product(transB=1, alpha=0.25), ["Transpose", "Constant", "MatMul", "Mul"]),
    "softmax": (softmax(), ["ReduceMax", "Sub", "Exp", "ReduceSum", "Softmax"]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_form_is_equal_and_comes_back(name: str) -> None:
    nodes, ops = PLAIN[name]
    plain = model(nodes)
    rewritten = to_plain(plain, GraphIndex(plain))
    assert len(rewritten) == 1 and [n.op_type for n in plain.graph.node] == ops
    assert np.allclose(result(plain), result(model(nodes)), atol=1e-6)
    restore(plain, rewritten)
    assert plain == model(nodes)


def test_transposed_first_operand() -> None:
    square = model(product(transA=1, transB=1))
    for value in square.graph.input:
        value.type.tensor_type.shape.dim[2].dim_value = value.type.tensor_type.shape.dim[3].dim_value = 5
    assert len(to_plain(square, GraphIndex(square))) == 1
    assert [n.op_type for n in square.graph.node] == ["Transpose", "Transpose", "MatMul"]


def test_a_part_that_changed_stays_plain() -> None:
    plain = model(product(transB=1, alpha=0.25))
    rewritten = to_plain(plain, GraphIndex(plain))
    plain.graph.node[-1].input[1] = "last"
    restore(plain, rewritten)
    assert [n.op_type for n in plain.graph.node] == PLAIN["scaled"][1]


@pytest.mark.parametrize(
    "nodes",
    [
        product(transBatchB=1),
        softmax(axes="third"),
        softmax(keepdims=0),
        softmax(of="b"),
        [helper.make_node("Div", ["a", "b"], ["y"])],
    ],
)
def test_other_nodes_stay(nodes: list[onnx.NodeProto]) -> None:
    other = model(nodes)
    assert to_plain(other, GraphIndex(other)) == [] and list(other.graph.node) == nodes


def test_products_with_weights_stay() -> None:
    """They are projections, which are no part of a cut."""
    other = model(product(transB=1, alpha=0.5), b_is_weight=True)
    assert to_plain(other, GraphIndex(other)) == []


def test_unknown_rank_stays() -> None:
    other = model(product(transB=1))
    for value in other.graph.input:
        value.type.tensor_type.ClearField("shape")
    assert to_plain(other, GraphIndex(other)) == []


def test_taken_names_are_avoided() -> None:
    other = model(product(transB=1))
    other.graph.node[0].input[1] = "y/transBposed"
    other.graph.input[1].name = "y/transBposed"
    to_plain(other, GraphIndex(other))
    assert [list(n.output) for n in other.graph.node] == [["y/transBposed_1"], ["y"]]


def multi_head(model: onnx.ModelProto, **attributes: Any) -> None:
    """Layer 0 of `qsa_lm` with one MultiHeadAttention from roped queries and repeated keys and values on."""
    flat = add_constant(model, "mha_flat", np.array([0, 0, 512]))
    mask = next(t for t in node(model, THROUGH["masked_logits"]).input if t != THROUGH["logits"])
    nodes, operands = [], []
    for tensor in (THROUGH["q_roped"], THROUGH["k_repeated"], THROUGH["v_repeated"]):
        nodes.append(helper.make_node("Transpose", [tensor], [f"{tensor}_t"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"{tensor}_t", flat], [f"{tensor}_flat"]))
        operands.append(f"{tensor}_flat")
    attention = THROUGH["attention"]
    nodes.append(
        helper.make_node(
            "MultiHeadAttention", [*operands, "", "", mask], [attention], name="mha", domain="com.microsoft",
            **{"num_heads": 8, **attributes},
        )
    )  # fmt: skip
    position = next(i for i, n in enumerate(model.graph.node) if attention in n.output)
    del model.graph.node[position]
    for i, new in enumerate(nodes):
        model.graph.node.insert(position + i, new)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    drop_dead(model)


@pytest.mark.parametrize("bare", [False, True], ids=["scopes", "structure"])
def test_multi_head_attention(bare: bool, tmp_path: Path) -> None:
    lm = load()
    multi_head(lm)
    if bare:
        strip_names(lm)
    assert max(errors(lm, tmp_path)) <= BOUND


def test_scale_of_multi_head_attention(tmp_path: Path) -> None:
    lm = load()
    multi_head(lm, scale=0.25)
    assert [layer.geometry.scale for layer in patch(lm, tmp_path).layers] == [0.25, 0.125]


def test_multi_head_attention_elsewhere_keeps_its_form() -> None:
    lm = load()
    multi_head(lm)
    before = [n.SerializeToString(deterministic=True) for n in lm.graph.node]
    rewritten = to_plain(lm, GraphIndex(lm))
    assert len(rewritten) == 1 and not any(n.op_type == "MultiHeadAttention" for n in lm.graph.node)
    restore(lm, rewritten)
    assert [n.SerializeToString(deterministic=True) for n in lm.graph.node] == before


@pytest.mark.parametrize("position", [3, 4, 6])
def test_multi_head_attention_with_other_inputs_is_refused(position: int, tmp_path: Path) -> None:
    """A packed bias, a mask of keys, a cache."""
    lm = load()
    multi_head(lm)
    changed = node(lm, THROUGH["attention"])
    changed.input.extend([""] * (position + 1 - len(changed.input)))
    changed.input[position] = "mha_flat"
    with pytest.raises(RefusedError, match="0 Softmax or Attention nodes lie in the cut; one was expected"):
        patch(lm, tmp_path)


def grouped(**attributes: Any) -> onnx.ModelProto:
    """GroupQueryAttention of one token over a cache: 4 query heads, 2 KV heads of 8."""
    info = helper.make_tensor_value_info
    cache = ["b", 2, "past", 8]
    inputs = [
        info("q", TensorProto.FLOAT, ["b", 1, 32]), info("k", TensorProto.FLOAT, ["b", 1, 16]),
        info("v", TensorProto.FLOAT, ["b", 1, 16]), info("past_k", TensorProto.FLOAT, cache),
        info("past_v", TensorProto.FLOAT, cache), info("seqlens", TensorProto.INT32, ["b"]),
        info("total", TensorProto.INT32, []), info("bias", TensorProto.FLOAT, ["b", 1, 1, "total"]),
    ]  # fmt: skip
    attention = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "past_k", "past_v", "seqlens", "total", "", "", "", "bias"],
        ["y", "present_k", "present_v"], name="gqa", domain="com.microsoft",
        **{"num_heads": 4, "kv_num_heads": 2, **attributes},
    )  # fmt: skip
    outputs = [info(name, TensorProto.FLOAT, None) for name in attention.output]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([attention], "g", inputs, outputs), opset_imports=opsets, ir_version=10)


def test_group_query_attention_is_equal_in_plain_form() -> None:
    fused, plain = grouped(), grouped()
    assert len(to_plain(plain, GraphIndex(plain))) == 1
    rng = np.random.default_rng(2)
    shapes = {"q": (2, 1, 32), "k": (2, 1, 16), "v": (2, 1, 16), "past_k": (2, 2, 5, 8), "past_v": (2, 2, 5, 8)}
    feeds: dict[str, Any] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    feeds["bias"] = np.where(rng.random((2, 1, 1, 6)) < 0.3, np.float32(-1e9), np.float32(0))
    lengths = {"seqlens": np.full(2, 5, np.int32), "total": np.array(6, np.int32)}
    expected = open_session(fused).run(None, feeds | lengths)
    names = {v.name for v in open_session(plain).get_inputs()}
    actual = open_session(plain).run(None, {n: v for n, v in (feeds | lengths).items() if n in names})
    for a, b in zip(actual, expected, strict=True):
        assert np.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("attributes", [{"do_rotary": 1}, {"local_window_size": 4}, {"softcap": 2.0}])
def test_group_query_attention_that_does_more_stays(attributes: dict[str, Any]) -> None:
    other = grouped(**attributes)
    assert to_plain(other, GraphIndex(other)) == []
