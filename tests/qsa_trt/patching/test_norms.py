"""RMSNorms in every spelling that exporters use, and what is none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.patching.norms import RmsNorm, find_norms

Spec = tuple[str, list[str], str]
MEAN: list[Spec] = [("ReduceMean", ["squares", "last"], "mean"), ("Add", ["mean", "eps"], "var")]
TAILS: dict[str, list[Spec]] = {
    "reciprocal": [("Sqrt", ["var"], "std"), ("Reciprocal", ["std"], "inv"), ("Mul", ["x", "inv"], "n")],
    "one over": [("Sqrt", ["var"], "std"), ("Div", ["one", "std"], "inv"), ("Mul", ["inv", "x"], "n")],
    "division": [("Sqrt", ["var"], "std"), ("Div", ["x", "std"], "n")],
    "power": [("Pow", ["var", "minus_half"], "inv"), ("Mul", ["x", "inv"], "n")],
}


def norms(specs: Sequence[Spec], **changes: np.ndarray) -> list[RmsNorm]:
    constants = {
        "last": np.array([-1]),
        "eps": np.array(1e-5, np.float32),
        "two": np.array(2, np.float32),
        "one": np.array(1, np.float32),
        "minus_half": np.array(-0.5, np.float32),
        "gamma": np.linspace(0.5, 1.5, 16, dtype=np.float32),
    } | changes
    nodes = [
        helper.make_node(op, inputs, [output], **({"to": TensorProto.FLOAT} if op == "Cast" else {}))
        for op, inputs, output in specs
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("raw", TensorProto.FLOAT, ["b", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 16])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return find_norms(GraphIndex(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])))


@pytest.mark.parametrize("square", ["power", "product"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("gamma_first", [False, True])
def test_plain_spellings(square: str, tail: str, gamma_first: bool) -> None:
    squares: Spec = ("Pow", ["x", "two"], "squares") if square == "power" else ("Mul", ["x", "x"], "squares")
    scale: Spec = ("Mul", ["gamma", "n"] if gamma_first else ["n", "gamma"], "y")
    [norm] = norms([("Cast", ["raw"], "x"), squares, *MEAN, *TAILS[tail], scale])
    assert (norm.source, norm.output, norm.gamma) == ("raw", "y", "gamma")
    assert norm.eps == pytest.approx(1e-5)


def test_cast_before_the_weight() -> None:
    steps: list[Spec] = [("Cast", ["n"], "half"), ("Mul", ["half", "gamma"], "y")]
    [norm] = norms([("Identity", ["raw"], "x"), ("Pow", ["x", "two"], "squares"), *MEAN, *TAILS["division"], *steps])
    assert norm.output == "y"


@pytest.mark.parametrize("op", ["SimplifiedLayerNormalization", "RMSNormalization"])
def test_fused(op: str) -> None:
    [norm] = norms([(op, ["raw", "gamma"], "y")])
    assert (norm.source, norm.output, norm.gamma, norm.eps) == ("raw", "y", "gamma", pytest.approx(1e-5))


@pytest.mark.parametrize(
    "specs",
    [
        [("Pow", ["raw", "one"], "squares"), *MEAN],  # not a square
        [("Mul", ["raw", "gamma"], "squares"), *MEAN],
    ],
)
def test_means_of_other_things(specs: list[Spec]) -> None:
    rest: list[Spec] = [("Sqrt", ["var"], "std"), ("Div", ["raw", "std"], "n"), ("Mul", ["n", "gamma"], "y")]
    assert norms([*specs, *rest]) == []


def test_weight_that_is_computed() -> None:
    steps: list[Spec] = [("Pow", ["x", "two"], "squares"), *MEAN, *TAILS["division"], ("Mul", ["n", "raw"], "y")]
    assert norms([("Identity", ["raw"], "x"), *steps]) == []


def test_weight_that_is_not_folded() -> None:
    """1 + w, as graphs hold it that nobody optimised."""
    steps: list[Spec] = [("Pow", ["x", "two"], "squares"), *MEAN, *TAILS["division"], ("Mul", ["n", "one_plus"], "y")]
    [norm] = norms([("Add", ["gamma", "one"], "one_plus"), ("Identity", ["raw"], "x"), *steps])
    assert norm.gamma == "one_plus"


def test_opset_17_mean_with_an_axes_attribute() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[b,16] x) => (float[b,16] y)
        <float two = {2.0}, float eps = {0.000001}, float[2] gamma = {1.0, 2.0}> {
          s = Pow(x, two)
          m = ReduceMean<axes = [-1], keepdims = 1>(s)
          v = Add(m, eps)
          d = Sqrt(v)
          n = Div(x, d)
          y = Mul(n, gamma)
        }""")
    assert [n.gamma for n in find_norms(GraphIndex(model))] == ["gamma"]


@pytest.mark.parametrize(("axis", "found"), [(-1, 1), (1, 1), (0, 0), (-2, 0)])
def test_mean_over_another_axis_is_no_norm(axis: int, found: int) -> None:
    steps: list[Spec] = [("Cast", ["raw"], "x"), ("Pow", ["x", "two"], "squares"), *MEAN, *TAILS["reciprocal"]]
    assert len(norms([*steps, ("Mul", ["n", "gamma"], "y")], last=np.array([axis]))) == found


@pytest.mark.parametrize(("axis", "found"), [(-1, 1), (2, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("op", ["RMSNormalization", "SimplifiedLayerNormalization"])
def test_fused_norm_over_more_axes_is_no_norm(op: str, axis: int, found: int) -> None:
    """`axis` is the first one that is normed over."""
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "gamma"], ["y"], axis=axis)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 3, 16])],
        [numpy_helper.from_array(np.ones(16, np.float32), "gamma")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    assert len(find_norms(GraphIndex(model))) == found


def test_weight_along_another_axis_is_no_norm() -> None:
    """One factor a head scales heads, not the dims of a head."""
    steps: list[Spec] = [("Cast", ["raw"], "x"), ("Pow", ["x", "two"], "squares"), *MEAN, *TAILS["reciprocal"]]
    gamma = np.ones((16, 1), np.float32)
    assert norms([*steps, ("Mul", ["n", "gamma"], "y")], gamma=gamma) == []
