"""Decides what a layer's cut removes, and refuses every layer where that would lose something."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .anchors import NORMS, Anchors, refuse
from .cut import Cut
from .graph_index import GraphIndex, Node
from .linear import behind, is_linear, source
from .norms import find_norms
from .structure import indexers, selects_by_topk

_SOFTMAX_OPS = frozenset({"Softmax", "Attention"})
_CACHE_NAME = re.compile(r"(^|[._/])(present|past|cache)", re.IGNORECASE)


@dataclass(frozen=True)
class PlainCut(Cut):
    """A layer in plain operators, cut between its sources and the gate.

    Attributes:
        anchors: the layer's anchors.
        softmax: the attention's Softmax or Attention node.
        topks: the indexer's TopK nodes; more than one in an unrolled graph.
    """

    anchors: Anchors
    softmax: Node
    topks: tuple[Node, ...]


def sources(anchors: Anchors) -> dict[str, str]:
    """The four tensors that stay and feed the new node; the query is the projection's query half."""
    return {**anchors.projections, "q_proj": anchors.gate.query}


def check_layer(index: GraphIndex, anchors: Anchors) -> PlainCut:
    """Work out one layer's cut.

    Raises:
        RefusedError: the part between the anchors is not one QSA attention, takes in something else, or is read by
            something else.
    """
    layer, gate, ends = anchors.layer, anchors.gate, sources(anchors)
    needed = index.ancestors([gate.attention], stop=ends.values())
    nodes = frozenset(index.descendants(ends.values(), follow=needed.__contains__) & needed)
    for name, tensor in ends.items():
        if not any(node in nodes for node in index.readers(tensor)):
            refuse(layer, gate.multiply, f"the attention does not depend on {name} ({tensor})")
    softmaxes = [node for node in nodes if node.op in _SOFTMAX_OPS]
    if len(softmaxes) != 1:
        refuse(layer, gate.multiply, f"{len(softmaxes)} Softmax or Attention nodes lie in the cut; one was expected")
    topks = tuple(sorted((node for node in nodes if node.op == "TopK"), key=lambda n: n.position))
    if not topks:
        refuse(layer, gate.multiply, "no TopK (the indexer's choice of blocks) lies in the cut")
    sides = frozenset(needed - nodes)
    if softmaxes[0].attribute("softcap", 0.0):
        refuse(layer, softmaxes[0], "it caps its scores (softcap), which QSA does not")
    _check_norms(index, anchors, nodes)
    _check_other_norms(index, anchors, nodes)
    _check_rope(index, anchors)
    _check_inputs(index, anchors, sides)
    return PlainCut(
        layer=layer,
        strategy=anchors.strategy,
        qkv=(ends["q_proj"], ends["k_proj"], ends["v_proj"]),
        index_qk=(ends["index_qk_proj"],),
        gammas={name: norm.gamma for name, norm in anchors.norms.items()},
        attention=gate.attention,
        reader=gate.multiply,
        nodes=nodes,
        sides=sides,
        rope=None,
        anchors=anchors,
        softmax=softmaxes[0],
        topks=topks,
    )


def check_coverage(index: GraphIndex, cuts: Iterable[Cut]) -> None:
    """A model is patched whole or not at all: every indexer must lie in some layer's cut, and every attention over a
    TopK's choice: a layer with a changed indexer would stay dense, without a cache, next to patched ones.

    Raises:
        RefusedError: one does not.
    """
    covered = {node for cut in cuts for node in cut.nodes}
    for topk, _ in indexers(index):
        if topk not in covered:
            refuse(
                "unknown", topk, "this indexer belongs to no layer that could be found, and a model is patched whole"
            )
    for node in index.nodes:
        if node.op in _SOFTMAX_OPS and node in index.live and node not in covered and selects_by_topk(index, node):
            refuse("unknown", node, "this attention over a TopK's choice is no QSA layer, and a model is patched whole")


