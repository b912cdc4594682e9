"""Writes plain ONNX ops as Python expressions: the few lines that keep `reference_body` readable.

`a * b + 1.0` appends a Mul, a Constant and an Add. Python integers become int64 constants of shape [1], floats become
fp32 constants of shape [1], so both broadcast against everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper


@dataclass(frozen=True, eq=False)
class Value:
    """One tensor of the body; Python operators on it append nodes."""

    builder: FunctionBuilder
    name: str

    def __add__(self, other: Operand) -> Value:
        return self.builder.op("Add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.builder.op("Sub", self, other)

    def __mul__(self, other: Operand) -> Value:
        return self.builder.op("Mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self.builder.op("Div", self, other)

    def __floordiv__(self, other: Operand) -> Value:
        """Integer division; the body only divides numbers >= 0, where ONNX's truncation is the floor."""
        return self.builder.op("Div", self, other)

    def __lt__(self, other: Operand) -> Value:
        return self.builder.op("Less", self, other)

    def __le__(self, other: Operand) -> Value:
        return self.builder.op("LessOrEqual", self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.builder.op("Greater", self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.builder.op("GreaterOrEqual", self, other)

    def __and__(self, other: Operand) -> Value:
        return self.builder.op("And", self, other)

    def __or__(self, other: Operand) -> Value:
        return self.builder.op("Or", self, other)

    def __invert__(self) -> Value:
        return self.builder.op("Not", self)


Operand = Value | int | float


class FunctionBuilder:
    """Collects the nodes of one function body. Node and value names start with the step they belong to.

    An op that repeats an earlier one is that node again: ops are functions of their inputs and attributes.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._known: dict[tuple[str, ...], list[Value]] = {}
        self._step = ""

    def step(self, name: str) -> None:
        """Begin a step: nodes are called `<name>/<op>_<number>` from here on."""
        self._step = name

    def input(self, name: str) -> Value:
        """An input of the function."""
        return Value(self, name)

    def attribute(self, name: str, kind: type[int] | type[float]) -> Value:
        """The value, of shape [1], of the function's attribute `name`."""
        field, tag = ("value_int", AttributeProto.INT) if kind is int else ("value_float", AttributeProto.FLOAT)
        scalar = Value(self, f"{self._step}/{name}")
        node = helper.make_node("Constant", [], [scalar.name], name=scalar.name)
        node.attribute.append(AttributeProto(name=field, ref_attr_name=name, type=tag))
        self.nodes.append(node)
        return self.reshape(scalar, 1)

    def op(self, op_type: str, *inputs: Operand, **attributes: Any) -> Value:
        """An op with one output."""
        return self._append(op_type, inputs, 1, attributes)[0]

    def output(self, name: str, op_type: str, *inputs: Operand) -> None:
        """The op whose result is the function's output `name`."""
        self.nodes.append(helper.make_node(op_type, [self._operand(i).name for i in inputs], [name], name=name))

    # Ops whose ONNX form is long-winded.

    def constant(self, *values: int) -> Value:
        """A one-dimensional int64 constant."""
        return self.op("Constant", value_ints=list(values))

    def scalar(self, value: int) -> Value:
        """An int64 constant without dims."""
        return self.op("Constant", value_int=value)

    def arange(self, count: Operand) -> Value:
        """The numbers 0 .. count - 1, [count] int64."""
        return self.op("Range", self.scalar(0), self.op("Squeeze", count), self.scalar(1))

    def fill(self, value: bool, shape: Value) -> Value:
        """A tensor of `shape` full of one boolean."""
        return self.op("ConstantOfShape", shape, value=helper.make_tensor("", TensorProto.BOOL, [1], [value]))

    def dim(self, x: Value, axis: int) -> Value:
        """The size of one axis >= 0, [1] int64."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def reshape(self, x: Value, *dims: Operand) -> Value:
        """Reshape to `dims`; 0 keeps the dim of `x` at that place, -1 is inferred."""
        numbers = [d for d in dims if isinstance(d, int)]
        shape = self.constant(*numbers) if len(numbers) == len(dims) else self.op("Concat", *dims, axis=0)
        return self.op("Reshape", x, shape)

    def unsqueeze(self, x: Value, *axes: int) -> Value:
        """Insert dims of size 1 at `axes` of the result."""
        return self.op("Unsqueeze", x, self.constant(*axes))

    def squeeze(self, x: Value, axis: int) -> Value:
        """Remove a dim of size 1."""
        return self.op("Squeeze", x, self.constant(axis))

    def split(self, x: Value, sizes: Sequence[Operand], axis: int) -> list[Value]:
        """Split `x` along `axis` into parts of `sizes`, each of shape [1]."""
        return self._append("Split", (x, self.op("Concat", *sizes, axis=0)), len(sizes), {"axis": axis})

    def sum(self, x: Value, *axes: int, keepdims: bool = False) -> Value:
        """Sum over `axes`."""
        return self.op("ReduceSum", x, self.constant(*axes), keepdims=int(keepdims))

    def top_k(self, x: Value, count: Value) -> Value:
        """Indices of the `count` largest elements of the last axis; of equal ones the lower index."""
        return self._append("TopK", (x, count), 2, {"axis": -1})[1]

    def _append(self, op_type: str, inputs: Sequence[Operand], outputs: int, attributes: dict[str, Any]) -> list[Value]:
        names = [self._operand(i).name for i in inputs]
        key = (op_type, *names, repr(attributes))
        if key not in self._known:
            label = f"{self._step}/{op_type}_{len(self.nodes)}"
            results = [Value(self, label if outputs == 1 else f"{label}.{i}") for i in range(outputs)]
            node = helper.make_node(op_type, names, [r.name for r in results], name=label, **attributes)
            self.nodes.append(node)
            self._known[key] = results
        return self._known[key]

    def _operand(self, x: Operand) -> Value:
        if isinstance(x, Value):
            return x
        return self.constant(x) if isinstance(x, int) else self.op("Constant", value_floats=[x])
