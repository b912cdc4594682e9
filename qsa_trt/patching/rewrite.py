"""Edits the model: one `QsaAttention` node a layer, its weights, and the graph inputs that the nodes share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import (
    GEOMETRY_DIMS,
    INPUTS,
    ONNX_DOMAIN,
    ONNX_OPSET,
    OUTPUTS,
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    DType,
    Tensor,
)

from .attributes import Attributes
from .cut import Cut
from .graph_index import Dim, GraphIndex
from .names import Names

_SHARED = ("context_lengths", "rope_rotary_cos_sin", "kvcache_start_index", "kv_page_table")
#: Names of the run-time dims that the model does not have yet, by the contract's symbol.
_DIM_NAMES = {"N": "num_pages", "M": "pages_per_seq", "maxPos": "max_positions", "start": "kvcache_start_length"}
_POOL_NAME = re.compile(r"(past|present)_key_values_\d+")


@dataclass(frozen=True)
class LayerPlan:
    """One layer that will become a node."""

    number: int
    cut: Cut
    attributes: Attributes
    graph_type: int  # TensorProto.DataType of the layer's activations
    surface: int  # the same at the node


@dataclass(frozen=True)
class Insertion:
    """Nodes that go before the reader of the replaced tensor, and what its operand is now."""

    nodes: list[onnx.NodeProto]
    operand: int
    tensor: str


@dataclass
class Additions:
    """What the rewrite adds to the graph."""

    names: Names
    dims: dict[str, Dim]
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    values: list[onnx.ValueInfoProto] = field(default_factory=list)
    #: By the position of the reader that each stands before.
    insertions: dict[int, Insertion] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """What collided: new inputs and outputs that could not get the name users know."""
        expected = {t.name for t in INPUTS}
        names = [v.name for v in (*self.inputs, *self.outputs)]
        taken = [n for n in names if n not in expected and not _POOL_NAME.fullmatch(n)]
        return [f"the model uses the usual name already: the new tensor is called {name}" for name in taken]

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer and return its name."""
        tensor = numpy_helper.from_array(value, self.names.fresh(name))
        self.initializers.append(tensor)
        return tensor.name

    def info(self, name: str, tensor: Tensor, elem_type: int, attributes: Attributes) -> onnx.ValueInfoProto:
        """The typed shape of a contract tensor; run-time dims get the model's own names."""
        run_time = {**self.dims, "rotary": attributes.rotary_dims}
        sizes = {symbol: size(attributes.geometry) for symbol, size in GEOMETRY_DIMS.items()}
        shape = [{**sizes, **run_time}[d] if isinstance(d, str) else d for d in tensor.dims]
        return helper.make_tensor_value_info(name, elem_type, shape)


def element_type(tensor: Tensor, surface: int) -> int:
    """`TensorProto.DataType` of a contract tensor."""
    return {DType.SURFACE: surface, DType.INT32: TensorProto.INT32, DType.FP32: TensorProto.FLOAT}[tensor.dtype]


def token_dims(index: GraphIndex, cut: Cut) -> tuple[Dim, Dim]:
    """B and S of a layer: from its last projection, else from the first input behind it that can hold tokens."""
    projection = cut.qkv[-1]
    batch, seq_len = (index.shape(projection) or (None, None))[:2]
    if batch is not None and seq_len is not None:
        return batch, seq_len
    read = {t for node in index.ancestors([projection]) if node.op != "Shape" for t in node.reads}
    for name in index.inputs:
        shape = index.shape(name)
        if name in read and shape is not None and len(shape) in (2, 3):  # ids, or hidden states
            return batch or shape[0], seq_len or shape[1]
    return batch, seq_len


def add_layers(
    model: onnx.ModelProto, index: GraphIndex, plans: Sequence[LayerPlan], rope: NDArray[np.float32] | None
) -> Additions:
    """Work out all additions; the model itself is not touched yet.

    Args:
        model: the model that will be edited.
        index: its index.
        plans: the layers, in graph order.
        rope: the rope table fp32 `[1, maxPos, rotary]` to bake in; None leaves it a graph input.
    """
    names = Names(model)
    batch, seq_len = token_dims(index, plans[0].cut)
    dims: dict[str, Dim] = {"B": batch or names.fresh_dim("batch"), "S": seq_len or names.fresh_dim("seq")}
    dims |= {symbol: names.fresh_dim(name) for symbol, name in _DIM_NAMES.items()}
    additions = Additions(names, dims)
    shared_infos: list[onnx.ValueInfoProto] = []
    shared: dict[str, str] = {}
    for tensor in INPUTS:
        if tensor.name in _SHARED:
            if tensor.name == "rope_rotary_cos_sin" and rope is not None:
                shared[tensor.name] = additions.constant(tensor.name, rope)
                continue
            shared[tensor.name] = names.fresh(tensor.name)
            elem_type = element_type(tensor, 0)
            shared_infos.append(additions.info(shared[tensor.name], tensor, elem_type, plans[0].attributes))
    for plan in plans:
        _add_layer(additions, index, plan, shared)
    additions.inputs += shared_infos
    return additions


