"""What an ONNX file holds: the QSA attention in it, how it was found, and what stands in the way of the rest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from qsa_plugin.contract import PAGE_SIZE, Geometry, PoolIO
from qsa_plugin.errors import RefusedError
from qsa_plugin.kernel_limits import kernel_refusals

from ..columns import columns
from ..onnx_model import QsaNode, qsa_nodes
from ..patching.anchors import Anchors, LayerRefusedError, StrategyRefusedError
from ..patching.config import Config
from ..patching.detect import STRATEGIES, patched_nodes
from ..patching.files import ModelFile
from ..patching.graph_index import GraphIndex, Node
from ..patching.norms import find_norms
from ..patching.plain_form import to_plain_form
from ..patching.plan import make_plan, plain_attributes
from ..patching.structure import indexers
from ..patching.verify import check_layer
from .layer_table import HEAD, row

#: onnxruntime's own operators, where there are no anchors to look for.
_SPARSE_OPS = frozenset({"SparseAttentionIndexer", "PackedSparseAttentionIndexer", "SparsePagedAttention"})


@dataclass(frozen=True)
class LayerFinding:
    """One QSA attention: a node of a patched file, or a layer that patch-onnx finds.

    Attributes:
        name: the node, or the layer's module path.
        found_by: strategy that found it; the operator in a patched file.
        geometry: the node's attributes; None where they could not be read.
        rotary_dims: last dim of the rope table; None where it is open or unknown.
        dtype: element type at the node, or of the layer's activations, NumPy's name; empty where it is unknown.
        blocked: why the layer cannot be patched, or why the CUDA kernels do not run the node; empty when they do.
        pool: name of the pool input of a patched file.
        page_bytes: bytes that one page of 128 tokens takes in this layer's pool, K and V together.
    """

    name: str
    found_by: str
    geometry: Geometry | None = None
    rotary_dims: int | None = None
    dtype: str = ""
    blocked: str = ""
    pool: str = ""
    page_bytes: int = 0


@dataclass(frozen=True)
class OnnxInspection:
    """An ONNX file.

    Attributes:
        file: its path.
        patched: whether it has QsaAttention nodes.
        ir_version: of the file.
        opsets: version of every domain.
        inputs: graph inputs as `name dtype[dims]`, initializers left out.
        outputs: graph outputs, likewise.
        external_bytes: size of the files with external data, by location.
        layers: QSA attention in graph order.
        others: attention of other kinds, which patching leaves alone.
        blocked: what else keeps the whole model from being patched; empty when nothing does.
        notes: what a reader should know.
    """

    file: Path
    patched: bool
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    external_bytes: dict[str, int]
    layers: tuple[LayerFinding, ...]
    others: tuple[str, ...]
    blocked: str
    notes: tuple[str, ...]

    def json(self) -> str:
        """The findings for programs."""
        return json.dumps({"kind": "onnx", **asdict(self), "file": str(self.file)}, indent=2)

    def summary(self) -> str:
        """The findings for people."""
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        state = "patched" if self.patched else "not patched"
        lines = [f"{self.file}: ONNX model, {state}; IR {self.ir_version}, opsets {opsets}"]
        lines += [f"external data: {name}, {size} bytes" for name, size in self.external_bytes.items()]
        lines += _listed("inputs", self.inputs) + _listed("outputs", self.outputs)
        lines += [f"QSA attention layers: {len(self.layers)}"]
        rows = [
            (*row(layer.name, layer.found_by, layer.geometry, layer.rotary_dims), layer.dtype or "?", *_pool(layer))
            for layer in self.layers
            if layer.geometry is not None
        ]
        if rows:
            head = (*HEAD, "dtype", *(("pool", "pool io") if self.patched else ()))
            lines += [f"  {line}" for line in columns([head, *rows])]
        lines += [f"  {_blocked(layer, self.patched)}" for layer in self.layers if layer.blocked]
        if self.patched:
            page = sum(layer.page_bytes for layer in self.layers)
            lines += [f"pools: {page} bytes a page of {PAGE_SIZE} tokens in all layers, {page // PAGE_SIZE} a token"]
        lines += _listed("other attention, left alone", self.others)
        lines += [f"blocked: {self.blocked}"] if self.blocked else []
        if not self.patched and self.layers and not self.blocked and not any(layer.blocked for layer in self.layers):
            lines.append("nothing is in the way of qsa-trt patch-onnx")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _blocked(layer: LayerFinding, patched: bool) -> str:
    return f"{layer.name}: {'the CUDA kernels do not run it' if patched else 'cannot be patched'}: {layer.blocked}"


def _pool(layer: LayerFinding) -> tuple[str, ...]:
    if layer.geometry is None or not layer.pool:
        return ()
    return layer.pool, PoolIO(layer.geometry.pool_io).option


def _listed(title: str, items: tuple[str, ...]) -> list[str]:
    return [f"{title}:", *(f"  {item}" for item in items)] if items else []


def inspect_onnx(source: ModelFile, config: Config) -> OnnxInspection:
    """Find the attention of a loaded model; no file is changed, and no weight above a gamma's size is read.

    Args:
        source: the file.
        config: the model's config; empty when none is given.
    """
    model = source.model
    index = to_plain_form(model, source.folder).index
    patched = bool(patched_nodes(model))
    blocked = ""
    if patched:
        layers = [_patched_layer(index, node) for node in qsa_nodes(model)]
        covered: set[Node] = set()
    else:
        layers, covered, blocked = _unpatched_layers(index, config)
    weights = {tensor.name for tensor in model.graph.initializer}
    return OnnxInspection(
        file=source.path,
        patched=patched,
        ir_version=model.ir_version,
        opsets={entry.domain: entry.version for entry in model.opset_import},
        inputs=tuple(_spell(value) for value in model.graph.input if value.name not in weights),
        outputs=tuple(_spell(value) for value in model.graph.output),
        external_bytes={name: (source.folder / name).stat().st_size for name in source.external},
        layers=tuple(layers),
        others=tuple(node.label for node in index.nodes if node not in covered and _is_attention(index, node)),
        blocked=blocked,
        notes=tuple(_notes(index) if patched else []),
    )


def _patched_layer(index: GraphIndex, node: QsaNode) -> LayerFinding:
    types = {name: index.elem_type(tensor) for name, tensor in node.inputs.items()}
    known = next((types[name] for name in ("past_key_value", "qkv") if types[name]), TensorProto.UNDEFINED)
    surface = _name(known)
    rotary = index.last_dim(node.inputs["rope_rotary_cos_sin"])
    itemsize = helper.tensor_dtype_to_np_dtype(known).itemsize if surface else 0
    g = node.geometry
    return LayerFinding(
        name=node.name,
        found_by="QsaAttention node",
        geometry=g,
        rotary_dims=rotary,
        dtype=surface,
        blocked="; ".join(kernel_refusals(g, surface, rotary)) if surface else "",
        pool=node.inputs["past_key_value"],
        page_bytes=2 * PAGE_SIZE * g.num_kv_heads * g.pool_width * itemsize,
    )


def _notes(index: GraphIndex) -> list[str]:
    """What a patched file carries besides its nodes."""
    operators = {node.op_type for node in patched_nodes(index.model)}
    body = operators <= {function.name for function in index.model.functions}
    notes = [f"{topk.label} is still an indexer in plain operators" for topk, _ in indexers(index)]
    nested = len(patched_nodes(index.model)) - len(qsa_nodes(index.model))
    notes += [f"{nested} more QsaAttention nodes lie in bodies or functions"] if nested else []
    rope = qsa_nodes(index.model)[0].inputs["rope_rotary_cos_sin"] if not nested else ""
    if rope:
        notes.append("the rope table is " + ("baked in" if rope in index.initializers else f"graph input {rope}"))
    return [*notes, "the definition for onnxruntime is " + ("in the file" if body else "not in the file")]


def _unpatched_layers(index: GraphIndex, config: Config) -> tuple[list[LayerFinding], set[Node], str]:
    """The layers that patch-onnx finds, the nodes in their cuts, and what else blocks the model."""
    try:
        plans = make_plan(index, config, None, PoolIO.IN_PLACE).layers
    except RefusedError as refusal:
        layers, covered = _one_by_one(index, config)
        return layers, covered, "" if any(layer.blocked for layer in layers) else str(refusal)
    layers = [
        LayerFinding(p.cut.layer, p.cut.strategy, p.attributes.geometry, p.attributes.rotary_dims, _name(p.graph_type))
        for p in plans
    ]
    return layers, {node for plan in plans for node in plan.cut.nodes}, ""


def _one_by_one(index: GraphIndex, config: Config) -> tuple[list[LayerFinding], set[Node]]:
    """The layers in plain operators of a model that is refused, each judged by itself."""
    anchors, refusals = _found(index)
    layers: list[LayerFinding] = []
    covered: set[Node] = set()
    for layer in anchors:
        try:
            cut = check_layer(index, layer)
            covered |= cut.nodes
            attributes = plain_attributes(index, cut, config, PoolIO.IN_PLACE)
        except LayerRefusedError as error:
            layers.append(LayerFinding(layer.layer, layer.strategy, blocked=f"{error.place}: {error.reason}"))
        else:
            dtype = _name(index.elem_type(layer.projections["k_proj"]))
            layers.append(LayerFinding(layer.layer, layer.strategy, attributes.geometry, attributes.rotary_dims, dtype))
    layers += [LayerFinding(r.layer, "in part", blocked=f"{r.place}: {r.reason}") for r in refusals]
    return layers, covered


def _name(elem_type: int) -> str:
    """NumPy's name of an element type; empty where it is unknown."""
    return str(helper.tensor_dtype_to_np_dtype(elem_type)) if elem_type else ""


