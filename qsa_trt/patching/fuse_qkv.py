"""`--fuse-qkv`: the projections of a layer as one MatMul, whose columns stand in the order of the node's inputs.

The query projection holds query and output gate head by head. In the fused weight all queries come first, so that the
product splits into `qkv` as the node takes it, `index_qk`, and the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import PLUGIN_NAME

from .anchors import PROJECTIONS, refuse
from .external_data import is_external, read_tensor, stored_bytes
from .graph_index import GraphIndex, Node
from .names import Names
from .plan import Plan
from .rewrite import LayerPlan
from .verify import PlainCut

Array = NDArray[Any]
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
#: First opset whose Split takes its sizes as an input.
_SPLIT_OPSET = 13


@dataclass(frozen=True)
class _Linear:
    """One plain projection: x @ weight + bias."""

    x: str
    product: Node
    weight: TensorProto
    transposed: bool  # the stored weight is [N, K]
    bias: TensorProto | None


@dataclass(frozen=True)
class _Columns:
    """A fused weight `[K, N]`, or bias `[N]`, and the stored parts that it is made of."""

    tensor: TensorProto
    parts: tuple[tuple[TensorProto, bool], ...]  # q with its gate, k, v, index_qk; whether stored [N, K]
    heads: int
    folder: Path | None

    def value(self) -> Array:
        """The parts side by side: queries, keys, values, index_qk, gates."""
        loaded = [read_tensor(tensor, self.folder) for tensor, _ in self.parts]
        query, *rest = (v.T if turned else v for v, (_, turned) in zip(loaded, self.parts, strict=True))
        halves = query.reshape(*query.shape[:-1], self.heads, 2, -1)  # [..., Hq, 2, D]
        queries, gates = (halves[..., i, :].reshape(*query.shape[:-1], -1) for i in (0, 1))
        return np.ascontiguousarray(np.concatenate([queries, *rest, gates], axis=-1))


@dataclass
class Fusion:
    """What was fused.

    Attributes:
        data: location of the fused weights that lie beside the model; they are written by `write`.
        widths: columns of the fused product of each layer, in graph order.
        notes: what a user should know about the weights.
    """

    data: str
    widths: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _pending: list[_Columns] = field(default_factory=list)
    _bytes: int = 0

    @property
    def has_data(self) -> bool:
        """Whether there is something to write."""
        return bool(self._pending)

    def add(self, columns: _Columns) -> None:
        """Give the tensor its value: at once, or from the file beside the model where one of its parts is external."""
        tensor = columns.tensor
        if not any(is_external(part) for part, _ in columns.parts):
            tensor.CopyFrom(numpy_helper.from_array(columns.value(), tensor.name))
            return
        length = stored_bytes(tensor)
        assert length is not None  # floats
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.data), ("offset", self._bytes), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self._bytes += length
        kept = tuple((_copy(part), turned) for part, turned in columns.parts)  # `prune` takes the originals away
        self._pending.append(replace(columns, parts=kept))

    def write(self, file: BinaryIO) -> None:
        """Write the fused weights; those of one layer are in memory at a time."""
        for columns in self._pending:
            file.write(columns.value().tobytes())


def fuse_qkv(model: onnx.ModelProto, index: GraphIndex, plan: Plan, names: Names, fusion: Fusion) -> None:
    """Fuse the projections of every layer, in place, after `rewrite.apply` and before `prune`.

    Layers that share all of their weights share the fused one. Weights in external data are not read here: what is
    made of them goes to a new file.

    Args:
        model: the edited model.
        index: the index of the model before it was edited.
        plan: the layers, and the outputs that `prune` will take away.
        names: names that are taken.
        fusion: an empty one, which learns what is done.

    Raises:
        RefusedError: a projection that is no plain MatMul, has a bias that others lack, or is read elsewhere.
    """
    fused: dict[tuple[str, ...], tuple[str, str | None]] = {}
    found = [_linears(index, layer) for layer in plan.layers]
    for layer, linears in zip(plan.layers, found, strict=True):
        key = tuple(t.name for linear in linears for t in (linear.weight, linear.bias) if t is not None)
        if key not in fused:
            fused[key] = _add_weights(model, fusion, index, layer, linears, names)
        _rewire(model, layer, linears, *fused[key], names)
        fusion.widths.append(sum(_widths(layer)))
    after = GraphIndex(model)
    nodes = after.ancestors(set(after.outputs) - set(plan.cache_outputs))
    live = {output for node in nodes for output in node.outputs}
    for layer, linears in zip(plan.layers, found, strict=True):
        for name, linear in zip(PROJECTIONS, linears, strict=True):
            if linear.product.output in live:
                refuse(layer.cut.layer, linear.product, f"{name} is read by more than the attention: not fused")
    read = {tensor for node in nodes for tensor in node.reads}
    shared = {t.name for key in found for linear in key for t in (linear.weight, linear.bias) if t and t.name in read}
    if shared:
        fusion.notes.append(f"other nodes read {', '.join(sorted(shared))} too: the fused weights are copies of them")
    if fusion.has_data:
        fusion.notes.append(f"fused weights are in {fusion.data}; what they were made of stays where it was")


def _linears(index: GraphIndex, plan: LayerPlan) -> list[_Linear]:
    """The four stored projections, in the order of `PROJECTIONS`.

    Raises:
        RefusedError: they are not alike.
    """
    cut = plan.cut
    opset = next((o.version for o in index.model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if not isinstance(cut, PlainCut):
        refuse(cut.layer, cut.strategy, "only projections of layers in plain operators are fused")
    if opset < _SPLIT_OPSET:
        refuse(cut.layer, f"opset {opset}", f"--fuse-qkv needs opset {_SPLIT_OPSET}: export the model again")
    linears = [_linear(index, cut.layer, name, cut.anchors.projections[name]) for name in PROJECTIONS]
    first = linears[0]
    for name, linear in zip(PROJECTIONS, linears, strict=True):
        if linear.x != first.x:
            refuse(cut.layer, linear.product, f"{name} reads {linear.x}, and q_proj reads {first.x}: not fused")
        if linear.weight.data_type != first.weight.data_type:
            refuse(cut.layer, linear.product, f"the weight of {name} has another element type than that of q_proj")
        if (linear.bias is None) != (first.bias is None):
            other = "no bias" if linear.bias is None else "a bias"
            refuse(cut.layer, linear.product, f"{name} has {other}, unlike q_proj: not fused")
    return linears


def _linear(index: GraphIndex, layer: str, name: str, tensor: str) -> _Linear:
    """A projection by its output: a MatMul with a stored weight, and perhaps the Add of a stored bias."""
    node, bias = index.producer(tensor), None
    if node is not None and node.op == "Add":
        stored = [index.initializers[t] for t in node.inputs if t in index.initializers]
        behind = [index.producer(t) for t in node.inputs if t not in index.initializers]
        if len(stored) == 1 and len(stored[0].dims) == 1:
            node, bias = behind[0], stored[0]
    if node is None or node.op != "MatMul" or node.proto.domain not in ("", "ai.onnx"):
        refuse(layer, node or tensor, f"{name} is no MatMul with a plain weight of its own: not fused")
    weight, transposed = _stored(index, node.inputs[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type not in _FLOATS:
        refuse(layer, node, f"the weight of {name} is no stored matrix of floats: not fused")
    return _Linear(node.inputs[0], node, weight, transposed, bias)


def _stored(index: GraphIndex, tensor: str) -> tuple[TensorProto | None, bool]:
    """The initializer behind a weight, and whether a Transpose stands between them."""
    transposed = False
    node = index.producer(tensor)
    while node is not None and node.op in ("Identity", "Transpose"):
        if node.op == "Transpose":
            if list(node.attribute("perm", [1, 0])) != [1, 0]:
                return None, False
            transposed = not transposed
        tensor = node.inputs[0]
        node = index.producer(tensor)
    return index.initializers.get(tensor), transposed


def _widths(plan: LayerPlan) -> tuple[int, int, int]:
    """Columns of qkv, of index_qk and of the gate."""
    g = plan.attributes.geometry
    return g.qkv_width, g.index_width, g.num_q_heads * g.head_size


def _add_weights(
    model: onnx.ModelProto,
    fusion: Fusion,
    index: GraphIndex,
    plan: LayerPlan,
    linears: Sequence[_Linear],
    names: Names,
) -> tuple[str, str | None]:
    """Add the fused weight and bias of a layer; returns their names."""
    width, first = sum(_widths(plan)), linears[0]

    def add(name: str, dims: list[int], parts: list[tuple[TensorProto, bool]]) -> str:
        tensor = model.graph.initializer.add(
            name=names.fresh(f"qsa_{plan.number}/{name}"), data_type=parts[0][0].data_type, dims=dims
        )
        fusion.add(_Columns(tensor, tuple(parts), plan.attributes.geometry.num_q_heads, index.folder))
        return str(tensor.name)

    depth = first.weight.dims[1 if first.transposed else 0]
    weight = add("fused_weight", [depth, width], [(linear.weight, linear.transposed) for linear in linears])
    biases = [(linear.bias, False) for linear in linears if linear.bias is not None]
    return weight, add("fused_bias", [width], biases) if biases else None


def _rewire(
    model: onnx.ModelProto, plan: LayerPlan, linears: Sequence[_Linear], weight: str, bias: str | None, names: Names
) -> None:
    """Insert the fused product where the first of the projections stands, and let node and gate read its parts."""
    assert isinstance(plan.cut, PlainCut)
    g, prefix = plan.attributes.geometry, f"qsa_{plan.number}"
    old_gate = plan.cut.anchors.gate.gate
    sizes = _constant(model, names.fresh(f"{prefix}/fused_sizes"), _widths(plan))
    heads = _constant(model, names.fresh(f"{prefix}/gate_heads"), (0, 0, g.num_q_heads, g.head_size))
    product, qkv, index_qk, flat_gate, gate = (
        names.fresh(f"{prefix}/fused_{part}") for part in ("product", "qkv", "index_qk", "flat_gate", "gate")
    )
    nodes = [helper.make_node("MatMul", [linears[0].x, weight], [product], name=product)]
    if bias is not None:
        biased = names.fresh(f"{prefix}/fused_biased")
        nodes.append(helper.make_node("Add", [product, bias], [biased], name=biased))
    nodes.append(helper.make_node("Split", [nodes[-1].output[0], sizes], [qkv, index_qk, flat_gate], name=qkv, axis=-1))
    nodes.append(helper.make_node("Reshape", [flat_gate, heads], [gate], name=gate))
    graph = model.graph
    attention = next(n for n in graph.node if n.op_type == PLUGIN_NAME and n.name.startswith(f"{prefix}/"))
    for position, part in enumerate((qkv, index_qk)):
        old = attention.input[position]
        if plan.surface != plan.graph_type:
            cast = names.fresh(f"{part}_cast")
            nodes.append(helper.make_node("Cast", [part], [cast], name=cast, to=plan.surface))
            part = cast
        attention.input[position] = part
        graph.value_info.extend(_renamed(graph, old, part))
    graph.value_info.extend(_renamed(graph, old_gate, gate))
    for node in graph.node:
        node.input[:] = [gate if tensor == old_gate else tensor for tensor in node.input]
    products = {linear.product.output for linear in linears}
    first = next(i for i, node in enumerate(graph.node) if products.intersection(node.output))
    for offset, node in enumerate(nodes):
        graph.node.insert(first + offset, node)


def _copy(tensor: TensorProto) -> TensorProto:
    copied = TensorProto()
    copied.CopyFrom(tensor)
    return copied


def _constant(model: onnx.ModelProto, name: str, value: Sequence[int]) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    return name


def _renamed(graph: onnx.GraphProto, old: str, new: str) -> list[onnx.ValueInfoProto]:
    """What is known about a tensor, for the one that takes its place."""
    return [onnx.ValueInfoProto(name=new, type=info.type) for info in graph.value_info if info.name == old]
