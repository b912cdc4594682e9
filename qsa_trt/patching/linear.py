"""Linear projections in all their forms: what they read, and the tensors [B, S, N] that leave them.

A projection may be a MatMul, a Gemm between two Reshapes, or quantised; it may carry a bias or be packed into one
product with its siblings. All of that stays in the graph: only the tensors on both of its sides matter.
"""

from __future__ import annotations

from collections.abc import Iterator

from .graph_index import GraphIndex, Node

#: Products with a weight, and the position of that weight.
WEIGHT_INPUT = {
    "MatMul": 1, "Gemm": 1, "FusedMatMul": 1, "MatMulNBits": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1, "QLinearMatMul": 3,
}  # fmt: skip
#: Those whose weight is a plain matrix [K, N], and not a vector or a batch of matrices.
_MATRIX_OPS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
#: Between the activations that all siblings share and the product itself.
_BEFORE = frozenset(
    {"Reshape", "Flatten", "Cast", "Identity", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
)


def is_linear(index: GraphIndex, node: Node) -> bool:
    """Whether the node multiplies an activation with a constant weight matrix `[K, N]`, K and N above 1."""
    position = WEIGHT_INPUT.get(node.op)
    if position is None or not index.is_constant(node.inputs[position]) or index.is_constant(node.inputs[0]):
        return False
    if node.op not in _MATRIX_OPS:
        return True
    shape = index.shape(node.inputs[position])
    return shape is not None and len(shape) == 2 and all(isinstance(d, int) and d > 1 for d in shape)


def source(index: GraphIndex, linear: Node) -> str:
    """The activations that a linear projection reads, before they are reshaped or quantised for it."""
    return index.back(linear.inputs[0], _BEFORE)


def siblings(index: GraphIndex, linear: Node) -> list[Node]:
    """The linear projections of the same activations, itself included, in graph order."""
    found = {node for _, node in index.forward(source(index, linear), _BEFORE) if is_linear(index, node)}
    return sorted(found, key=lambda n: n.position)


def end(index: GraphIndex, tensor: str) -> str:
    """The last tensor of a projection whose product, or an inner step, makes `tensor`.

    Follows the bias, the scales and roundings of quantisation, and the Reshape back from [B*S, N].
    """
    while (step := _next(index, tensor)) is not None:
        tensor = step
    return tensor


def _next(index: GraphIndex, tensor: str) -> str | None:
    readers = index.readers(tensor)
    if len(readers) != 1 or tensor in index.outputs:
        return None
    node, maker = readers[0], index.producer(tensor)
    others = [t for t in node.inputs if t and t != tensor]
    if node.op == "Add" and others and _is_vector(index, others[0]):
        return node.output
    if node.op in ("QuantizeLinear", "DequantizeLinear") and node.inputs[0] == tensor:
        return node.output
    integer = maker is not None and maker.op == "MatMulInteger"
    scaled = maker is not None and maker.op == "Cast" and _made_by(index, maker.inputs[0], "MatMulInteger")
    if (integer and node.op == "Cast") or (scaled and node.op == "Mul"):
        return node.output
    if node.op == "Reshape" and (_rank(index, tensor), _rank(index, node.output)) == (2, 3):
        return node.output
    return None


def _made_by(index: GraphIndex, tensor: str, op: str) -> bool:
    node = index.producer(tensor)
    return node is not None and node.op == op


def _is_vector(index: GraphIndex, tensor: str) -> bool:
    return index.is_constant(tensor) and _rank(index, tensor) == 1


def _rank(index: GraphIndex, tensor: str) -> int | None:
    shape = index.shape(tensor)
    return None if shape is None else len(shape)


def parts(index: GraphIndex, linear: Node) -> list[str]:
    """What a product is split into along its last axis of three: packed projections, or the parts of one."""
    whole = end(index, linear.output)
    split = [t for node in index.readers(whole) if _splits(index, whole, node) for t in node.outputs if t]
    return [end(index, t) for t in split]


def _splits(index: GraphIndex, tensor: str, node: Node) -> bool:
    """Whether a node takes parts of the last axis of [B, S, N]."""
    if _rank(index, tensor) != 3 or node.inputs[0] != tensor:
        return False
    if node.op == "Split":
        return node.attribute("axis", 0) in (-1, 2)
    return node.op == "Slice" and len(node.inputs) > 3 and index.integers(node.inputs[3]) in ((-1,), (2,))


def behind(index: GraphIndex, tensor: str) -> Iterator[Node]:
    """The nodes of the projection that `tensor` leaves, back to its product; nothing more where there is none."""
    node = index.producer(tensor)
    while node is not None:
        yield node
        activations = [t for t in node.reads if not index.is_constant(t)]
        if is_linear(index, node) or len(activations) != 1:
            return
        node = index.producer(activations[0])