def _found(index: GraphIndex) -> tuple[list[Anchors], list[LayerRefusedError]]:
    """The layers of the first strategy that sees all it finds, else of the one that sees most, and what it refuses."""
    if any(node.op in _SPARSE_OPS for node in index.nodes):
        return [], []
    norms = find_norms(index)
    best: tuple[list[Anchors], list[LayerRefusedError]] = ([], [])
    for find in STRATEGIES:
        try:
            found = find(index, norms)
        except StrategyRefusedError as error:
            refusals = [e for e in error.refusals if isinstance(e, LayerRefusedError)]
            if len(error.found) > len(best[0]) or not best[1]:
                best = list(error.found), refusals
        except LayerRefusedError as error:
            best = best if best[1] else (best[0], [error])
        else:
            if found:
                return sorted(found, key=lambda a: a.gate.multiply.position), []
    return best


def _is_attention(index: GraphIndex, node: Node) -> bool:
    """An Attention operator, or a Softmax over a product of two activations and what masks and scales it."""
    if node not in index.live or node.op == "QsaAttention":
        return False
    if node.op.endswith("Attention"):
        return True
    if node.op != "Softmax":
        return False
    behind = {"Add", "Mul", "Div", "Where", "Cast", "Reshape", "Transpose", "Identity"}
    stack, seen = [node.inputs[0]], set()
    while stack:
        tensor = stack.pop()
        producer = index.producer(tensor)
        if producer is None or tensor in seen:
            continue
        seen.add(tensor)
        if producer.op in ("MatMul", "FusedMatMul", "Einsum"):
            if not any(map(index.is_constant, producer.reads)):
                return True
        elif producer.op in behind:
            stack += producer.inputs
    return False


def _spell(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = ", ".join(d.dim_param or str(d.dim_value) for d in kind.shape.dim)
    return f"{value.name} {TensorProto.DataType.Name(kind.elem_type).lower()}[{dims}]"
