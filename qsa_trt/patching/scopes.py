"""Strategy: the module scopes that PyTorch's dynamo exporter writes into node metadata."""

from __future__ import annotations

import ast

import onnx

from .anchors import Anchors
from .graph_index import GraphIndex
from .modules import find_by_module, node_paths
from .norms import RmsNorm

NAME = "scopes"
_KEY = "pkg.torch.onnx.name_scopes"


def find(index: GraphIndex, norms: list[RmsNorm]) -> list[Anchors]:
    """See `modules.find_by_module`."""
    return find_by_module(index, norms, NAME, node_paths(index, _path))


def _path(node: onnx.NodeProto) -> str | None:
    """The innermost module: the metadata lists all enclosing modules, then the operation itself."""
    for entry in node.metadata_props:
        if entry.key == _KEY:
            try:
                scopes = ast.literal_eval(entry.value)
                return str(scopes[-2])
            except (ValueError, SyntaxError, IndexError, TypeError):
                return None
    return None
