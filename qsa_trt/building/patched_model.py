"""Reads a patched ONNX file for the engine builder: its QsaAttention nodes, graph inputs and what their dims stand for.

Everything wrong with the file or its nodes is found here, before TensorRT is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto

from qsa_plugin import contract
from qsa_plugin.contract import Dim, Geometry
from qsa_plugin.errors import ContractError, InputError
from qsa_plugin.kernel_limits import kernel_refusals

from ..patching.files import load_model

#: Node types that TensorRT gives to the plugin: its parser looks at the type alone, whatever the domain.
OPERATORS = (contract.PLUGIN_NAME, contract.EDGE_LLM_NAME)
#: Spellings of the batch and sequence dims in exports, for graphs whose shapes cannot be inferred up to a node.
USUAL_NAMES = {
    "B": ("batch", "batch_size", "b"),
    "S": ("seq", "seq_len", "sequence", "sequence_length", "s"),
}
_SURFACE_NAMES = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16", TensorProto.FLOAT: "float32"}
_FIXED_TYPES = {contract.DType.INT32: TensorProto.INT32, contract.DType.FP32: TensorProto.FLOAT}
#: Weights above this size are dropped once read: shape inference needs small constants only, TensorRT reads the file.
_SMALL_CONSTANT_BYTES = 4096

#: Dims of one tensor: an int, a name, or None for a dim without a name; None instead of the tuple: rank unknown.
Dims = tuple[Dim | None, ...]


@dataclass(frozen=True)
class TensorType:
    """Element type (TensorProto enum) and dims of a tensor."""

    elem_type: int
    dims: Dims | None


@dataclass(frozen=True)
class QsaNode:
    """One node that becomes a plugin layer."""

    name: str
    op_type: str
    geometry: Geometry
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: The node has `plugin_namespace`, without which TensorRT prefers a local function of the same name.
    names_plugin: bool

    def input(self, tensor: str) -> str:
        """The graph's name of an input of the contract."""
        return self.inputs[contract.INPUT_INDEX[tensor]]


@dataclass(frozen=True)
class RopeTable:
    """The tensor `rope_rotary_cos_sin`; `positions` and `rotary_dims` are None where the graph leaves them open."""

    tensor: str
    baked: bool
    positions: int | None
    rotary_dims: int | None


@dataclass(frozen=True)
class PatchedModel:
    """What the builder knows about a patched file."""

    path: Path
    nodes: tuple[QsaNode, ...]
    surface: str
    rope: RopeTable
    #: Graph inputs that a caller binds (no initializers), in graph order.
    inputs: Mapping[str, TensorType]
    #: Input name -> the contract's symbol (B, S, N, M, maxPos, rotary, start) or None for every dim that is not an int.
    symbols: Mapping[str, tuple[str | None, ...]]
    #: Contract symbols whose value the graph fixes.
    fixed: Mapping[str, int]
    external_files: tuple[Path, ...]
    #: The file carries a local function that TensorRT would inline instead of the plugin.
    has_reference_body: bool


def load_patched_model(path: Path) -> PatchedModel:
    """Read and check a patched file.

    Raises:
        InputError: the file cannot be read, is not ONNX, lacks external data, or has no QsaAttention node; a node's
            surface is not fp16 or bf16, or its geometry is impossible or outside the CUDA kernels' limits.
    """
    file = load_model(path)
    proto = file.model
    types = _tensor_types(proto)
    nodes = tuple(_qsa_node(node) for node in proto.graph.node if node.op_type in OPERATORS)
    if not nodes:
        raise InputError(
            f"file {path}",
            "a model without a QsaAttention node",
            "a patched model",
            f"run: qsa-trt patch-onnx {path}",
        )
    surface = _surface(nodes, types)
    _check_fixed_types(nodes, types)
    binding = _Binding()
    for node in nodes:
        binding.add(node, types)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs = {i.name: types[i.name] for i in proto.graph.input if i.name not in initializers}
    rope = _rope(nodes, types, initializers)
    _check_kernel_limits(nodes, surface, rope)
    return PatchedModel(
        path=path,
        nodes=nodes,
        surface=surface,
        rope=rope,
        inputs=inputs,
        symbols={name: binding.symbols(name, tensor) for name, tensor in inputs.items()},
        fixed=binding.fixed,
        external_files=tuple(file.folder / name for name in file.external),
        has_reference_body=any(function.name in OPERATORS for function in proto.functions),
    )


