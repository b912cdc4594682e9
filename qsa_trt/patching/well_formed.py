"""Checks of a loaded ONNX file that are cheap and need no shapes: names, operand counts, sizes of stored tensors.

`onnx.checker` refuses working exports for other reasons (unknown operators, missing imports), so it is no judge here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import onnx
from onnx import TensorProto, external_data_helper, helper

from qsa_plugin.errors import InputError

from .external_data import PACKED_BITS, is_external, stored_bytes
from .graph_index import subgraphs

_EXPORT_AGAIN = "export the model again"
#: Fewest inputs of operators that the patcher reads and onnx has no schema for.
_FEWEST_INPUTS = {
    "SimplifiedLayerNormalization": 2, "FusedMatMul": 2, "MatMulNBits": 3, "MatMulIntegerToFloat": 4,
    "DynamicQuantizeMatMul": 3, "MultiHeadAttention": 1, "GroupQueryAttention": 7, "SparseAttentionIndexer": 7,
    "DynamicSparseAttention": 11,
}  # fmt: skip


def check_well_formed(model: onnx.ModelProto, folder: Path) -> tuple[str, ...]:
    """Check nodes and tensors; returns the locations of external data, relative to `folder`.

    Raises:
        InputError: a node without a legal name, with too few or too many operands, a tensor of an unknown type or whose
            data is shorter or longer than its dims say, or external data that is missing, too short, or outside
            `folder`.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    locations: dict[str, None] = {}
    for graph in _graphs(model.graph):
        for node in graph.node:
            _check_node(node, versions)
    for tensor in all_tensors(model):
        size = _size(tensor)
        if is_external(tensor):
            locations[_check_external(tensor, size, folder)] = None
        else:
            _check_stored(tensor, size)
    return tuple(locations)


def all_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every initializer and every tensor of an attribute, of bodies and local functions too."""
    nodes = [node for function in model.functions for node in function.node]
    graphs = [model.graph, *(body for node in nodes for body in subgraphs(node))]
    for graph in (inner for outer in graphs for inner in _graphs(outer)):
        yield from graph.initializer
        yield from _attribute_tensors(graph.node)
    yield from _attribute_tensors(nodes)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)


def _attribute_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors


def _check_node(node: onnx.NodeProto, versions: dict[str, int]) -> None:
    names = (node.name, node.op_type, node.domain, *node.input, *node.output)
    if not all(isinstance(name, str) for name in names):  # protobuf hands out what is no UTF-8 as bytes
        raise InputError(f"node {node.name!r}", "a name that is no UTF-8 text", "names in UTF-8", _EXPORT_AGAIN)
    label = f"node {node.name or next(iter(node.output), '')} ({node.op_type})"
    limits = _operand_limits(node.op_type, node.domain, versions.get(node.domain, 0))
    counts = (("inputs", len(node.input)), ("outputs", len(node.output)))
    for (kind, count), (fewest, most) in zip(counts, limits, strict=True):
        if count < fewest:
            raise InputError(label, f"{count} {kind}", f"at least {fewest}", _EXPORT_AGAIN)
        if count > most:
            raise InputError(label, f"{count} {kind}", f"at most {most}", _EXPORT_AGAIN)
    for attribute in node.attribute:  # onnx's shape inference reads past the end of the outputs otherwise
        if node.op_type == "Split" and attribute.name == "num_outputs" and attribute.i != len(node.output):
            raise InputError(label, f"num_outputs {attribute.i}", f"{len(node.output)}, its outputs", _EXPORT_AGAIN)


@cache
def _operand_limits(op_type: str, domain: str, version: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(fewest, most) inputs and outputs of an operator; every node makes something, whatever its operator."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return (_FEWEST_INPUTS.get(op_type, 0), sys.maxsize), (1, sys.maxsize)
    return (schema.min_input, schema.max_input), (max(1, schema.min_output), schema.max_output)


def _size(tensor: TensorProto) -> int | None:
    try:
        return stored_bytes(tensor)
    except KeyError as error:
        raise InputError(
            f"tensor {tensor.name}", f"element type {tensor.data_type}", "a type of this onnx package", _EXPORT_AGAIN
        ) from error


def _check_stored(tensor: TensorProto, size: int | None) -> None:
    what, dims = f"tensor {tensor.name}", list(tensor.dims)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            raise InputError(what, f"{len(tensor.raw_data)} bytes", f"{size} bytes for dims {dims}", _EXPORT_AGAIN)
    elif tensor.data_type not in (*PACKED_BITS, TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        count = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
        if count != math.prod(dims):
            raise InputError(what, f"{count} elements", f"{math.prod(dims)} for dims {dims}", _EXPORT_AGAIN)


def _check_external(tensor: TensorProto, size: int | None, folder: Path) -> str:
    """The location of the tensor's data, which is there and long enough."""
    what = f"external data of {tensor.name}"
    try:
        info = external_data_helper.ExternalDataInfo(tensor)
    except ValueError as error:
        entries = ", ".join(f"{entry.key} {entry.value!r}" for entry in tensor.external_data)
        raise InputError(what, entries, "offset and length as numbers from 0", _EXPORT_AGAIN) from error
    location = str(info.location)
    available = _file_size(location, folder)
    offset, length = info.offset or 0, info.length
    if size is None or (length or size) != size:
        raise InputError(what, f"length {length}", f"{size} for dims {list(tensor.dims)}", _EXPORT_AGAIN)
    if offset + size > available:
        raise InputError(
            f"external data {location}",
            f"{available} bytes",
            f"at least {offset + size} bytes, where {tensor.name} ends",
            "copy the whole file next to the model again",
        )
    return location


def _file_size(location: str, folder: Path) -> int:
    base = folder.resolve()
    try:
        target = (base / location).resolve()
        if not target.is_relative_to(base):
            raise InputError("external data", location, f"a path inside {folder}", "move the data next to the model")
        if location and target.is_file():
            return target.stat().st_size
    except (OSError, ValueError):  # no name that a file can have
        pass
    raise InputError("external data", repr(location)[1:-1], f"a file in {folder}", "copy it next to the model")
