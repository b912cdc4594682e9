"""Finds the QSA layers of a model: the first strategy that sees all of them decides."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from qsa_plugin.contract import EDGE_LLM_NAME, PLUGIN_NAME
from qsa_plugin.errors import RefusedError

from . import node_names, scopes, structure, weight_names
from .anchors import Anchors, Strategy
from .graph_index import GraphIndex, subgraphs
from .norms import find_norms

STRATEGIES: tuple[Strategy, ...] = (scopes.find, node_names.find, weight_names.find, structure.find)
_LOOKED_FOR = (
    "modules named self_attn.indexer.index_qk_proj (in node metadata, node names and weight names), a TopK over Relu"
    " scores of a linear projection whose input feeds query, key and value projections, and SparseAttentionIndexer"
    " nodes"
)


def patched_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """QsaAttention and QsaAttentionPlugin nodes, wherever in the model."""
    return [node for node in _all_nodes(model) if node.op_type in (PLUGIN_NAME, EDGE_LLM_NAME)]


def find_layers(index: GraphIndex) -> list[Anchors]:
    """The QSA layers in graph order.

    Raises:
        RefusedError: there is none, or one of them lacks an anchor.
    """
    norms = find_norms(index)
    refusal: RefusedError | None = None
    some: list[Anchors] = []
    for find in STRATEGIES:
        try:
            layers = find(index, norms)
        except RefusedError as error:  # another strategy may see the whole layer
            refusal = refusal or error
            continue
        some = some or layers
        if layers and _all_indexers_in(index, layers):
            some = layers
            break
    if some:
        return sorted(some, key=lambda a: a.gate.multiply.position)
    if refusal is not None:
        raise refusal
    raise RefusedError(f"no QSA attention in this model; looked for {_LOOKED_FOR}")


def _all_indexers_in(index: GraphIndex, layers: list[Anchors]) -> bool:
    """Whether no indexer lies outside of the layers: names may be left in a part of a model alone."""
    covered = {n for a in layers for n in index.ancestors([a.gate.attention], stop=a.projections.values())}
    return all(topk in covered for topk, _ in structure.indexers(index))


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    stack = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while stack:
        node = stack.pop()
        yield node
        stack += [inner for body in subgraphs(node) for inner in body.node]
