"""Finds RMSNorms with a constant weight, written out in plain operators or as one fused node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .graph_index import GraphIndex, Node

_FUSED = frozenset({"SimplifiedLayerNormalization", "RMSNormalization"})
_CASTS = frozenset({"Cast", "Identity"})


@dataclass(frozen=True)
class RmsNorm:
    """One RMSNorm: `output = source / sqrt(mean(source^2) + eps) * gamma`."""

    source: str
    output: str
    gamma: str
    eps: float
    #: The node that averages the squares, or the fused node: what messages name.
    node: Node


def find_norms(index: GraphIndex, among: Iterable[Node] | None = None) -> list[RmsNorm]:
    """The RMSNorms over the last dim that the graph, or some of its nodes, compute, in graph order."""
    nodes = index.nodes if among is None else sorted(among, key=lambda n: n.position)
    return [norm for node in nodes if node in index.live for norm in _norms_at(index, node)]


def _norms_at(index: GraphIndex, node: Node) -> Iterator[RmsNorm]:
    if node.op in _FUSED and index.is_constant(node.inputs[1]) and _is_last(index, node, node.attribute("axis", -1)):
        eps = float(node.attribute("epsilon", 1e-5))
        yield RmsNorm(index.back(node.inputs[0], _CASTS), node.output, node.inputs[1], eps, node)
    elif node.op == "ReduceMean":
        source = _squared(index, node.inputs[0])
        axes = node.attribute("axes") or (index.integers(node.inputs[1]) if len(node.inputs) > 1 else None)
        if source is not None and axes and len(axes) == 1 and _is_last(index, node, axes[0]):
            yield from _plain_norm(index, node, source)


def _is_last(index: GraphIndex, node: Node, axis: int | None) -> bool:
    """Whether an axis is the last one of the node's first input."""
    shape = index.shape(node.inputs[0])
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _squared(index: GraphIndex, tensor: str) -> str | None:
    """x where `tensor` is x * x, seen through casts."""
    node = index.producer(index.back(tensor, _CASTS))
    if node is None:
        return None
    first, *rest = (index.back(t, _CASTS) for t in node.inputs)
    if node.op == "Pow" and index.scalar(node.inputs[1]) == 2.0:
        return first
    return first if node.op == "Mul" and rest == [first] else None


def _plain_norm(index: GraphIndex, mean: Node, source: str) -> Iterator[RmsNorm]:
    for variance, add in _readers(index, mean.output, "Add"):
        eps = index.scalar(_other(add, variance))
        if eps is None:
            continue
        for normed in _normed(index, add.output, source):
            for tensor, scale in _readers(index, normed, "Mul"):
                gamma = _other(scale, tensor)
                value = index.constant(gamma)
                if value is not None and value.size > 1 and value.shape[-1] == value.size:
                    yield RmsNorm(source, scale.output, gamma, eps, mean)


def _normed(index: GraphIndex, variance: str, source: str) -> Iterator[str]:
    """Tensors that are `source` over the square root of `variance`."""
    for _, power in _readers(index, variance, "Pow"):
        if index.scalar(power.inputs[1]) == -0.5:
            yield from _scaled(index, power.output, source)
    for _, sqrt in _readers(index, variance, "Sqrt"):
        for _, inverse in _readers(index, sqrt.output, "Reciprocal"):
            yield from _scaled(index, inverse.output, source)
        for root, division in _readers(index, sqrt.output, "Div"):
            if root != division.inputs[1]:
                continue
            if index.back(division.inputs[0], _CASTS) == source:
                yield division.output
            elif index.scalar(division.inputs[0]) == 1.0:
                yield from _scaled(index, division.output, source)


def _scaled(index: GraphIndex, inverse: str, source: str) -> Iterator[str]:
    for tensor, product in _readers(index, inverse, "Mul"):
        if index.back(_other(product, tensor), _CASTS) == source:
            yield product.output


def _readers(index: GraphIndex, tensor: str, op: str) -> list[tuple[str, Node]]:
    """The nodes of one operator that read a tensor or a cast of it, with the tensor each of them reads."""
    return [(name, node) for name, node in index.forward(tensor, _CASTS) if node.op == op]


def _other(node: Node, tensor: str) -> str:
    """The operand of a binary node that is not `tensor`."""
    first, second = node.inputs
    return second if first == tensor else first
