"""Small models to take apart: copies of `models/qsa_lm.onnx`, and what tests change in them."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from qsa_trt.patching.anchors import Anchors
from qsa_trt.patching.detect import find_layers
from qsa_trt.patching.graph_index import GraphIndex

from .originals import model_path

LAYER = "lm.model.layers.0.self_attn"


@cache
def _content(name: str) -> bytes:
    return model_path(name).read_bytes()


def load(name: str = "qsa_lm") -> onnx.ModelProto:
    """A fresh copy of a model."""
    return onnx.load_from_string(_content(name))


def anchors_of(model: onnx.ModelProto) -> tuple[GraphIndex, list[Anchors]]:
    """The index of a model and its layers."""
    index = GraphIndex(model)
    return index, find_layers(index)


def first_layer(name: str = "qsa_lm") -> Anchors:
    """The anchors of layer 0: names that hold in every copy of the model."""
    return anchors_of(load(name))[1][0]


def node(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    """The node that makes a tensor."""
    return next(n for n in model.graph.node if output in n.output)


def insert(model: onnx.ModelProto, new: onnx.NodeProto, *, after: str) -> None:
    """Put a node right behind the one that makes `after`."""
    position = next(i for i, n in enumerate(model.graph.node) if after in n.output)
    model.graph.node.insert(position + 1, new)


def reroute(model: onnx.ModelProto, old: str, new: str, *, only: str | None = None) -> None:
    """Make the readers of a tensor read another one: all but its own maker, or only the node that makes `only`."""
    for n in model.graph.node:
        if new not in n.output and (only is None or only in n.output):
            n.input[:] = [new if t == old else t for t in n.input]


def add_constant(model: onnx.ModelProto, name: str, value: NDArray[np.generic]) -> str:
    """Add an initializer and return its name."""
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    return name


def strip_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove all metadata and rename all nodes, in place: only the structure tells the layers then."""
    for i, n in enumerate(model.graph.node):
        del n.metadata_props[:]
        n.name = f"n{i}"
    for value in (*model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    return model
