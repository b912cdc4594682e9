"""Removes what the cut left without a reader: nodes, inputs, weights, dense caches, and shapes of removed inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from .graph_index import Dim, GraphIndex, Node, subgraphs
from .names import Names
from .verify import is_cache_output

_STACK_TRACE = "pkg.torch.onnx.stack_trace"
#: First opset whose Shape takes `start` and `end`.
_SHAPE_SLICE_OPSET = 15


@dataclass(frozen=True)
class Removed:
    """What went, and what could not go."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: int
    #: Inputs of which only a shape is read, whose dims stand in no other input.
    kept: tuple[str, ...]


def prune(model: onnx.ModelProto, before: GraphIndex, cache_outputs: Collection[str], names: Names) -> Removed:
    """Clean up, in place, after `rewrite.apply`.

    Args:
        model: the edited model.
        before: the index of the model before it was edited.
        cache_outputs: outputs that the layers' cuts took away.
        names: names that are taken.
    """
    graph = model.graph
    _drop(graph.output, cache_outputs)
    orphans = _orphaned_caches(model, before)
    _drop(graph.output, orphans)
    kept = _redirect_shapes(model, before, names)
    after = GraphIndex(model)
    inputs = [name for name in before.inputs if before.readers(name) and not after.readers(name)]
    removed = _dead_nodes(before, after, inputs)
    gone = {output for node in removed for output in node.outputs} | set(inputs)
    positions = {node.position for node in removed}
    remaining = [node for i, node in enumerate(graph.node) if i not in positions]
    del graph.node[:]
    graph.node.extend(remaining)
    _drop(graph.input, gone)
    _drop(graph.value_info, gone)
    _drop_unread_initializers(model, before)
    outputs = (*cache_outputs, *orphans)
    return Removed(tuple(inputs), outputs, len(removed), tuple(kept))


def strip_stack_traces(model: onnx.ModelProto) -> None:
    """Remove the exporting machine's paths from all metadata, and nothing else."""
    for holder in _metadata_holders(model.graph):
        _strip(holder)
    for function in model.functions:
        for node in function.node:
            _strip(node)


def _strip(holder: Any) -> None:
    for i in reversed(range(len(holder.metadata_props))):
        if holder.metadata_props[i].key == _STACK_TRACE:
            del holder.metadata_props[i]


def _metadata_holders(graph: onnx.GraphProto) -> Iterator[Any]:
    yield graph
    yield from (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from _metadata_holders(body)


def _dead_nodes(before: GraphIndex, after: GraphIndex, inputs: Collection[str]) -> list[Node]:
    """Nodes that the cut killed, and nodes that were dead already and read something that goes."""
    was_dead = {output for node in before.nodes if node not in before.live for output in node.outputs}
    gone = set(inputs)
    dead = []
    for node in after.nodes:
        if node not in after.live and (not was_dead.issuperset(node.outputs) or gone.intersection(node.reads)):
            dead.append(node)
            gone.update(node.outputs)
    return dead


def _orphaned_caches(model: onnx.ModelProto, before: GraphIndex) -> list[str]:
    """Cache outputs that only append to an input (positions), and whose readers all went with the cut."""
    remaining = {v.name for v in model.graph.output}
    candidates = [t for t in before.outputs if t in remaining and before.readers(t) and is_cache_output(before, t)]
    after = GraphIndex(model)
    live = after.ancestors([v.name for v in model.graph.output if v.name not in candidates])
    return [t for t in candidates if not any(t in node.reads for node in live)]


def _drop_unread_initializers(model: onnx.ModelProto, before: GraphIndex) -> None:
    after = GraphIndex(model)
    kept = set(after.outputs) | {t for node in after.nodes for t in node.reads}
    was_read = {t for node in before.nodes for t in node.reads}
    unread = [t.name for t in model.graph.initializer if t.name in was_read and t.name not in kept]
    _drop(model.graph.initializer, unread)
    _drop(model.graph.value_info, unread)
    _drop(model.graph.input, unread)  # older files list initializers among the inputs


def _redirect_shapes(model: onnx.ModelProto, before: GraphIndex, names: Names) -> list[str]:
    """Take from other inputs the dims of inputs that the cut left with no reader but Shape nodes.

    Returns:
        The inputs that must stay, because one of their dims stands nowhere else.
    """
    after = GraphIndex(model)
    homes = _dim_homes(after)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    replacements: dict[int, list[onnx.NodeProto]] = {}
    kept = []
    for name in before.inputs:
        readers = after.readers(name)
        if not readers or len(readers) == len(before.readers(name)) or any(node.op != "Shape" for node in readers):
            continue
        chains = [_same_shape(after, node, homes, names) for node in readers]
        if any(chain is None for chain in chains) or opset < _SHAPE_SLICE_OPSET:
            kept.append(name)
            continue
        replacements |= {n.position: chain for n, chain in zip(readers, chains, strict=True) if chain is not None}
    nodes = [new for i, node in enumerate(model.graph.node) for new in replacements.get(i, [node])]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return kept


def _dim_homes(index: GraphIndex) -> dict[str, tuple[str, int]]:
    """Symbolic dim -> (input, axis) of an input that is read for more than its shape."""
    homes: dict[str, tuple[str, int]] = {}
    for name in index.inputs:
        if any(node.op != "Shape" for node in index.readers(name)):
            for axis, dim in enumerate(index.input_shape(name)):
                if isinstance(dim, str):
                    homes.setdefault(dim, (name, axis))
    return homes


def _same_shape(
    index: GraphIndex, node: Node, homes: dict[str, tuple[str, int]], names: Names
) -> list[onnx.NodeProto] | None:
    """Nodes that make the same output as a Shape node from other inputs; None where a dim stands nowhere else."""
    dims = index.input_shape(node.inputs[0])[slice(node.attribute("start", 0), node.attribute("end"))]
    if any(dim is None or (isinstance(dim, str) and dim not in homes) for dim in dims):
        return None
    if len(dims) == 1 and isinstance(dims[0], str):
        return [_shape_node(node.output, dims[0], homes, node.proto)]
    parts = [_dim_node(names.fresh(f"{node.output}_{axis}"), dim, homes) for axis, dim in enumerate(dims)]
    concat = onnx.NodeProto()
    concat.CopyFrom(node.proto)  # keeps its name and metadata
    concat.op_type, concat.input[:] = "Concat", [part.output[0] for part in parts]
    del concat.attribute[:]
    concat.attribute.append(helper.make_attribute("axis", 0))
    return [*parts, concat]


def _dim_node(output: str, dim: Dim, homes: dict[str, tuple[str, int]]) -> onnx.NodeProto:
    if isinstance(dim, int):
        return helper.make_node("Constant", [], [output], name=output, value_ints=[dim])
    return _shape_node(output, str(dim), homes, onnx.NodeProto(op_type="Shape", name=output))


def _shape_node(output: str, dim: str, homes: dict[str, tuple[str, int]], like: onnx.NodeProto) -> onnx.NodeProto:
    """A Shape node of one dim, with the name and metadata of `like`."""
    name, axis = homes[dim]
    shape = onnx.NodeProto()
    shape.CopyFrom(like)
    shape.input[:], shape.output[:] = [name], [output]
    del shape.attribute[:]
    shape.attribute.extend([helper.make_attribute("start", axis), helper.make_attribute("end", axis + 1)])
    return shape


def _drop(repeated: Any, names: Collection[str]) -> None:
    """Remove the named entries of a repeated protobuf field."""
    for i in reversed(range(len(repeated))):
        if repeated[i].name in names:
            del repeated[i]