def _tensor_types(proto: onnx.ModelProto) -> dict[str, TensorType]:
    """Types of all tensors that are declared or can be inferred. Drops the weights' data from `proto`."""
    graph = proto.graph
    for tensor in graph.initializer:
        if tensor.ByteSize() > _SMALL_CONSTANT_BYTES:
            for name in ("raw_data", "float_data", "int32_data", "int64_data"):
                tensor.ClearField(name)
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # declared types remain
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    types = {value.name: _tensor_type(value) for value in (*graph.value_info, *graph.output, *graph.input)}
    types |= {tensor.name: TensorType(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    return types


def _tensor_type(value: onnx.ValueInfoProto) -> TensorType:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    return TensorType(
        tensor.elem_type,
        tuple(d.dim_value if d.HasField("dim_value") else _dim_name(d.dim_param) for d in tensor.shape.dim),
    )


def _dim_name(name: str) -> str | None:
    return name if name and not name.startswith("unk__") else None  # "unk__": made up by shape inference


def _qsa_node(node: onnx.NodeProto) -> QsaNode:
    name = node.name or next(iter(node.output), "")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    try:
        geometry = Geometry.from_attributes({k: v for k, v in attributes.items() if isinstance(v, int | float)})
    except ContractError as error:
        raise ContractError(f"node {name}, {error.what}", error.value, error.expected, error.fix) from error
    if len(node.input) != len(contract.INPUTS) or not all(node.input):
        raise ContractError(
            f"node {name}",
            f"{sum(map(bool, node.input))} inputs",
            f"{len(contract.INPUTS)} inputs (" + ", ".join(t.name for t in contract.INPUTS) + ")",
            "patch the original model again",
        )
    return QsaNode(
        name, node.op_type, geometry, tuple(node.input), tuple(node.output), "plugin_namespace" in attributes
    )


def _surface(nodes: tuple[QsaNode, ...], types: Mapping[str, TensorType]) -> str:
    """NumPy name of the surface dtype, which all nodes share."""
    found: dict[int, str] = {}
    for node in nodes:
        for tensor, name in zip(contract.INPUTS, node.inputs, strict=True):
            elem_type = types[name].elem_type if name in types else TensorProto.UNDEFINED
            if tensor.dtype is contract.DType.SURFACE and elem_type != TensorProto.UNDEFINED:
                found.setdefault(elem_type, f"node {node.name}, input {tensor.name}")
    for elem_type, where in found.items():
        if elem_type == TensorProto.FLOAT:
            raise InputError(
                where,
                "float32",
                "float16 or bfloat16, which are what the CUDA kernels compute in",
                "patch the original model without --dtype fp32, which is for comparisons in onnxruntime",
            )
        if elem_type not in _SURFACE_NAMES:
            raise InputError(where, _type_name(elem_type), "float16 or bfloat16", "patch the original model again")
    if len(found) != 1:
        got = " and ".join(f"{_type_name(t)} ({where})" for t, where in found.items()) or "no declared dtype"
        raise InputError("surface dtype", got, "one dtype for all QsaAttention nodes", "patch the original model again")
    return _SURFACE_NAMES[next(iter(found))]  # type: ignore[index]


def _check_fixed_types(nodes: tuple[QsaNode, ...], types: Mapping[str, TensorType]) -> None:
    """Lengths, tables and positions: the network is strongly typed, so that nothing is cast on the way."""
    for node in nodes:
        for tensor, name in zip(contract.INPUTS, node.inputs, strict=True):
            expected = _FIXED_TYPES.get(tensor.dtype)
            found = types[name].elem_type if name in types else TensorProto.UNDEFINED
            if expected is not None and found not in (expected, TensorProto.UNDEFINED):
                raise ContractError(
                    f"node {node.name}, input {tensor.name}",
                    _type_name(found),
                    tensor.dtype.value,
                    "patch the original model again",
                )


def _type_name(elem_type: int) -> str:
    known = elem_type in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(elem_type)).lower() if known else f"element type {elem_type}"


@dataclass
class _Binding:
    """Ties the graph's dims to the contract's symbols."""

    fixed: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)  # dim name -> symbol
    placed: dict[tuple[str, int], str] = field(default_factory=dict)  # (tensor, axis) -> symbol

    def add(self, node: QsaNode, types: Mapping[str, TensorType]) -> None:
        """Compare the node's known input shapes with the contract and note what every open dim stands for."""
        for tensor, name in zip(contract.INPUTS, node.inputs, strict=True):
            dims = types[name].dims if name in types else None
            if dims is None:
                continue
            legal = contract.resolve_dims(tensor.dims, node.geometry)
            where = f"node {node.name}, input {tensor.name}"
            if len(dims) != len(legal):
                raise ContractError(where, _spell(dims), f"shape {_spell(legal)}", "patch the original model again")
            for axis, (got, want) in enumerate(zip(dims, legal, strict=True)):
                if isinstance(want, int):
                    if isinstance(got, int) and got != want:
                        raise ContractError(
                            where, _spell(dims), f"shape {_spell(legal)}", "patch the original model again"
                        )
                else:
                    self._bind(where, name, axis, got, want)

    def _bind(self, where: str, tensor: str, axis: int, got: Dim | None, symbol: str) -> None:
        self.placed[tensor, axis] = symbol
        if isinstance(got, int):
            if self.fixed.setdefault(symbol, got) != got:
                raise ContractError(
                    f"{where}, axis {axis}", got, f"{self.fixed[symbol]}, as elsewhere", "export with equal sizes"
                )
        elif got is not None and self.named.setdefault(got, symbol) != symbol:
            raise ContractError(
                f"{where}, axis {axis}",
                f"dim name {got!r}, which also stands for {self.named[got]}",
                f"a dim name that stands for {symbol} alone",
                "rename the dim: TensorRT makes equal names equal sizes",
            )

    def symbols(self, name: str, tensor: TensorType) -> tuple[str | None, ...]:
        """The contract's symbol of every dim of a graph input."""
        usual = {
            spelling: symbol
            for symbol, spellings in USUAL_NAMES.items()
            if symbol not in self.named.values()
            for spelling in spellings
        }
        found = []
        for axis, dim in enumerate(tensor.dims or ()):
            symbol = self.placed.get((name, axis))
            if symbol is None and isinstance(dim, str):
                symbol = self.named.get(dim) or usual.get(dim.lower())
            found.append(symbol)
        return tuple(found)


def _spell(dims: Dims) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in dims) + "]"


def _rope(nodes: tuple[QsaNode, ...], types: Mapping[str, TensorType], initializers: set[str]) -> RopeTable:
    name = nodes[0].input("rope_rotary_cos_sin")
    dims = types[name].dims if name in types else None
    positions, rotary = (d if isinstance(d, int) else None for d in dims[1:]) if dims else (None, None)
    return RopeTable(name, name in initializers, positions, rotary)


def _check_kernel_limits(nodes: tuple[QsaNode, ...], surface: str, rope: RopeTable) -> None:
    for node in nodes:
        refusals = kernel_refusals(node.geometry, surface, rope.rotary_dims)
        if refusals:
            raise InputError(
                f"node {node.name}",
                f"a geometry outside the CUDA kernels ({'; '.join(refusals)})",
                "a geometry that they run",
                "run the patched model in onnxruntime, or choose another model",
            )
