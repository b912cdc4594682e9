"""Other forms of the projections of `qsa_lm`: packed, biased, quantised, as Gemm. onnxruntime runs each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .graphs import add_constant, anchors_of, node, reroute
from .mutations import Mutate

Names = Sequence[str]
ALL = ("q_proj", "k_proj", "v_proj", "index_qk_proj")
#: Makes the nodes of one projection: (model, activations, weight [K, N], output) -> nodes.
Form = Callable[[onnx.ModelProto, str, NDArray[np.float32], str], list[onnx.NodeProto]]


def _weight(model: onnx.ModelProto, linear: onnx.NodeProto) -> NDArray[np.float32]:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == linear.input[1]))


def packed(groups: Sequence[Names] = (ALL,), *, by: str = "Split", bias: bool = False) -> Mutate:
    """Each group of a layer's projections becomes one MatMul, taken apart by a Split or by Slices."""

    def change(model: onnx.ModelProto) -> None:
        for number, layer in enumerate(anchors_of(model)[1]):
            for group in groups:
                _pack(model, f"packed_{number}_{group[0]}", [layer.projections[name] for name in group], by, bias)

    return change


def _pack(model: onnx.ModelProto, name: str, outputs: Names, by: str, bias: bool) -> None:
    linears = [node(model, output) for output in outputs]
    weights = [_weight(model, linear) for linear in linears]
    widths = [w.shape[1] for w in weights]
    add_constant(model, f"{name}_weight", np.concatenate(weights, axis=1))
    nodes = [helper.make_node("MatMul", [linears[0].input[0], f"{name}_weight"], [name], name=name)]
    whole = name
    if bias:
        value = np.random.default_rng(0).standard_normal(sum(widths)).astype(np.float32) / 4
        add_constant(model, f"{name}_bias", value)
        whole = f"{name}_biased"
        nodes.append(helper.make_node("Add", [name, f"{name}_bias"], [whole], name=whole))
    if by == "Split":
        add_constant(model, f"{name}_sizes", np.array(widths))
        nodes.append(helper.make_node("Split", [whole, f"{name}_sizes"], outputs, name=f"{name}_split", axis=-1))
    else:
        axis = add_constant(model, f"{name}_axis", np.array([2]))
        for output, start, stop in zip(outputs, np.cumsum([0, *widths]), np.cumsum(widths), strict=False):
            bounds = [
                add_constant(model, f"{output}_{k}", np.array([v])) for k, v in (("start", start), ("stop", stop))
            ]
            nodes.append(helper.make_node("Slice", [whole, *bounds, axis], [output], name=f"{output}_slice"))
    _replace(model, linears, nodes)


def as_form(form: Form, names: Names = ALL) -> Mutate:
    """Each of these projections of every layer in another form."""

    def change(model: onnx.ModelProto) -> None:
        for layer in anchors_of(model)[1]:
            for name in names:
                linear = node(model, layer.projections[name])
                nodes = form(model, linear.input[0], _weight(model, linear), linear.output[0])
                _replace(model, [linear], nodes)

    return change


def _replace(model: onnx.ModelProto, old: Sequence[onnx.NodeProto], new: Sequence[onnx.NodeProto]) -> None:
    """Put new nodes where the first of the old ones stands."""
    outputs = {t for n in old for t in n.output}
    nodes: list[onnx.NodeProto] = []
    for n in model.graph.node:
        if not outputs.isdisjoint(n.output):
            nodes += new
            new = []
        else:
            nodes.append(n)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def gemm(bias: bool) -> Form:
    """[B, S, K] -> [B*S, K] -> Gemm with a transposed weight -> [B, S, N], as exporters write addmm."""

    def form(model: onnx.ModelProto, x: str, weight: NDArray[np.float32], output: str) -> list[onnx.NodeProto]:
        width = weight.shape[1]
        add_constant(model, f"{output}_t", weight.T.copy())
        add_constant(model, f"{output}_flat", np.array([-1, weight.shape[0]]))
        add_constant(model, f"{output}_n", np.array([width]))
        inputs = [f"{output}_2d", f"{output}_t"]
        if bias:
            value = np.random.default_rng(1).standard_normal(width).astype(np.float32) / 4
            inputs.append(add_constant(model, f"{output}_bias", value))
        return [
            helper.make_node("Reshape", [x, f"{output}_flat"], [f"{output}_2d"]),
            helper.make_node("Gemm", inputs, [f"{output}_gemm"], name=f"{output}_gemm", transB=1),
            helper.make_node("Shape", [x], [f"{output}_tokens"], start=0, end=2),
            helper.make_node("Concat", [f"{output}_tokens", f"{output}_n"], [f"{output}_shape"], axis=0),
            helper.make_node("Reshape", [f"{output}_gemm", f"{output}_shape"], [output]),
        ]

    return form


