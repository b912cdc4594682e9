"""Small models to take apart: copies of `models/qsa_lm.onnx`, and what tests change in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import PLUGIN_NAME
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


def retype(model: onnx.ModelProto, old: int, new: int) -> onnx.ModelProto:
    """Give every tensor of one element type another one, in place."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == old:
            value.type.tensor_type.elem_type = new
    for tensor in model.graph.initializer:
        if tensor.data_type == old:
            values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(new))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for n in model.graph.node:
        for attribute in n.attribute:
            if n.op_type == "Cast" and attribute.i == old:
                attribute.i = new
    return model


def compute_bf16_in_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Casts around every node with bf16 tensors but QsaAttention, in place: onnxruntime's CPU knows few others."""
    index = GraphIndex(model)

    def through(n: onnx.NodeProto, names: Sequence[str], suffix: str) -> dict[str, str]:
        bf16 = [
            t for t in names if n.op_type not in ("Cast", PLUGIN_NAME) and index.elem_type(t) == TensorProto.BFLOAT16
        ]
        return {t: f"{t}/{suffix}/{n.output[0]}" for t in dict.fromkeys(bf16)}

    nodes: list[onnx.NodeProto] = []
    for n in model.graph.node:
        reads, makes = through(n, n.input, "in"), through(n, n.output, "out")
        nodes += [helper.make_node("Cast", [old], [new], to=TensorProto.FLOAT) for old, new in reads.items()]
        n.input[:] = [reads.get(t, t) for t in n.input]
        n.output[:] = [makes.get(t, t) for t in n.output]
        nodes.append(n)
        nodes += [helper.make_node("Cast", [new], [old], to=TensorProto.BFLOAT16) for old, new in makes.items()]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def strip_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove all metadata and rename all nodes, in place: only the structure tells the layers then."""
    for i, n in enumerate(model.graph.node):
        del n.metadata_props[:]
        n.name = f"n{i}"
    for value in (*model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    return model
