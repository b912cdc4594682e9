"""Writes operators that optimisers fuse or take apart as plain ones, so that layers are found and followed in one form.

onnxruntime saves FusedMatMul for a product with its scale and transposes, and takes Softmax apart in half precision;
transformers' exporter fuses attention into MultiHeadAttention or, over a cache, into GroupQueryAttention. A node that
is not cut afterwards gets its own form back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .graph_index import GraphIndex, Node
from .names import Names

Nodes = list[onnx.NodeProto]


@dataclass(frozen=True)
class Rewritten:
    """One node, and the plain nodes that stand for it; the last of them makes its first output."""

    original: onnx.NodeProto
    plain: tuple[onnx.NodeProto, ...]


def to_plain(model: onnx.ModelProto, index: GraphIndex) -> list[Rewritten]:
    """Rewrite, in place, every node that has a plain form.

    Args:
        model: the model.
        index: its index, which fits no longer if anything is returned.
    """
    names = Names(model)
    rewritten: list[Rewritten] = []
    nodes: Nodes = []
    for node in index.nodes:
        rule = _RULES.get(node.op) if node in index.live else None
        plain = rule(index, node, names) if rule is not None else None
        if plain is not None:
            rewritten.append(Rewritten(node.proto, tuple(plain)))
        nodes += plain or [node.proto]
    if rewritten:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return rewritten


def restore(model: onnx.ModelProto, rewritten: Sequence[Rewritten]) -> None:
    """Give back their own form, in place, to the nodes of which every part is still there as it was."""
    present = {node.output[0]: node for node in model.graph.node if node.output}
    originals: dict[str, onnx.NodeProto] = {}
    gone: set[str] = set()
    for entry in rewritten:
        if all(present.get(node.output[0]) == node for node in entry.plain):
            originals[entry.plain[-1].output[0]] = entry.original
            gone.update(node.output[0] for node in entry.plain[:-1])
    if originals:
        kept = [n for n in model.graph.node if not n.output or n.output[0] not in gone]
        nodes = [originals.get(n.output[0], n) if n.output else n for n in kept]
        del model.graph.node[:]
        model.graph.node.extend(nodes)


class _Plain:
    """The nodes that stand for one node."""

    def __init__(self, node: Node, names: Names) -> None:
        self.node, self.names = node, names
        self.nodes: Nodes = []

    def add(self, op: str, inputs: Sequence[str], part: str, output: str | None = None, **attributes: Any) -> str:
        """Append a node and return its output: a fresh name unless it is one of the original's outputs."""
        made = self.names.fresh(f"{self.node.output}/{part}") if output is None else output
        name = f"{self.node.proto.name or self.node.output}/{part}"
        self.nodes.append(helper.make_node(op, inputs, [made], name=name, **attributes))
        return made

    def constant(self, value: NDArray[Any], part: str) -> str:
        return self.add("Constant", [], part, value=numpy_helper.from_array(value))


def _product(index: GraphIndex, node: Node, names: Names) -> Nodes | None:
    """FusedMatMul of two activations: alpha * op(A) @ op(B). A projection by a weight stays as it is."""
    if node.attribute("transBatchA", 0) or node.attribute("transBatchB", 0) or index.is_constant(node.inputs[1]):
        return None
    plain, operands = _Plain(node, names), list(node.inputs)
    for i, attribute in enumerate(("transA", "transB")):
        if node.attribute(attribute, 0):
            shape = index.shape(operands[i])
            if shape is None:
                return None
            perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            operands[i] = plain.add("Transpose", [operands[i]], f"{attribute}posed", perm=perm)
    alpha = node.attribute("alpha", 1.0)
    if alpha == 1.0:
        plain.add("MatMul", operands, "MatMul", node.output)
        return plain.nodes
    element = index.elem_type(node.output) or index.elem_type(node.inputs[0])
    if not element:
        return None
    scale = plain.constant(np.asarray(alpha, helper.tensor_dtype_to_np_dtype(element)), "alpha")
    plain.add("Mul", [plain.add("MatMul", operands, "MatMul"), scale], "Mul", node.output)
    return plain.nodes


def _softmax(index: GraphIndex, node: Node, names: Names) -> Nodes | None:
    """exp(x - max(x)) over its sum."""
    top, total = (index.producer(t) for t in node.inputs)
    if top is None or total is None or top.op != "Exp" or total.op != "ReduceSum" or total.inputs[0] != top.output:
        return None
    shifted = index.producer(top.inputs[0])
    if shifted is None or shifted.op != "Sub":
        return None
    highest = index.producer(shifted.inputs[1])
    if highest is None or highest.op != "ReduceMax" or highest.inputs[0] != shifted.inputs[0]:
        return None
    axes = {_one_axis(index, reduction) for reduction in (total, highest)}
    axis = axes.pop()
    if axes or axis is None:
        return None
    return [helper.make_node("Softmax", [shifted.inputs[0]], [node.output], name=node.proto.name, axis=axis)]


