"""Writes operators that optimisers fuse or take apart as plain ones, so that layers are found and followed in one form.

onnxruntime saves FusedMatMul for a product with its scale and transposes, and takes Softmax apart in half precision. A
node that is not cut afterwards gets its own form back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .graph_index import GraphIndex, Node
from .names import Names


@dataclass(frozen=True)
class Rewritten:
    """One node, and the plain nodes that stand for it; the last of them makes its output."""

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
    nodes: list[onnx.NodeProto] = []
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


def _product(index: GraphIndex, node: Node, names: Names) -> list[onnx.NodeProto] | None:
    """FusedMatMul of two activations: alpha * op(A) @ op(B). A projection by a weight stays as it is."""
    if node.attribute("transBatchA", 0) or node.attribute("transBatchB", 0) or index.is_constant(node.inputs[1]):
        return None
    nodes: list[onnx.NodeProto] = []
    operands = list(node.inputs)
    for i, attribute in enumerate(("transA", "transB")):
        if node.attribute(attribute, 0):
            shape = index.shape(operands[i])
            if shape is None:
                return None
            perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            nodes.append(_node("Transpose", [operands[i]], node, f"{attribute}posed", names, perm=perm))
            operands[i] = nodes[-1].output[0]
    alpha, product = node.attribute("alpha", 1.0), node.output
    if alpha != 1.0:
        element = index.elem_type(node.output) or index.elem_type(node.inputs[0])
        if not element:
            return None
        value = np.asarray(alpha, helper.tensor_dtype_to_np_dtype(element))
        nodes.append(_node("Constant", [], node, "alpha", names, value=numpy_helper.from_array(value)))
        scale, product = nodes[-1].output[0], names.fresh(f"{node.output}/product")
    nodes.append(helper.make_node("MatMul", operands, [product], name=f"{node.proto.name}/MatMul"))
    if alpha != 1.0:
        nodes.append(helper.make_node("Mul", [product, scale], [node.output], name=f"{node.proto.name}/Mul"))
    return nodes


def _node(op: str, inputs: Sequence[str], like: Node, suffix: str, names: Names, **attributes: Any) -> onnx.NodeProto:
    name = f"{like.proto.name or like.output}/{suffix}"
    return helper.make_node(op, inputs, [names.fresh(f"{like.output}/{suffix}")], name=name, **attributes)


def _softmax(index: GraphIndex, node: Node, names: Names) -> list[onnx.NodeProto] | None:
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


_RULES: dict[str, Callable[[GraphIndex, Node, Names], list[onnx.NodeProto] | None]] = {
    "FusedMatMul": _product,
    "Div": _softmax,
}
