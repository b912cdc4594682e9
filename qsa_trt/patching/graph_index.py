"""A read-only view of an ONNX graph: who makes a tensor, who reads it, and what is known about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from qsa_plugin.contract import EDGE_LLM_DOMAIN, ONNX_DOMAIN

from . import shape_values
from .external_data import is_external, read_tensor

Dim = int | str | None
#: Constants with more elements are never read: gammas, head counts and shapes are far smaller, weights far larger.
SMALL = 1 << 14
#: Operators whose result is no larger than their operands, unless by broadcasting two of them.
_FOLDED_OPS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Concat", "Gather", "Slice"}
)


STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
_PLAIN_DOMAINS = STANDARD_DOMAINS | {ONNX_DOMAIN, EDGE_LLM_DOMAIN}
#: onnxruntime's own operators that the patcher knows; others of its operators have names that ONNX uses otherwise.
_CONTRIB_OPS = frozenset(
    {"SimplifiedLayerNormalization", "FusedMatMul", "MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"}
    | {"MultiHeadAttention", "GroupQueryAttention", "SparseAttentionIndexer", "DynamicSparseAttention"}
    | {"PackedSparseAttentionIndexer", "SparsePagedAttention", "QuantizeLinear", "DequantizeLinear"}
)


@dataclass(frozen=True, eq=False)
class Node:
    """One node of the graph, hashable by identity."""

    position: int
    proto: onnx.NodeProto
    #: Every tensor the node reads, those that its If, Loop or Scan bodies take from outside included.
    reads: tuple[str, ...]

    @cached_property
    def op(self) -> str:
        """Operator type; its domain in front where that is not ONNX's, nor onnxruntime's for what is known here."""
        name, domain = self.proto.op_type, self.proto.domain
        known = domain in _PLAIN_DOMAINS or (domain == "com.microsoft" and name in _CONTRIB_OPS)
        return name if known else f"{domain}::{name}"

    @property
    def inputs(self) -> Sequence[str]:
        """The node's own inputs; an empty name stands for one left out."""
        return tuple(self.proto.input)

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the tensors that the node makes."""
        return tuple(self.proto.output)

    @property
    def output(self) -> str:
        """The first output."""
        return str(self.proto.output[0])

    @property
    def label(self) -> str:
        """How messages call the node."""
        return f"{self.proto.name or self.output} ({self.op})"

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, or `default`."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                return helper.get_attribute_value(attribute)
        return default


class GraphIndex:
    """Producers, readers, shapes, element types and small constants of a model's main graph.

    Args:
        model: never modified.
        folder: where the model's external data lies; None when it has none.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path | None = None) -> None:
        graph = model.graph
        self.folder = folder
        self.nodes = [Node(i, n, tuple(dict.fromkeys(_reads(n)))) for i, n in enumerate(graph.node)]
        self.initializers = {t.name: t for t in graph.initializer}
        self.inputs = {v.name: v for v in graph.input if v.name not in self.initializers}
        self.outputs = [v.name for v in graph.output]
        self._producers = {output: node for node in self.nodes for output in node.outputs if output}
        self._readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.reads:
                self._readers.setdefault(name, []).append(node)
        self.model = model
        self._constants: dict[str, NDArray[Any] | None] = {}
        self._integers: dict[str, shape_values.Values | None] = {}
        self._constant_names = set(self.initializers)
        for node in self.nodes:  # in topological order, as ONNX demands
            if self._constant_names.issuperset(node.reads):
                self._constant_names.update(node.outputs)
        self.live = self.ancestors(self.outputs)

    @cached_property
    def _types(self) -> dict[str, onnx.TypeProto.Tensor]:
        return _tensor_types(self.model)

    # Structure

    def producer(self, tensor: str) -> Node | None:
        """The node that makes `tensor`; None for inputs and initializers."""
        return self._producers.get(tensor)

    def readers(self, tensor: str) -> list[Node]:
        """The nodes that read `tensor` and that a graph output depends on."""
        return [node for node in self._readers.get(tensor, ()) if node in self.live]

    def ancestors(self, tensors: Iterable[str], stop: Iterable[str] = ()) -> set[Node]:
        """Every node that `tensors` depend on; the walk does not go behind the tensors of `stop`."""
        found: set[Node] = set()
        seen = set(stop)
        stack = [t for t in tensors if t not in seen]
        while stack:
            name = stack.pop()
            node = self.producer(name)
            if name in seen or node is None:
                continue
            seen.add(name)
            found.add(node)
            stack += [t for t in node.reads if t not in seen]
        return found

    def descendants(self, tensors: Iterable[str], follow: Callable[[Node], bool] = lambda _: True) -> set[Node]:
        """Every live node that depends on `tensors` through nodes that `follow` accepts."""
        found: set[Node] = set()
        stack = list(tensors)
        while stack:
            for node in self.readers(stack.pop()):
                if node not in found and follow(node):
                    found.add(node)
                    stack += node.outputs
        return found

    def back(self, tensor: str, ops: Container[str]) -> str:
        """Walk from `tensor` to the first input of its producer, as long as the producer is one of `ops`."""
        node = self.producer(tensor)
        while node is not None and node.op in ops:
            tensor = node.inputs[0]
            node = self.producer(tensor)
        return tensor

    def forward(self, tensor: str, ops: Container[str]) -> Iterator[tuple[str, Node]]:
        """The first readers of `tensor` and of its views that are not in `ops`, with the tensor each of them reads."""
        for node in self.readers(tensor):
            if node.op in ops and node.inputs[0] == tensor:
                for output in node.outputs:
                    yield from self.forward(output, ops)
            else:
                yield tensor, node

    # Facts

    def shape(self, tensor: str) -> tuple[Dim, ...] | None:
        """Dims of a tensor as far as they are known: integers, symbols, or None; None for an unknown rank."""
        kind, node = self._types.get(tensor), self.producer(tensor)
        stated = tuple(_dim(d) for d in kind.shape.dim) if kind is not None and kind.HasField("shape") else None
        if node is None or (stated is not None and None not in stated):
            return stated
        known = shape_values.computed_shape(self, node)
        if known is None or stated is None or len(stated) != len(known):
            return known if stated is None else stated
        return tuple(k if s is None else s for s, k in zip(stated, known, strict=True))

    def input_shape(self, name: str) -> tuple[Dim, ...]:
        """Dims of a graph input as the model states them."""
        return tuple(_dim(d) for d in self.inputs[name].type.tensor_type.shape.dim)

    def last_dim(self, tensor: str) -> int | None:
        """The last dim where it is a known integer."""
        shape = self.shape(tensor)
        return shape[-1] if shape and isinstance(shape[-1], int) else None

    def elem_type(self, tensor: str) -> int:
        """`TensorProto.DataType` of a tensor, 0 where it is unknown."""
        kind = self._types.get(tensor)
        return kind.elem_type if kind is not None else 0

    def is_constant(self, tensor: str) -> bool:
        """Whether the tensor depends on no graph input: weights, and what is computed from them alone."""
        return tensor in self._constant_names

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """The value of a small constant tensor, simple arithmetic on constants folded; else None."""
        if tensor in self._constant_names and tensor not in self._constants:
            self._constants[tensor] = self._fold(tensor)
        return self._constants.get(tensor)

    def scalar(self, tensor: str) -> float | None:
        """The value of a constant with one element."""
        value = self.constant(tensor)
        return float(value.ravel()[0]) if value is not None and value.size == 1 else None

    def integers(self, tensor: str) -> tuple[int | None, ...] | None:
        """The elements of an integer tensor (a shape, a slice bound) as far as they are known."""
        if tensor not in self._integers:
            self._integers[tensor] = shape_values.integers(self, tensor)
        return self._integers[tensor]

    def _fold(self, tensor: str) -> NDArray[Any] | None:
        if tensor in self.initializers:
            return self._load(self.initializers[tensor])
        node = self.producer(tensor)
        if node is None:
            return None
        if node.op == "Constant":
            value = node.attribute("value")
            return self._load(value) if isinstance(value, onnx.TensorProto) else _constant_value(node)
        if node.op == "Identity":
            return self.constant(node.inputs[0])
        if node.op not in _FOLDED_OPS or node.proto.domain not in STANDARD_DOMAINS:
            return None
        values = {t: v for t in node.inputs if t and (v := self.constant(t)) is not None}
        return _evaluate(node.proto, values) if values.keys() == {t for t in node.inputs if t} else None

    def _load(self, tensor: onnx.TensorProto) -> NDArray[Any] | None:
        if int(np.prod(tensor.dims, dtype=np.int64)) > SMALL:
            return None
        return read_tensor(tensor, self.folder)


