"""Fresh names: nothing that the patcher adds may collide with what the model has."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from .graph_index import subgraphs


class Names:
    """Hands out names of tensors, nodes and symbolic dims that the model does not use."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._taken = set(_graph_names(model.graph))
        self._dims = set(_dim_names(model.graph))

    def fresh(self, name: str) -> str:
        """`name`, or `name_1`, `name_2`, ... if it is taken."""
        return _claim(name, self._taken)

    def fresh_dim(self, name: str) -> str:
        """The same for a symbolic dim."""
        return _claim(name, self._dims)


def _claim(name: str, taken: set[str]) -> str:
    chosen, number = name, 0
    while chosen in taken:
        number += 1
        chosen = f"{name}_{number}"
    taken.add(chosen)
    return chosen


def _graph_names(graph: onnx.GraphProto) -> Iterator[str]:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output
        for body in subgraphs(node):
            yield from _graph_names(body)


def _dim_names(graph: onnx.GraphProto) -> Iterator[str]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from (d.dim_param for d in value.type.tensor_type.shape.dim if d.dim_param)