def _check_norms(index: GraphIndex, anchors: Anchors, nodes: frozenset[Node]) -> None:
    """Each norm must lie in the cut and see its own source alone."""
    ends = sources(anchors)
    owners = dict(zip(NORMS, ("q_proj", "k_proj", "index_qk_proj", "index_qk_proj"), strict=True))
    for name, norm in anchors.norms.items():
        behind = {t for n in index.ancestors([norm.source], stop=ends.values()) if n.op != "Shape" for t in n.reads}
        seen = [end for end, tensor in ends.items() if tensor == norm.source or tensor in behind]
        if norm.node not in nodes or seen != [owners[name]]:
            found = " and ".join(seen) or "none of the projections"
            refuse(anchors.layer, norm.node, f"{name} should norm {owners[name]} in the cut, but norms {found}")


def _check_other_norms(index: GraphIndex, anchors: Anchors, nodes: frozenset[Node]) -> None:
    """A fifth norm (of values, of the output) would be lost; an unrolled graph repeats the four."""
    known = [index.constant(norm.gamma) for norm in anchors.norms.values()]
    for norm in find_norms(index, among=nodes):
        gamma = index.constant(norm.gamma)
        if not any(np.array_equal(gamma, k) for k in known if gamma is not None and k is not None):
            refuse(anchors.layer, norm.node, "a fifth RMSNorm lies in the cut; QSA has four")


def _check_rope(index: GraphIndex, anchors: Anchors) -> None:
    """The contract rotates pairs (i, i + rotary/2); interleaved pairs are taken apart by slices with a step."""
    for norm in anchors.norms.values():
        for _, node in index.forward(norm.output, {"Transpose", "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze"}):
            steps = index.integers(node.inputs[4]) if node.op == "Slice" and len(node.inputs) > 4 else None
            if steps is not None and any(step not in (None, 1) for step in steps):
                refuse(anchors.layer, node, "it takes apart interleaved RoPE pairs; QSA rotates halves")


def _check_inputs(index: GraphIndex, anchors: Anchors, sides: frozenset[Node]) -> None:
    """Nothing but the four sources may carry the layer's activations into the cut (a residual, the gate half)."""
    linears = [node for tensor in anchors.projections.values() for node in behind(index, tensor)]
    inputs = {t for node in linears for t in node.reads if not index.is_constant(t)}
    inputs |= {source(index, node) for node in linears if is_linear(index, node)}
    inputs -= set(sources(anchors).values())
    derived = index.descendants(inputs, follow=lambda node: node in sides and node.op not in ("Shape", "Size"))
    for node in sorted(derived, key=lambda n: n.position):
        refuse(anchors.layer, node, "it feeds the attention with the layer's activations past the four projections")


def cache_outputs(index: GraphIndex, cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The graph outputs that read what the cuts remove, all of them dense caches.

    Raises:
        RefusedError: any other reader of a cut tensor. One that another cut removes is none.
    """
    removed = {node for cut in cuts for node in cut.nodes}
    found: dict[str, None] = {}
    for cut in cuts:
        for node in sorted(cut.nodes, key=lambda n: n.position):
            for tensor in node.outputs:
                for reader in index.readers(tensor):
                    if reader in removed or (reader is cut.reader and tensor == cut.attention):
                        continue
                    outputs = _outputs_behind(index, reader)
                    if not outputs or not all(is_cache_output(index, o) for o in outputs):
                        refuse(cut.layer, reader, f"it reads {tensor}, which the cut would remove")
                    found.update(dict.fromkeys(outputs))
                if tensor in index.outputs:
                    if not is_cache_output(index, tensor):
                        refuse(cut.layer, node, f"graph output {tensor} is a tensor that the cut would remove")
                    found[tensor] = None
    return tuple(found)


def _outputs_behind(index: GraphIndex, reader: Node) -> list[str]:
    """The graph outputs that `reader` leads to."""
    after = {reader} | index.descendants(reader.outputs)
    made = {t for node in after for t in node.outputs}
    return [t for t in index.outputs if t in made]


def is_cache_output(index: GraphIndex, tensor: str) -> bool:
    """Whether a graph output is a dense cache: named like one, or a graph input with new entries appended."""
    node = index.producer(tensor)
    appended = node is not None and node.op == "Concat" and any(t in index.inputs for t in node.inputs)
    return appended or _CACHE_NAME.search(tensor) is not None
