"""Finds layers by module paths; scopes.py, node_names.py and weight_names.py say where a path is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from .anchors import NORMS, PROJECTIONS, Anchors, complete, find_gate, refuse
from .graph_index import GraphIndex, Node
from .linear import end
from .norms import RmsNorm

_INDEXER = "indexer.index_qk_proj"
#: Module of every anchor below the attention module.
_PROJECTION_MODULES = dict(zip(PROJECTIONS, ("q_proj", "k_proj", "v_proj", _INDEXER), strict=True))
_NORM_MODULES = dict(zip(NORMS, ("q_norm", "k_norm", "indexer.q_layernorm", "indexer.k_layernorm"), strict=True))


@dataclass(frozen=True)
class _Modules:
    """One graph seen by module path."""

    index: GraphIndex
    norms: list[RmsNorm]
    by_path: dict[str, list[Node]]
    paths: Mapping[Node, str]

    def projection(self, layer: str, name: str) -> str:
        """The one tensor that leaves the module of a projection, behind what belongs to it without its name."""
        module = _join(layer, _PROJECTION_MODULES[name])
        nodes = self.by_path.get(module, [])
        leaving = {
            output
            for node in nodes
            for output in node.outputs
            if any(self.paths.get(reader) != module for reader in self.index.readers(output))
        }
        if len(leaving) != 1:
            refuse(layer, module, f"{len(leaving)} tensors leave this module; one projection was expected")
        return end(self.index, leaving.pop())

    def norm(self, layer: str, name: str) -> RmsNorm:
        """The RMSNorm of a module; an unrolled graph repeats it, with the same weight."""
        module = _join(layer, _NORM_MODULES[name])
        found = [norm for norm in self.norms if _same_module(self.paths.get(norm.node), module)]
        if not found:
            refuse(layer, module, "no RMSNorm with a constant weight (gamma) was found there")
        gammas = [self.index.constant(norm.gamma) for norm in found]
        if any(g is None or not np.array_equal(g, gammas[0]) for g in gammas if gammas[0] is not None):
            refuse(layer, module, f"{len(found)} RMSNorms with different weights were found there")
        return found[0]


def node_paths(index: GraphIndex, path_of: Callable[[onnx.NodeProto], str | None]) -> dict[Node, str]:
    """The module paths of the nodes that have one."""
    return {node: path for node in index.nodes if node in index.live and (path := path_of(node.proto)) is not None}


def find_by_module(index: GraphIndex, norms: list[RmsNorm], strategy: str, paths: Mapping[Node, str]) -> list[Anchors]:
    """The layers whose nodes carry the module names of Hugging Face's attention.

    Args:
        index: the graph.
        norms: its RMSNorms.
        strategy: name for the report.
        paths: module paths of nodes, dotted; of a norm, that of `RmsNorm.node`.

    Raises:
        RefusedError: a module `indexer.index_qk_proj` whose layer lacks another anchor.
    """
    by_path: dict[str, list[Node]] = {}
    for node, path in paths.items():
        by_path.setdefault(path, []).append(node)
    modules = _Modules(index, norms, by_path, paths)
    layers = [path[: -len(_INDEXER)].rstrip(".") for path in by_path if f".{path}".endswith(f".{_INDEXER}")]
    return complete(layers, lambda layer: _anchors(modules, layer, strategy))


def _anchors(modules: _Modules, layer: str, strategy: str) -> Anchors:
    projections = {name: modules.projection(layer, name) for name in PROJECTIONS}
    norms = {name: modules.norm(layer, name) for name in NORMS}
    return Anchors(layer, strategy, projections, norms, find_gate(modules.index, layer, projections["q_proj"]))


def _join(layer: str, module: str) -> str:
    return f"{layer}.{module}" if layer else module


def _same_module(path: str | None, module: str) -> bool:
    """TorchScript numbers the second and later calls of a module: `k_layernorm_1`."""
    return path is not None and (path == module or path.rpartition("_")[0] == module)
