"""Strategy: the names of weights (`model.layers.0.self_attn.q_proj.weight`).

They are names of initializers or, where dynamo folded a weight (transposed it, added 1), stand in the metadata of the
constant that it made. They outlive optimisers that drop all names of nodes.
"""

from __future__ import annotations

import ast
import re

import onnx

from .anchors import Anchors
from .graph_index import GraphIndex
from .linear import WEIGHT_INPUT, is_linear
from .modules import find_by_module
from .norms import RmsNorm

NAME = "weight names"
_KEY = "pkg.onnxscript.optimizer.folded_from"
_WEIGHT = re.compile(r"(?:^|/)([\w.]+)\.weight(?:$|[._])")


def find(index: GraphIndex, norms: list[RmsNorm]) -> list[Anchors]:
    """See `modules.find_by_module`."""
    holders = (*index.model.graph.value_info, *index.model.graph.initializer)
    folded = {holder.name: names for holder in holders if (names := _folded_from(holder))}
    weights = {
        node: node.inputs[WEIGHT_INPUT[node.op]]
        for node in index.nodes
        if node in index.live and is_linear(index, node)
    }
    weights |= {norm.node: norm.gamma for norm in norms}
    paths = {node: path for node, tensor in weights.items() if (path := _module(index, tensor, folded)) is not None}
    return find_by_module(index, norms, NAME, paths)


def _folded_from(holder: onnx.ValueInfoProto | onnx.TensorProto) -> list[str]:
    for entry in holder.metadata_props:
        if entry.key == _KEY:
            try:
                return [str(name) for name in ast.literal_eval(entry.value)]
            except (ValueError, SyntaxError, TypeError):
                return []
    return []


def _module(index: GraphIndex, tensor: str, folded: dict[str, list[str]]) -> str | None:
    """The one module that a constant's weights belong to."""
    behind = [tensor, *(t for node in index.ancestors([tensor]) for t in node.reads)]
    names = [name for t in behind for name in (t, *folded.get(t, ()))]
    modules = {match.group(1) for name in names if (match := _WEIGHT.search(name))}
    return modules.pop() if len(modules) == 1 else None
