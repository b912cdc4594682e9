"""From a stage with placeholders to an ONNX model whose weights are still to be filled in."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

#: Opset of the default domain.
OPSET = 20
#: Metadata that survives: the scopes. `stack_trace` holds paths of the exporting machine; the others repeat the scopes.
KEPT_METADATA = ("pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.name_scopes", "pkg.onnxscript.optimizer.folded_from")


@dataclass(frozen=True)
class Example:
    """One traced input: its name, an example, and the names of its dynamic axes."""

    name: str
    tensor: Tensor
    axes: dict[int, str]


@dataclass(frozen=True)
class Weight:
    """An initializer whose data is still to be written.

    Attributes:
        tensor: the initializer in the graph: name, dims and element type, no data.
        parameter: the module's name of the parameter that it holds.
        perm: how the parameter's axes are permuted.
    """

    tensor: TensorProto
    parameter: str
    perm: tuple[int, ...]


def trace(
    stage: torch.nn.Module,
    arguments: Sequence[Example | Sequence[Example]],
    outputs: Sequence[str],
    matrices: Collection[str],
) -> tuple[onnx.ModelProto, list[Weight]]:
    """Export with torch's dynamo exporter, without the matrices' data.

    While the exporter optimises the graph, the matrices are inputs of it: nothing may compute with placeholders.

    Args:
        stage: the module.
        arguments: its arguments in order, each a tensor or a list of tensors.
        outputs: names of all graph outputs, in order.
        matrices: names of the parameters that are placeholders.

    Returns:
        The model, and its initializers without data.
    """
    inputs = [e for a in arguments for e in ([a] if isinstance(a, Example) else a)]
    with torch.no_grad(), _quiet():
        program: Any = torch.onnx.export(
            stage,
            tuple(a.tensor if isinstance(a, Example) else [e.tensor for e in a] for a in arguments),
            dynamic_shapes=tuple(a.axes if isinstance(a, Example) else [e.axes for e in a] for a in arguments),
            input_names=[example.name for example in inputs],
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        graph = program.model.graph
        for name in [name for name in graph.initializers if name in matrices]:
            value = graph.initializers.pop(name)
            value.const_value = None
            graph.inputs.append(value)
        program.optimize()
        model: onnx.ModelProto = program.model_proto
    strip_metadata(model)
    return model, _weights(model.graph, matrices)


def _weights(graph: onnx.GraphProto, matrices: Collection[str]) -> list[Weight]:
    """Turn the inputs that stand for matrices into initializers; where only a transposed one is read, it is stored."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found: list[Weight] = []
    renamed: dict[str, str] = {}
    for value in [v for v in graph.input if v.name in matrices]:
        graph.input.remove(value)
        nodes = readers.get(value.name, [])
        if not nodes:
            continue
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        perms = {_permutation(node) for node in nodes}
        perm = perms.pop() if len(perms) == 1 else None
        if perm is not None:
            renamed |= {node.output[0]: value.name for node in nodes}
            dims = [dims[axis] for axis in perm]
        tensor = TensorProto(name=value.name, data_type=value.type.tensor_type.elem_type, dims=dims)
        found.append(Weight(tensor, value.name, perm or tuple(range(len(dims)))))
    kept = [node for node in graph.node if not (node.output and node.output[0] in renamed)]
    for node in kept:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(kept)
    values = [v for v in graph.value_info if v.name not in renamed and v.name not in matrices]
    del graph.value_info[:]
    graph.value_info.extend(values)
    return found


def _permutation(node: onnx.NodeProto) -> tuple[int, ...] | None:
    if node.op_type != "Transpose":
        return None
    return next((tuple(a.ints) for a in node.attribute if a.name == "perm"), None)


def strip_metadata(model: onnx.ModelProto) -> None:
    """Keep the metadata of `KEPT_METADATA` only, in place, without the memory addresses that some values hold."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        kept = [entry for entry in item.metadata_props if entry.key in KEPT_METADATA]
        for entry in kept:
            entry.value = re.sub(r" at 0x[0-9a-f]+", "", entry.value)
        del item.metadata_props[:]
        item.metadata_props.extend(kept)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns and logs about its own internals; errors remain."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