def _evaluate(node: onnx.NodeProto, values: dict[str, NDArray[Any]]) -> NDArray[Any] | None:
    """Run one node on constants; None where onnx's reference evaluator cannot."""
    from onnx.reference import ReferenceEvaluator

    try:
        results: Any = ReferenceEvaluator(node).run(None, values)
        result = np.asarray(results[0])
    except Exception:  # whatever the evaluator raises: the tensor is then simply not a constant we know
        return None
    return result if result.size <= SMALL else None


def _constant_value(node: Node) -> NDArray[Any] | None:
    for name in ("value_float", "value_int", "value_floats", "value_ints"):
        value = node.attribute(name)
        if value is not None:
            return np.asarray(value, np.float32 if "float" in name else np.int64)
    return None


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The bodies of an If, Loop or Scan node; empty for every other."""
    graphs = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return graphs + [g for a in node.attribute for g in a.graphs]


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    for body in subgraphs(node):
        inner = {v.name for v in body.input} | {t.name for t in body.initializer}
        inner |= {output for n in body.node for output in n.output}
        outer = [name for n in body.node for name in _reads(n)] + [v.name for v in body.output]
        yield from (name for name in dict.fromkeys(outer) if name not in inner)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return None if dim.dim_param.startswith("unk__") else dim.dim_param or None  # "unk__": made up by inference


def _tensor_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    """Element type and shape of every tensor, the inferred ones included where inference succeeds."""
    skeleton = _without_weights(model)
    with contextlib.suppress(Exception):  # a graph that contradicts itself: use what it states
        skeleton = onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    graph = skeleton.graph
    return {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for shape inference in which every initializer that no shape can depend on is a plain input."""
    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = model.graph
    skeleton.graph.name = graph.name
    for name in ("input", "output", "value_info"):
        getattr(skeleton.graph, name).extend(getattr(graph, name))
    types = {t.name: t.data_type for t in graph.initializer}
    for node in graph.node:
        stand_in = _stand_in(node, skeleton.graph, types)
        skeleton.graph.node.append(node if stand_in is None else stand_in)
    declared = {v.name for v in graph.input}
    for tensor in graph.initializer:
        if tensor.name not in declared:
            skeleton.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        if tensor.data_type == onnx.TensorProto.INT64 and not is_external(tensor):
            skeleton.graph.initializer.append(tensor)
    return skeleton


#: Operators that ONNX has no schema for, whose first output is like their first input.
_UNARY = frozenset({"SimplifiedLayerNormalization", "QuickGelu", "FastGelu"})


def _stand_in(node: onnx.NodeProto, graph: onnx.GraphProto, types: dict[str, int]) -> onnx.NodeProto | None:
    """A standard operator with the same output shape, for operators that ONNX's inference does not know.

    Args:
        node: any node.
        graph: gets the further inputs that the stand-in reads.
        types: element types of initializers.
    """
    if node.op_type in _UNARY:
        return helper.make_node("Identity", node.input[:1], node.output[:1])
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "FusedMatMul" and not any(attributes.get(name) for name in attributes if "trans" in name):
        return helper.make_node("MatMul", node.input, node.output)
    if node.op_type == "MatMulNBits" and node.input[2] in types:  # its scales have the type of the activations
        name = f"{node.output[0]}/weight"
        shape = [attributes["K"], attributes["N"]]
        graph.input.append(helper.make_tensor_value_info(name, types[node.input[2]], shape))
        return helper.make_node("MatMul", [node.input[0], name], node.output)
    return None
