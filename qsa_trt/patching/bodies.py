"""Looks for attention where it cannot be replaced: in the bodies of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

from .anchors import refuse
from .graph_index import GraphIndex, subgraphs
from .sparse_ops import INDEXER
from .structure import indexers

_SELECTORS = frozenset({"TopK", INDEXER})


def check_bodies(index: GraphIndex) -> None:
    """Pools cannot be carried into a body and out of it.

    Raises:
        RefusedError: an indexer lies in the body of an If, Loop or Scan that a graph output depends on.
    """
    for node in index.nodes:
        if node in index.live:
            for body in _bodies(node.proto):
                for place in _indexers(index.model, body):
                    reason = (
                        f"this indexer lies in a body of {node.label}, and a pool cannot go through If, Loop or Scan;"
                        " export the layer outside of control flow"
                    )
                    refuse("unknown", place, reason)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a node, and those inside them."""
    for body in subgraphs(node):
        yield body
        for inner in body.node:
            yield from _bodies(inner)


def _indexers(model: onnx.ModelProto, body: onnx.GraphProto) -> Iterator[str]:
    """Labels of the nodes of a body that choose blocks."""
    if _SELECTORS.isdisjoint(node.op_type for node in body.node):
        return
    alone = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    alone.graph.CopyFrom(body)
    inner = {t for node in body.node for t in node.output} | {t.name for t in body.initializer}
    alone.graph.initializer.extend(t for t in model.graph.initializer if t.name not in inner)
    outer = {t for node in body.node for t in node.input} - inner - {v.name for v in body.input}
    known = {t.name for t in alone.graph.initializer}
    alone.graph.input.extend(helper.make_empty_tensor_value_info(t) for t in outer - known)
    index = GraphIndex(alone)
    yield from (topk.label for topk, _ in indexers(index))
    yield from (node.label for node in index.nodes if node.op == INDEXER)
