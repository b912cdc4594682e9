"""Checks that a layer lays its heads out as the contract packs them: wrong here would be wrong without a word."""

from __future__ import annotations

from qsa_plugin.contract import Geometry

from .anchors import last_axis_slice, refuse
from .graph_index import Dim, GraphIndex
from .linear import is_linear
from .verify import PlainCut

#: Views that keep the order of elements.
_VIEWS = frozenset({"Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze"})


def check_layout(index: GraphIndex, cut: PlainCut, g: Geometry) -> None:
    """Widths of the projections, heads of query, gate and value, order of index queries and key, output of attention.

    Raises:
        RefusedError: something is laid out otherwise, or cannot be seen.
    """
    _check_widths(index, cut, g)
    _check_heads(index, cut, g)
    _check_index_order(index, cut, g)
    _check_attention(index, cut, g)


def _check_widths(index: GraphIndex, cut: PlainCut, g: Geometry) -> None:
    widths = {
        "q_proj": 2 * g.num_q_heads * g.head_size,
        "k_proj": g.num_kv_heads * g.head_size,
        "v_proj": g.num_kv_heads * g.head_size,
        "index_qk_proj": g.index_width,
    }
    for name, tensor in cut.anchors.projections.items():
        shape = index.shape(tensor)
        if shape is None or len(shape) != 3 or shape[-1] != widths[name]:
            node = index.producer(tensor) or tensor
            reason = f"the shape of {name} is {_spell(shape)}; [B, S, {widths[name]}] was expected"
            refuse(cut.anchors.layer, node, reason)


def _check_heads(index: GraphIndex, cut: PlainCut, g: Geometry) -> None:
    """Query and gate share heads of 2*D; values are split into heads of D without an earlier transpose."""
    heads = cut.anchors.gate.heads
    if index.last_dim(heads) != 2 * g.head_size:
        reason = f"heads of q_proj have shape {_spell(index.shape(heads))}; [B, S, Hq, {2 * g.head_size}] was expected"
        refuse(cut.anchors.layer, heads, reason)
    value = cut.anchors.projections["v_proj"]
    for _, node in index.forward(value, {"Cast", "Identity"}):
        if node in cut.nodes and node.op != "Shape" and index.last_dim(node.output) != g.head_size:
            refuse(cut.anchors.layer, node, f"it does not split v_proj into heads of {g.head_size}")


def _check_index_order(index: GraphIndex, cut: PlainCut, g: Geometry) -> None:
    """index_qk holds the queries first, then the key."""
    part = index.back(cut.anchors.norms["indexer_q_norm"].source, _VIEWS)
    node = index.producer(part)
    if node is not None and node.op == "Split":
        first = node.outputs[0] == part
    elif node is not None and node.op == "Slice":
        bounds, start = last_axis_slice(index, node), index.integers(node.inputs[1])
        first = bounds == (0, g.indexer_n_heads * g.indexer_head_dim) or (bounds is None and start == (0,))
    else:
        first = False
    if not first:
        refuse(cut.anchors.layer, node or part, "index_qk_proj is not seen to hold its queries first, then its key")


def _check_attention(index: GraphIndex, cut: PlainCut, g: Geometry) -> None:
    """What the gate multiplies is [B, S, Hq*D] or [B, S, Hq, D]."""
    gate, width = cut.anchors.gate, g.num_q_heads * g.head_size
    shape = index.shape(gate.attention)
    if shape is not None and len(shape) == 4 and _fits(shape[2:], (g.num_q_heads, g.head_size)):
        return
    if shape is not None and len(shape) == 3:
        last = shape[-1] if shape[-1] is not None else _width_of_reader(index, gate.multiply.output)
        if last == width:
            return
    reason = f"the gate multiplies a tensor of shape {_spell(shape)}; [B, S, {width}] was expected"
    refuse(cut.anchors.layer, gate.multiply, reason)


def _width_of_reader(index: GraphIndex, tensor: str) -> Dim:
    """Rows of the weight that the output projection multiplies the tensor with."""
    for _, node in index.forward(tensor, {"Cast", "Identity"}):
        if is_linear(index, node) and node.op == "MatMul":
            return (index.shape(node.inputs[1]) or (None,))[0]
    return None


def _fits(shape: tuple[Dim, ...], wanted: tuple[int, ...]) -> bool:
    return all(not isinstance(d, int) or d == w for d, w in zip(shape, wanted, strict=True))


def _spell(shape: tuple[Dim, ...] | None) -> str:
    return "unknown" if shape is None else "[" + ", ".join(str(d or "?") for d in shape) + "]"
