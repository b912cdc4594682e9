"""Strategy: the module paths that TorchScript and optimum write into node names (`/model/layers.0/self_attn/Mul`)."""

from __future__ import annotations

import onnx

from .anchors import Anchors
from .graph_index import GraphIndex
from .modules import find_by_module, node_paths
from .norms import RmsNorm

NAME = "node names"


def find(index: GraphIndex, norms: list[RmsNorm]) -> list[Anchors]:
    """See `modules.find_by_module`."""
    return find_by_module(index, norms, NAME, node_paths(index, _path))


def _path(node: onnx.NodeProto) -> str | None:
    modules, slash, _ = node.name.rpartition("/")
    return modules.strip("/").replace("/", ".") if slash else None