def _one_axis(index: GraphIndex, reduction: Node) -> int | None:
    """The one axis of a reduction that keeps its dims."""
    axes = reduction.attribute("axes")
    if axes is None and len(reduction.inputs) > 1:
        axes = index.integers(reduction.inputs[1])
    return axes[0] if axes and len(axes) == 1 and reduction.attribute("keepdims", 1) else None


@dataclass(frozen=True)
class _Heads:
    """What both fused attentions have: [B, S, heads*D] operands, a bias, and a cache [B, KV heads, past, D] or none."""

    operands: Sequence[str]
    heads: int
    kv_heads: int
    bias: str
    past: Sequence[str]
    present: Sequence[str]


def _multi_head(index: GraphIndex, node: Node, names: Names) -> Nodes | None:
    """MultiHeadAttention with query, key, value and an additive bias."""
    inputs = [*node.inputs, *[""] * 6][: max(6, len(node.inputs))]
    heads = node.attribute("num_heads", 0)
    if any(inputs[3:5]) or any(inputs[6:]) or any(node.outputs[1:]) or node.attribute("unidirectional", 0):
        return None
    return _attention(index, node, names, _Heads(inputs[:3], heads, heads, inputs[5], (), ()))


def _group_query(index: GraphIndex, node: Node, names: Names) -> Nodes | None:
    """GroupQueryAttention of heads that are normed and rotated before, with an additive bias, over a growing cache."""
    inputs = [*node.inputs, *[""] * 11][: max(11, len(node.inputs))]
    plain = {"do_rotary": 0, "local_window_size": -1, "softcap": 0.0, "smooth_softmax": 0, "qk_output": 0}
    if any(inputs[7:10]) or any(inputs[11:]) or any(node.attribute(a, v) != v for a, v in plain.items()):
        return None
    if not all((*inputs[:5], inputs[10])) or any(node.outputs[3:]):
        return None
    heads = _Heads(
        inputs[:3], node.attribute("num_heads", 0), node.attribute("kv_num_heads", 0), inputs[10], inputs[3:5],
        [*node.outputs, "", ""][1:3],
    )  # fmt: skip
    return _attention(index, node, names, heads)


def _attention(index: GraphIndex, node: Node, names: Names, a: _Heads) -> Nodes | None:
    """Split into heads, transpose, append to the cache, repeat KV heads, softmax of scaled and biased scores."""
    width, element = index.last_dim(a.operands[0]), index.elem_type(a.operands[0])
    shapes = [index.shape(t) for t in a.operands]
    if not width or not element or not a.heads or not a.kv_heads or any(s is None or len(s) != 3 for s in shapes):
        return None
    size, dtype = width // a.heads, helper.tensor_dtype_to_np_dtype(element)
    plain = _Plain(node, names)
    states = []
    for part, tensor, heads in zip("qkv", a.operands, (a.heads, a.kv_heads, a.kv_heads), strict=True):
        shape = plain.constant(np.array([0, 0, heads, size]), f"{part}_shape")
        split = plain.add("Reshape", [tensor, shape], f"{part}_heads")
        states.append(plain.add("Transpose", [split], f"{part}_states", perm=[0, 2, 1, 3]))  # [B, heads, S, D]
    for i, past in enumerate(a.past):
        states[1 + i] = plain.add("Concat", [past, states[1 + i]], f"present_{i}", a.present[i] or None, axis=2)
    if a.heads != a.kv_heads:
        axis = plain.constant(np.array([2]), "axis")
        repeats = plain.constant(np.array([1, 1, a.heads // a.kv_heads, 1, 1]), "repeats")
        shape = plain.constant(np.array([0, a.heads, -1, size]), "repeated_shape")
        for i in (1, 2):
            row = plain.add("Expand", [plain.add("Unsqueeze", [states[i], axis], f"row_{i}"), repeats], f"rows_{i}")
            states[i] = plain.add("Reshape", [row, shape], f"repeated_{i}")
    scale = plain.constant(np.asarray(node.attribute("scale", 0.0) or size**-0.5, dtype), "scale")
    scores = plain.add("MatMul", [states[0], plain.add("Transpose", [states[1]], "k_t", perm=[0, 1, 3, 2])], "scores")
    scores = plain.add("Mul", [scores, scale], "scaled")
    if a.bias:
        scores = plain.add("Add", [scores, a.bias], "biased")
    weights = plain.add("Softmax", [scores], "weights", axis=-1)
    out = plain.add("Transpose", [plain.add("MatMul", [weights, states[2]], "out")], "out_t", perm=[0, 2, 1, 3])
    plain.add("Reshape", [out, plain.constant(np.array([0, 0, width]), "out_shape")], "flat", node.output)
    return plain.nodes


_RULES: dict[str, Callable[[GraphIndex, Node, Names], Nodes | None]] = {
    "FusedMatMul": _product,
    "Div": _softmax,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
}
