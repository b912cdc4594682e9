"""The anchors of a QSA layer: the few tensors between which everything is cut.

A strategy finds a layer's four projections (q with its gate, k, v, index_qk) and its four RMSNorms; the query half and
the gate follow from the q projection alone, whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from qsa_plugin.errors import RefusedError

from .graph_index import GraphIndex, Node
from .norms import RmsNorm

#: Names of the four projections, and of the four norms in the order of the contract's inputs 7 to 10.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "index_qk_proj")
NORMS = ("q_norm", "k_norm", "indexer_q_norm", "indexer_k_norm")
#: Views that keep the order of elements: a transposed query or gate would not fit the contract's layout.
_VIEWS = frozenset({"Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Gate:
    """How the q projection splits per head into query and gate, and where the gate meets the attention's output."""

    heads: str  # [B, S, Hq, 2*D]
    query: str  # [B, S, Hq, D]
    gate: str  # [B, S, Hq, D]
    multiply: Node
    attention: str  # the operand of `multiply` that the new node replaces, [B, S, Hq*D] or [B, S, Hq, D]


@dataclass(frozen=True)
class Anchors:
    """What a strategy knows about one layer."""

    layer: str
    strategy: str
    projections: Mapping[str, str]  # name in PROJECTIONS -> output tensor, bias included
    norms: Mapping[str, RmsNorm]  # name in NORMS
    gate: Gate


#: A strategy returns the layers it can see, or raises RefusedError for one that it sees but cannot complete.
Strategy = Callable[[GraphIndex, list[RmsNorm]], list[Anchors]]


_Candidate = TypeVar("_Candidate")


class LayerRefusedError(RefusedError):
    """One layer that cannot be patched, and with it the whole model.

    Args:
        layer: its name.
        place: the node or tensor.
        reason: what is wrong there.
    """

    def __init__(self, layer: str, place: str, reason: str) -> None:
        self.layer, self.place, self.reason = layer or "(root)", place, reason
        super().__init__(f"layer {self.layer}: {place}: {reason}; nothing was patched")


class StrategyRefusedError(RefusedError):
    """A strategy saw layers that it could not complete; its text is that of the first.

    Args:
        found: the layers that it saw whole.
        refusals: the others.
    """

    def __init__(self, found: Sequence[Anchors], refusals: Sequence[RefusedError]) -> None:
        self.found, self.refusals = tuple(found), tuple(refusals)
        super().__init__(str(refusals[0]))


def complete(candidates: Iterable[_Candidate], find: Callable[[_Candidate], Anchors]) -> list[Anchors]:
    """The anchors of every candidate of a strategy.

    Raises:
        StrategyRefusedError: `find` refused one; it holds the outcome of all.
    """
    found: list[Anchors] = []
    refusals: list[RefusedError] = []
    for candidate in candidates:
        try:
            found.append(find(candidate))
        except RefusedError as error:
            refusals.append(error)
    if refusals:
        raise StrategyRefusedError(found, refusals) from refusals[0]
    return found


def refuse(layer: str, node: Node | str, reason: str) -> NoReturn:
    """Give up on the whole model because of one layer.

    Raises:
        LayerRefusedError: always; it names the layer, the node (or tensor) and the reason.
    """
    raise LayerRefusedError(layer, node.label if isinstance(node, Node) else node, reason)


def find_gate(index: GraphIndex, layer: str, q_proj: str) -> Gate:
    """Follow the q projection through its per-head split to the Mul with the sigmoid of the gate.

    Raises:
        RefusedError: the projection is not split into query and gate, interleaved per head, query first.
    """
    halves = list(_halves(index, q_proj))
    if not halves:
        node = index.producer(q_proj)
        refuse(layer, node or q_proj, "its output is not split into two halves per head (query and output gate)")
    for heads, first, second in halves:
        gated = [(tensor, sigmoid) for tensor in (first, second) for sigmoid in _sigmoids(index, tensor)]
        if not gated:
            continue
        gate, sigmoid = gated[0]
        shape = index.shape(heads)
        if gate != second or shape is None or len(shape) != 4:
            refuse(
                layer,
                sigmoid,
                "the gate is not the second half of every head of q_proj (query and gate must be interleaved per head)",
            )
        multiply = [node for _, node in index.forward(sigmoid.output, _VIEWS) if node.op == "Mul"]
        if len(multiply) != 1:
            refuse(layer, sigmoid, f"the gate feeds {len(multiply)} Mul nodes; one was expected")
        return Gate(heads, first, second, multiply[0], _other_operand(index, multiply[0], sigmoid))
    refuse(layer, halves[0][0], "neither half of q_proj reaches a Sigmoid (the output gate)")


def _sigmoids(index: GraphIndex, tensor: str) -> Iterator[Node]:
    yield from (node for _, node in index.forward(tensor, _VIEWS) if node.op == "Sigmoid")


def _other_operand(index: GraphIndex, multiply: Node, sigmoid: Node) -> str:
    first, second = multiply.inputs
    return second if index.back(first, _VIEWS) == sigmoid.output else first


def _halves(index: GraphIndex, q_proj: str) -> Iterator[tuple[str, str, str]]:
    """(whole, first half, second half) of every even split of a view of `q_proj` along its last axis."""
    slices: dict[str, list[Node]] = {}
    for tensor, node in index.forward(q_proj, _VIEWS):
        if node.op == "Split" and len(node.outputs) == 2 and _on_last_axis(index, tensor, node.attribute("axis", 0)):
            sizes = index.integers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
            if sizes is None or sizes[0] == sizes[1]:
                yield tensor, node.outputs[0], node.outputs[1]
        elif node.op == "Slice":
            slices.setdefault(tensor, []).append(node)
    for tensor, nodes in slices.items():
        yield from _sliced_halves(index, tensor, nodes)


def _sliced_halves(index: GraphIndex, tensor: str, nodes: list[Node]) -> Iterator[tuple[str, str, str]]:
    width = index.last_dim(tensor)
    bounds = {last_axis_slice(index, node): node.output for node in nodes}
    if width is None or width % 2:
        return
    first, second = bounds.get((0, width // 2)), bounds.get((width // 2, width))
    if first and second:
        yield tensor, first, second


def last_axis_slice(index: GraphIndex, node: Node) -> tuple[int, int] | None:
    """(start, end) of a Slice with step 1 along the last axis only, where known; `end` is clipped to the dim."""
    parts = [index.integers(name) if name else None for name in node.inputs[1:]]
    width = index.last_dim(node.inputs[0])
    if len(parts) < 3 or any(p is None or len(p) != 1 or p[0] is None for p in parts[:3]) or width is None:
        return None
    start, end, axis = (p[0] for p in parts[:3] if p is not None)
    if not _on_last_axis(index, node.inputs[0], axis) or (len(parts) > 3 and parts[3] != (1,)):
        return None
    if start is None or end is None:
        return None
    return max(start + width, 0) if start < 0 else start, min(end + width if end < 0 else end, width)


def _on_last_axis(index: GraphIndex, tensor: str, axis: int | None) -> bool:
    shape = index.shape(tensor)
    return axis == -1 or (shape is not None and axis == len(shape) - 1)