def _add_layer(additions: Additions, index: GraphIndex, plan: LayerPlan, shared: dict[str, str]) -> None:
    layer = _LayerNodes(additions, index, plan)
    pool_in = additions.names.fresh(f"past_key_values_{plan.number}")
    pool_out = additions.names.fresh(f"present_key_values_{plan.number}")
    tensors = {
        "qkv": layer.packed(plan.cut.qkv, "qkv"),
        "index_qk": layer.packed(plan.cut.index_qk, "index_qk"),
        "past_key_value": pool_in,
        **layer.gammas(),
        **shared,
    }
    attention = layer.attend([tensors[t.name] for t in INPUTS], pool_out)
    cut = plan.cut
    replacement = layer.like_replaced(attention, cut.attention)
    operand = list(cut.reader.inputs).index(cut.attention)
    additions.insertions[cut.reader.position] = Insertion(layer.nodes, operand, replacement)
    pool = next(t for t in INPUTS if t.name == "past_key_value")
    additions.inputs.append(additions.info(pool_in, pool, plan.surface, plan.attributes))
    additions.outputs.append(additions.info(pool_out, OUTPUTS[1], plan.surface, plan.attributes))


class _LayerNodes:
    """The nodes that replace one layer's cut."""

    def __init__(self, additions: Additions, index: GraphIndex, plan: LayerPlan) -> None:
        self.additions, self.index, self.plan = additions, index, plan
        self.prefix = f"qsa_{plan.number}"
        self.nodes: list[onnx.NodeProto] = []
        flat = np.array([0, 0, -1], np.int64)  # 0 copies the input's dim
        self.flat_shape = additions.constant(f"{self.prefix}/flat_shape", flat)

    def packed(self, tensors: Sequence[str], name: str) -> str:
        """Tensors [B, S, ...] one after another, [B, S, sum of their widths], in the surface dtype."""
        flat = [self._flat(t) if len(self.index.shape(t) or ()) == 4 else t for t in tensors]
        if len({self.index.elem_type(t) for t in tensors}) > 1:
            flat = [
                self.cast(t, self.plan.surface, self.index.elem_type(of)) for t, of in zip(flat, tensors, strict=True)
            ]
            return self._node("Concat", flat, name, axis=-1)
        packed = flat[0] if len(flat) == 1 else self._node("Concat", flat, name, axis=-1)
        return self.cast(packed, self.plan.surface)

    def cast(self, tensor: str, to: int, current: int | None = None) -> str:
        """`tensor` in element type `to`: itself, or through a Cast."""
        current = current or self.index.elem_type(tensor) or self.plan.graph_type
        return tensor if current == to else self._node("Cast", [tensor], f"{tensor}_cast", to=to)

    def gammas(self) -> dict[str, str]:
        """The four norm weights in the surface dtype: main ones as the graph holds them (1+w), indexer ones raw (w)."""
        dtype = helper.tensor_dtype_to_np_dtype(self.plan.surface)
        found = {}
        for name, gamma in self.plan.cut.gammas.items():
            value = self.index.constant(gamma)
            assert value is not None  # attributes.py read its size
            weight = value.astype(np.float32).ravel()
            weight = weight - np.float32(1) if name.startswith("indexer") else weight
            found[f"{name}_gamma"] = self.additions.constant(f"{self.prefix}/{name}_gamma", weight.astype(dtype))
        return found

    def attend(self, inputs: list[str], pool_out: str) -> str:
        """The QsaAttention node; returns its attention output [B, S, Hq, D]."""
        output = self.additions.names.fresh(f"{self.prefix}/attn_output")
        name = self.additions.names.fresh(f"{self.prefix}/{PLUGIN_NAME}")
        attributes = self.plan.attributes
        fields: dict[str, Any] = attributes.geometry.to_attributes()
        self.nodes.append(
            helper.make_node(
                PLUGIN_NAME,
                inputs,
                [output, pool_out],
                name=name,
                domain=ONNX_DOMAIN,
                **fields,
                plugin_namespace=PLUGIN_NAMESPACE,  # TensorRT looks for a plugin only where this attribute stands
                plugin_version=PLUGIN_VERSION,
            )
        )
        self.additions.values.append(self.additions.info(output, OUTPUTS[0], self.plan.surface, attributes))
        for tensor, name in zip(INPUTS[:2], inputs[:2], strict=True):
            self.additions.values.append(self.additions.info(name, tensor, self.plan.surface, attributes))
        return output

    def like_replaced(self, attention: str, replaced: str) -> str:
        """The attention output in the shape and element type of the tensor that the gate multiplied before."""
        wanted = self.index.elem_type(replaced) or self.plan.graph_type
        tensor = self.cast(attention, wanted, self.plan.surface)
        return tensor if len(self.index.shape(replaced) or ()) == 4 else self._flat(tensor)

    def _flat(self, tensor: str) -> str:
        return self._node("Reshape", [tensor, self.flat_shape], f"{tensor}_flat")

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        output = output if output.startswith(self.prefix) else f"{self.prefix}/{output}"
        output = self.additions.names.fresh(output)
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output


def apply(model: onnx.ModelProto, additions: Additions) -> None:
    """Put the additions into the model's graph; what they make superfluous stays until `prune`."""
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    for position, node in enumerate(graph.node):
        insertion = additions.insertions.get(position)
        if insertion is not None:
            nodes += insertion.nodes
            node.input[insertion.operand] = insertion.tensor
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.extend(additions.inputs)
    graph.output.extend(additions.outputs)
    graph.initializer.extend(additions.initializers)
    known = {v.name for v in graph.value_info}
    graph.value_info.extend(v for v in additions.values if v.name not in known)
    if all(o.domain != ONNX_DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ONNX_DOMAIN, ONNX_OPSET))
