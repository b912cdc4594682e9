"""Fused operators as plain ones, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_trt.patching.fused_ops import restore, to_plain
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.recording import open_session

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
