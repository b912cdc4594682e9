"""Partial evaluation of the integer tensors that exporters compute shapes and slice bounds with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .graph_index import Dim, GraphIndex, Node

#: Elements of a scalar or 1-D integer tensor, None where the value is unknown.
Values = tuple[int | None, ...]
_VIEWS = frozenset({"Squeeze", "Unsqueeze", "Identity", "Cast", "Reshape"})
_ALIKE = ("Cast", "Identity", "Neg")


def integers(index: GraphIndex, tensor: str) -> Values | None:
    """What is known about the elements of `tensor`; None where not even their number is known."""
    constant = index.constant(tensor)
    if constant is not None:
        whole = np.issubdtype(constant.dtype, np.integer) and constant.ndim <= 1
        return tuple(int(v) for v in constant.ravel()) if whole else None
    node = index.producer(tensor)
    if node is None:
        return None
    if node.op in _VIEWS:
        return index.integers(node.inputs[0])
    rule = _RULES.get(node.op)
    return rule(index, node) if rule else None


def computed_shape(index: GraphIndex, node: Node) -> tuple[Dim, ...] | None:
    """Shape of a node's output where ONNX's inference gives up: its bounds or target are only partly constant."""
    if node.op == "Reshape":
        target = index.integers(node.inputs[1])
        return None if target is None else tuple(d if d is not None and d > 0 else None for d in target)
    if node.op in ("Add", "Mul", "Concat"):
        return _joined_shape(index, node)
    shape = index.shape(node.inputs[0]) if node.op in (*_ALIKE, "Slice", "Unsqueeze") else None
    if shape is None or node.op in _ALIKE:
        return shape
    axes_input = 3 if node.op == "Slice" else 1
    axes = index.integers(node.inputs[axes_input]) if len(node.inputs) > axes_input else None
    if axes is None or any(a is None for a in axes):
        return None
    rank = len(shape) if node.op == "Slice" else len(shape) + len(axes)
    touched = {a % rank for a in axes if a is not None}
    if node.op == "Slice":
        return tuple(None if i in touched else d for i, d in enumerate(shape))
    rest = iter(shape)
    return tuple(1 if i in touched else next(rest) for i in range(rank))


def _joined_shape(index: GraphIndex, node: Node) -> tuple[Dim, ...] | None:
    """Where all operands have one rank: dims on which they agree, or which all but one broadcast to."""
    shapes = [shape for t in node.inputs if (shape := index.shape(t)) is not None]
    if len(shapes) < len(node.inputs) or len({len(shape) for shape in shapes}) != 1 or not shapes[0]:
        return None
    dims = [{d for d in column if d != 1} or {1} for column in zip(*shapes, strict=True)]
    if node.op == "Concat":
        dims[node.attribute("axis", 0) % len(dims)] = {None}
    return tuple(column.pop() if len(column) == 1 else None for column in dims)


def _shape(index: GraphIndex, node: Node) -> Values | None:
    shape = index.shape(node.inputs[0])
    if shape is None:
        return None
    bounds = slice(node.attribute("start", 0), node.attribute("end"))
    return tuple(d if isinstance(d, int) else None for d in shape[bounds])


def _concat(index: GraphIndex, node: Node) -> Values | None:
    parts = [index.integers(name) for name in node.inputs]
    return None if any(p is None for p in parts) else tuple(v for p in parts if p is not None for v in p)


def _gather(index: GraphIndex, node: Node) -> Values | None:
    values, picks = index.integers(node.inputs[0]), index.integers(node.inputs[1])
    if values is None or picks is None or any(p is None or not -len(values) <= p < len(values) for p in picks):
        return None
    return tuple(values[p] for p in picks if p is not None)


def _elementwise(compute: Callable[[int, int], int | None]) -> Callable[[GraphIndex, Node], Values | None]:
    def rule(index: GraphIndex, node: Node) -> Values | None:
        a, b = index.integers(node.inputs[0]), index.integers(node.inputs[1])
        if a is None or b is None or 0 in (len(a), len(b)) or (len(a) != len(b) and 1 not in (len(a), len(b))):
            return None
        size = max(len(a), len(b))
        pairs = zip(a * (size // len(a)), b * (size // len(b)), strict=True)
        return tuple(None if x is None or y is None else compute(x, y) for x, y in pairs)

    return rule


_RULES: dict[str, Callable[[GraphIndex, Node], Values | None]] = {
    "Shape": _shape,
    "Concat": _concat,
    "Gather": _gather,
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(lambda a, b: int(a / b) if b else None),  # ONNX divides integers toward zero
}
