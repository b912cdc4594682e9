"""Strategy: the shape of the computation alone, for files without names.

A QSA indexer is a TopK over scores that come from a Relu over a MatMul of two activations; both go back to one linear
projection, whose input feeds three sibling projections.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from qsa_plugin.errors import RefusedError

from .anchors import NORMS, PROJECTIONS, Anchors, Gate, complete, find_gate, refuse
from .graph_index import GraphIndex, Node
from .linear import WEIGHT_INPUT, end, is_linear, parts, siblings
from .norms import RmsNorm

NAME = "structure"
#: Products that may score blocks, and where every other walk back from a TopK ends.
_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Einsum"})
_BARRIERS = _PRODUCTS | WEIGHT_INPUT.keys() | {"Conv", "Softmax", "TopK"}
_HALVING_OPS = frozenset({"Reshape", "Split", "Slice", "Cast", "Identity"})


def find(index: GraphIndex, norms: list[RmsNorm]) -> list[Anchors]:
    """The layers around the graph's indexers.

    Raises:
        RefusedError: an indexer whose layer lacks another anchor.
    """
    projections: dict[str, Node] = {}
    for topk, matmul in indexers(index):
        projection = _projection_behind(index, matmul)
        if projection is None:
            refuse(topk.label, matmul, "no linear projection (index_qk) is behind the indexer's scores")
        projections.setdefault(_index_qk(index, matmul, projection), projection)
    return complete(projections.items(), lambda found: _anchors(index, norms, *found))


def indexers(index: GraphIndex) -> list[tuple[Node, Node]]:
    """Every TopK over Relu scores of a MatMul of two activations, with that MatMul."""
    found = []
    for node in index.nodes:
        if node.op == "TopK" and node in index.live:
            matmul = next(_score_matmuls(index, node), None)
            if matmul is not None:
                found.append((node, matmul))
    return found


def _score_matmuls(index: GraphIndex, topk: Node) -> Iterator[Node]:
    """MatMuls of two activations that a Relu between them and `topk` rectifies."""
    stack, seen = [(topk.inputs[0], False)], set()
    while stack:
        tensor, rectified = stack.pop()
        node = index.producer(tensor)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op not in _BARRIERS:
            stack += [(name, rectified or node.op == "Relu") for name in node.reads]
        elif rectified and node.op in _PRODUCTS and not any(map(index.is_constant, node.reads)):
            yield node


def _projection_behind(index: GraphIndex, matmul: Node) -> Node | None:
    """The one linear projection that both operands of the indexer's MatMul go back to first."""
    sides = [set(_projections_behind(index, tensor)) for tensor in matmul.inputs]
    common = sides[0] & sides[1]
    last = [node for node in common if not any(node in index.ancestors(other.reads) for other in common - {node})]
    return last[0] if len(last) == 1 else None


