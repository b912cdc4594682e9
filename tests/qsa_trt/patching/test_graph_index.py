"""The read-only view: readers in bodies, constants, and what is known about shapes and integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_trt.patching.graph_index import SMALL, GraphIndex, Node


def index(nodes: list[onnx.NodeProto], outputs: list[str], **constants: object) -> GraphIndex:
    """A graph over input x, float [batch, seq, 24]."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", 24])],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return GraphIndex(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))


def make(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), name=f"node_{output}", **attributes)


def test_dead_nodes_are_no_readers() -> None:
    graph = index([make("Neg", "x", "y"), make("Abs", "x", "unused")], ["y"])
    assert [n.op for n in graph.readers("x")] == ["Neg"]


@pytest.mark.pitfall(35)
def test_bodies_read_from_outside() -> None:
    inner = helper.make_graph(
        [make("Add", "y local", "z")],
        "inner",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(1), "local")],
    )
    outer = helper.make_graph(
        [helper.make_node("If", ["flag"], ["w"], then_branch=inner, else_branch=inner)],
        "outer",
        [],
        [helper.make_tensor_value_info("w", TensorProto.FLOAT, None)],
    )
    node = helper.make_node("If", ["flag"], ["out"], then_branch=outer, else_branch=outer)
    graph = index([make("Neg", "x", "y"), node], ["out"], flag=np.array(True))
    assert [n.op for n in graph.readers("y")] == ["If"]
    assert set(graph.nodes[1].reads) == {"flag", "y"}


def test_ancestors_stop_and_descendants_follow() -> None:
    nodes = [make("Neg", "x", "a"), make("Abs", "a", "b"), make("Add", "a b", "c"), make("Neg", "c", "y")]
    graph = index(nodes, ["y"])
    assert {n.output for n in graph.ancestors(["c"], stop=["a"])} == {"b", "c"}
    assert {n.output for n in graph.descendants(["a"], follow=lambda n: n.op != "Add")} == {"b"}


def test_constants_are_folded_and_large_ones_left_alone() -> None:
    nodes = [
        make("Constant", "", "one", value_float=1.0),
        make("Add", "w one", "gamma"),
        make("Identity", "gamma", "same"),
        make("Mul", "x same", "y"),
        make("Mul", "y large", "z"),
    ]
    graph = index(nodes, ["z"], w=np.arange(24, dtype=np.float32), large=np.zeros((SMALL + 1, 1), np.float32))
    assert graph.constant("same") is not None
    assert np.array_equal(graph.constant("same"), np.arange(24) + 1)  # type: ignore[arg-type]
    assert graph.is_constant("large") and graph.constant("large") is None
    assert not graph.is_constant("y") and graph.constant("y") is None
    assert graph.scalar("one") == 1.0 and graph.scalar("same") is None


def test_small_constants_in_external_data(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [make("Add", "x w", "y")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="m.data")
    loaded = onnx.load(path, load_external_data=False)
    assert np.array_equal(GraphIndex(loaded, tmp_path).constant("w"), np.arange(4))  # type: ignore[arg-type]


def test_shapes_of_partly_constant_reshapes() -> None:
    nodes = [
        make("Shape", "x", "s"),
        make("Gather", "s zero", "b"),
        make("Unsqueeze", "b axis0", "b1"),
        make("Concat", "b1 minus heads size", "target", axis=0),
        make("Reshape", "x target", "y"),
        make("Cast", "y", "z", to=TensorProto.FLOAT),
    ]
    constants = {"zero": 0, "axis0": [0], "minus": [-1], "heads": [4], "size": [6]}
    graph = index(nodes, ["z"], **{k: np.array(v, np.int64) for k, v in constants.items()})
    assert graph.integers("target") == (None, -1, 4, 6)
    assert graph.shape("z") == ("batch", None, 4, 6) and graph.last_dim("z") == 6


@pytest.mark.parametrize(("end", "width"), [([8], 8), ([1 << 62], 24), ([-4], 20)])
def test_integers_follow_shape_arithmetic(end: list[int], width: int) -> None:
    """Slice bounds as TorchScript computes them: (last dim + 1) / 2."""
    nodes = [
        make("Shape", "x", "s"),
        make("Gather", "s last", "d"),
        make("Add", "d one", "d1"),
        make("Div", "d1 two", "half"),
        make("Slice", "x zero end last", "y"),
        make("Slice", "x zero half last", "h"),
    ]
    constants = {"last": [-1], "one": [1], "two": [2], "zero": [0], "end": end}
    graph = index(nodes, ["y", "h"], **{k: np.array(v, np.int64) for k, v in constants.items()})
    assert graph.integers("half") == (12,)
    assert graph.last_dim("y") == width
    shape = graph.shape("h")
    assert shape is not None and shape[:2] == ("batch", "seq")


def test_names_made_up_by_inference_are_unknown() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["unk__7", "seq", 3]) for name in "xy")
    graph = helper.make_graph([make("Neg", "x", "y")], "g", [x], [y])
    assert GraphIndex(helper.make_model(graph)).shape("y") == (None, "seq", 3)


def test_shapes_of_joined_tensors() -> None:
    """What ONNX's inference leaves open where a bound of a Slice is computed."""
    nodes = [
        helper.make_node("Slice", ["x", "zero", "end", "two"], ["half"]),
        helper.make_node("Unsqueeze", ["half", "two"], ["column"]),
        helper.make_node("Neg", ["column"], ["negated"]),
        helper.make_node("Add", ["column", "negated"], ["sum"]),
        helper.make_node("Concat", ["sum", "negated"], ["joined"], axis=3),
        helper.make_node("Shape", ["joined"], ["dims"]),
        helper.make_node("Shape", ["x"], ["all"], start=1, end=2),
        helper.make_node("Identity", ["all"], ["end"]),
    ]
    graph = index([*nodes[6:], *nodes[:6]], ["dims"], zero=np.array([0]), two=np.array([2]))
    assert graph.shape("sum") == graph.shape("joined") == ("batch", "seq", 1, None)


@pytest.mark.parametrize(
    ("domain", "op", "expected"),
    [
        ("", "Relu", "Relu"),
        ("ai.onnx", "Relu", "Relu"),
        ("my.ops", "Relu", "my.ops::Relu"),
        ("com.microsoft", "FusedMatMul", "FusedMatMul"),
        ("com.microsoft", "Attention", "com.microsoft::Attention"),
    ],
)
def test_operators_of_other_domains_have_other_names(domain: str, op: str, expected: str) -> None:
    """onnxruntime's Attention is not ONNX's, and a Relu of one's own may do anything."""
    proto = helper.make_node(op, ["x"], ["y"], name="n", domain=domain)
    assert (Node(0, proto, ("x",)).op, Node(0, proto, ("x",)).label) == (expected, f"n ({expected})")
