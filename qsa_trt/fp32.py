"""Lets a half-precision model compute in fp32, so that rounding does not hide (or fake) a difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from .patching.external_data import is_external, read_tensor
from .patching.files import ModelFile, load_model
from .patching.graph_index import subgraphs
from .patching.well_formed import all_tensors

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
#: Integer attributes that hold an element type.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type", "softmax_precision"})
#: Weights of more bytes are written beside the model: a protobuf file ends at 2 GB.
_INLINE_BYTES = 1 << 16


def save_in_fp32(source: ModelFile, target: Path, exact: Mapping[str, NDArray[np.float32]]) -> ModelFile:
    """Write a model in which every fp16 and bf16 tensor is fp32; one weight is in memory at a time.

    Args:
        source: the model; its proto is changed.
        target: where to write; the weights go beside it.
        exact: initializer name to the value that it was rounded from.

    Returns:
        The file that was written; `source` itself where it holds no half-precision tensor.
    """
    model = source.model
    retyped = _retype_graph(model.graph)
    for function in model.functions:
        retyped |= _retype_values(function.value_info) | _retype_nodes(function.node)
    if not retyped and all(tensor.data_type not in _HALF for tensor in all_tensors(model)):
        return source
    with target.with_name(target.name + ".data").open("wb") as weights:
        initializers = len(model.graph.initializer)
        for position, tensor in enumerate(all_tensors(model)):  # those of the graph first; only they may be external
            if tensor.data_type in _HALF or is_external(tensor):
                value = exact.get(tensor.name, read_tensor(tensor, source.folder))
                value = value.astype(np.float32) if tensor.data_type in _HALF else value
                _store(tensor, value, weights if position < initializers else None)
    target.write_bytes(model.SerializeToString())
    return load_model(target)


def _store(tensor: TensorProto, value: NDArray[Any], weights: BinaryIO | None) -> None:
    """Give a tensor a value, inline where it is small or no file is given."""
    name = tensor.name
    tensor.CopyFrom(onnx.numpy_helper.from_array(value, name))
    if weights is None or value.nbytes <= _INLINE_BYTES:
        return
    entries = {"location": Path(weights.name).name, "offset": weights.tell(), "length": len(tensor.raw_data)}
    weights.write(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in entries.items():
        tensor.external_data.add(key=key, value=str(entry))


def _retype_graph(graph: onnx.GraphProto) -> bool:
    """Make every declared and requested half type fp32; whether there was one."""
    return _retype_values((*graph.input, *graph.output, *graph.value_info)) | _retype_nodes(graph.node)


def _retype_values(values: Iterable[onnx.ValueInfoProto]) -> bool:
    half = [v for v in values if v.type.HasField("tensor_type") and v.type.tensor_type.elem_type in _HALF]
    for value in half:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return bool(half)


def _retype_nodes(nodes: Iterable[onnx.NodeProto]) -> bool:
    found = False
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _HALF:
                attribute.i = TensorProto.FLOAT
                found = True
        for body in subgraphs(node):
            found |= _retype_graph(body)
    return found