def _projections_behind(index: GraphIndex, tensor: str) -> Iterator[Node]:
    """The first linear projections on the ways back from `tensor`."""
    stack, seen = [tensor], set()
    while stack:
        node = index.producer(stack.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_linear(index, node):
            yield node
        elif node.op not in ("Shape", "Size"):
            stack += node.reads


def _index_qk(index: GraphIndex, matmul: Node, projection: Node) -> str:
    """The tensor of the projection that both operands of the indexer's MatMul come from; a part where it is packed."""
    whole = end(index, projection.output)
    behind = [{t for node in index.ancestors([operand]) for t in node.reads} for operand in matmul.inputs]
    return next((part for part in parts(index, projection) if all(part in read for read in behind)), whole)


def selects_by_topk(index: GraphIndex, softmax: Node) -> bool:
    """Whether a TopK and a product of two activations lie behind a Softmax or Attention node, and in front of all
    projections by weights: an attention, and no router, whose softmax may follow its TopK too.
    """
    topk, product = False, softmax.op == "Attention"
    stack, seen = list(softmax.reads), set()
    while stack:
        node = index.producer(stack.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        topk |= node.op == "TopK"
        product |= node.op in _PRODUCTS and not any(map(index.is_constant, node.reads))
        if node.op not in ("Conv", "DynamicQuantizeLinear") and not is_linear(index, node):
            stack += node.reads
    return topk and product


def _anchors(index: GraphIndex, norms: list[RmsNorm], tensor: str, index_qk: Node) -> Anchors:
    layer = f"of {index_qk.proto.name or index_qk.output}"
    alone = tensor == end(index, index_qk.output)  # not packed with others
    linears = [node for node in siblings(index, index_qk) if not (alone and node is index_qk)]
    others = [t for node in linears for t in parts(index, node) or [end(index, node.output)] if t != tensor]
    query, gate = _gated_sibling(index, layer, others, index_qk)
    # What the attention reads besides the query: the key, which is normed, and the value, which is not.
    attention = index.ancestors([gate.attention], stop=others)
    rest = [t for t in others if t != query and any(node in attention for node in index.readers(t))]
    keys = [t for t in rest if any(t in _views_behind(index, n.source) for n in norms)]
    values = [t for t in rest if t not in keys]
    if len(keys) != 1 or len(values) != 1:
        found = f"{len(keys)} normed keys and {len(values)} values"
        refuse(layer, index_qk, f"besides the query, its sibling projections are {found}; one of each was expected")
    outputs = (query, keys[0], values[0], tensor)
    projections = dict(zip(PROJECTIONS, outputs, strict=True))
    return Anchors(layer, NAME, projections, _norms(index, norms, layer, projections, gate, index_qk), gate)


def _gated_sibling(index: GraphIndex, layer: str, others: list[str], index_qk: Node) -> tuple[str, Gate]:
    """The one sibling that splits into query and gate; one whose gate is broken is reported as such."""
    if not others:
        refuse(layer, index_qk, "no sibling projection reads its input")
    found, broken = [], []
    for tensor in others:
        if _reaches_sigmoid(index, tensor):
            try:
                found.append((tensor, find_gate(index, layer, tensor)))
            except RefusedError as error:
                broken.append(error)
    if broken and not found:
        raise broken[0]
    if len(found) != 1:
        refuse(layer, index_qk, f"{len(found)} of its {len(others)} sibling projections have an output gate (Sigmoid)")
    return found[0]


def _reaches_sigmoid(index: GraphIndex, tensor: str) -> bool:
    ops = _HALVING_OPS | {"Transpose", "Squeeze", "Unsqueeze"}
    return any(node.op == "Sigmoid" for _, node in index.forward(tensor, ops))


def _norms(
    index: GraphIndex, norms: list[RmsNorm], layer: str, projections: dict[str, str], gate: Gate, index_qk: Node
) -> dict[str, RmsNorm]:
    """The four norms by what they norm: the query half, the key, index queries, and means of index keys."""
    sources = {gate.query: "q_norm", projections["k_proj"]: "k_norm"}
    found: dict[str, RmsNorm] = {}
    for norm in norms:
        whole = _views_behind(index, norm.source, {"Reshape", "Cast", "Identity"})
        name = next((sources[t] for t in whole if t in sources), None)
        if name is None and projections["index_qk_proj"] in _views_behind(index, norm.source):
            name = "indexer_q_norm"
        elif name is None and _is_block_mean(index, norm, index_qk):
            name = "indexer_k_norm"
        if name is not None:
            found.setdefault(name, norm)
    for name in NORMS:
        if name not in found:
            refuse(layer, name, "no RMSNorm with a constant weight (gamma) was found where this norm belongs")
    return found


def _views_behind(index: GraphIndex, tensor: str, ops: Container[str] = _HALVING_OPS) -> list[str]:
    """The tensors that `tensor` is a view or a part of, itself first."""
    found, maker = [tensor], index.producer(tensor)
    while maker is not None and maker.op in ops:
        found.append(maker.inputs[0])
        maker = index.producer(maker.inputs[0])
    return found


def _is_block_mean(index: GraphIndex, norm: RmsNorm, index_qk: Node) -> bool:
    mean = index.producer(index.back(norm.source, {"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"}))
    return mean is not None and mean.op == "ReduceMean" and index_qk in _projections_behind(index, mean.inputs[0])