def biased(model: onnx.ModelProto, x: str, weight: NDArray[np.float32], output: str) -> list[onnx.NodeProto]:
    """A MatMul and the Add of a bias."""
    value = np.random.default_rng(2).standard_normal(weight.shape[1]).astype(np.float32) / 4
    add_constant(model, f"{output}_bias", value)
    add_constant(model, f"{output}_w", weight)
    return [
        helper.make_node("MatMul", [x, f"{output}_w"], [f"{output}_raw"], name=f"{output}_raw"),
        helper.make_node("Add", [f"{output}_raw", f"{output}_bias"], [output], name=f"{output}_add"),
    ]


def qdq(*, activations: bool) -> Form:
    """An int8 weight behind a DequantizeLinear, one scale a column; activations quantised before and behind, too."""

    def form(model: onnx.ModelProto, x: str, weight: NDArray[np.float32], output: str) -> list[onnx.NodeProto]:
        scale = np.abs(weight).max(axis=0) / 127
        add_constant(model, f"{output}_q", np.round(weight / scale).astype(np.int8))
        add_constant(model, f"{output}_scale", scale)
        add_constant(model, f"{output}_zero", np.zeros(weight.shape[1], np.int8))
        nodes = [
            helper.make_node(
                "DequantizeLinear", [f"{output}_q", f"{output}_scale", f"{output}_zero"], [f"{output}_w"], axis=1
            )
        ]
        if not activations:
            return [*nodes, helper.make_node("MatMul", [x, f"{output}_w"], [output], name=f"{output}_qdq")]
        add_constant(model, f"{output}_a", np.array(0.05, np.float32))
        add_constant(model, f"{output}_az", np.array(0, np.int8))
        grid = [f"{output}_a", f"{output}_az"]
        return [
            *nodes,
            helper.make_node("QuantizeLinear", [x, *grid], [f"{output}_xq"]),
            helper.make_node("DequantizeLinear", [f"{output}_xq", *grid], [f"{output}_x"]),
            helper.make_node("MatMul", [f"{output}_x", f"{output}_w"], [f"{output}_raw"], name=f"{output}_qdq"),
            helper.make_node("QuantizeLinear", [f"{output}_raw", *grid], [f"{output}_yq"]),
            helper.make_node("DequantizeLinear", [f"{output}_yq", *grid], [output]),
        ]

    return form


def dynamic_int8(model: onnx.ModelProto, x: str, weight: NDArray[np.float32], output: str) -> list[onnx.NodeProto]:
    """onnxruntime's dynamic quantisation: DynamicQuantizeLinear, MatMulInteger, Cast, Mul."""
    scale = np.float32(np.abs(weight).max() / 127)
    add_constant(model, f"{output}_q", np.round(weight / scale).astype(np.int8))
    add_constant(model, f"{output}_scale", np.asarray(scale))
    return [
        helper.make_node("DynamicQuantizeLinear", [x], [f"{output}_xq", f"{output}_xs", f"{output}_xz"]),
        helper.make_node(
            "MatMulInteger", [f"{output}_xq", f"{output}_q", f"{output}_xz"], [f"{output}_i"], name=f"{output}_int"
        ),
        helper.make_node("Cast", [f"{output}_i"], [f"{output}_f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{output}_xs", f"{output}_scale"], [f"{output}_s"]),
        helper.make_node("Mul", [f"{output}_f", f"{output}_s"], [output]),
    ]


def n_bits(model: onnx.ModelProto, x: str, weight: NDArray[np.float32], output: str) -> list[onnx.NodeProto]:
    """com.microsoft MatMulNBits: 4 bits, blocks of 32 along K."""
    (k, n), block = weight.shape, 32
    blocks = weight.T.reshape(n, k // block, block)
    scale = np.abs(blocks).max(axis=-1) / 7  # [N, K/block]
    codes = (np.round(blocks / scale[..., None]) + 8).astype(np.uint8)
    add_constant(model, f"{output}_q", (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8))
    add_constant(model, f"{output}_scale", scale.astype(np.float32).ravel())
    inputs = [x, f"{output}_q", f"{output}_scale"]
    if all(entry.domain != "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return [
        helper.make_node(
            "MatMulNBits", inputs, [output], name=f"{output}_nbits", domain="com.microsoft",
            K=k, N=n, bits=4, block_size=block,
        )
    ]  # fmt: skip


def quantised_key(model: onnx.ModelProto) -> None:
    """The roped key is rounded to int8 on its way to the attention, which QSA does not do."""
    tensor = anchors_of(model)[1][0].norms["k_norm"].output
    grid = [
        add_constant(model, "k_grid", np.array(0.05, np.float32)),
        add_constant(model, "k_zero", np.array(0, np.int8)),
    ]
    position = next(i for i, n in enumerate(model.graph.node) if tensor in n.output)
    for i, (op, x, y) in enumerate((("QuantizeLinear", tensor, "kq"), ("DequantizeLinear", "kq", "k_dq"))):
        model.graph.node.insert(position + 1 + i, helper.make_node(op, [x, *grid], [y], name=y))
    reroute(model, tensor, "k_dq")
    node(model, "kq").input[0] = tensor
