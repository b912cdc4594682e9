"""Runs the plain-op body of QsaAttention in onnxruntime, one node a model, on any surface dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from qsa_plugin import contract
from qsa_plugin.contract import PAGE_SIZE, DType, Geometry
from qsa_trt.patching.reference_body import add_reference_function

Array = NDArray[Any]
#: Surface dtypes by name, the NumPy one and the ONNX one.
SURFACES: dict[str, tuple[Any, int]] = {
    "fp32": (np.float32, TensorProto.FLOAT),
    "fp16": (np.float16, TensorProto.FLOAT16),
    "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}
_ONNX_TYPES = {np.dtype(numpy): onnx_type for numpy, onnx_type in SURFACES.values()} | {
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.bool_): TensorProto.BOOL,
}


@dataclass(frozen=True)
class BodyResult:
    """The two outputs of the contract, and `selection`, bool [B, S, M*P]: each live row's index list as a mask."""

    attn_output: Array
    present_key_value: Array
    selection: NDArray[np.bool_]


def body_model(geometry: Geometry, surface: str = "fp32", opset: int = 20) -> onnx.ModelProto:
    """A model of one QsaAttention node, as the patcher writes it, with the body's selection as a third output."""
    types = {DType.SURFACE: SURFACES[surface][1], DType.INT32: TensorProto.INT32, DType.FP32: TensorProto.FLOAT}

    def info(tensor: contract.Tensor) -> onnx.ValueInfoProto:
        dims = list(contract.resolve_dims(tensor.dims, geometry))
        return helper.make_tensor_value_info(tensor.name, types[tensor.dtype], dims)

    inputs, outputs = [info(t) for t in contract.INPUTS], [info(t) for t in contract.OUTPUTS]
    outputs.append(helper.make_tensor_value_info("selection", TensorProto.BOOL, ["B", "S", "M*P"]))
    node = helper.make_node(
        contract.PLUGIN_NAME,
        [i.name for i in inputs],
        [o.name for o in outputs],
        domain=contract.ONNX_DOMAIN,
        plugin_version=contract.PLUGIN_VERSION,
        plugin_namespace=contract.PLUGIN_NAMESPACE,
        **geometry.to_attributes(),
    )
    graph = helper.make_graph([node], "one_node", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    add_reference_function(model, with_selection=True)
    return model


@cache
def body_session(geometry: Geometry, surface: str = "fp32", opset: int = 20) -> onnxruntime.InferenceSession:
    """A session of `body_model`."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # tests of refused calls would print onnxruntime's own message otherwise
    model = body_model(geometry, surface, opset).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_body(inputs: Mapping[str, Array], geometry: Geometry, surface: str = "fp32", opset: int = 20) -> BodyResult:
    """One call. Outputs are poisoned before it, so that an element that is not written shows."""
    session = body_session(geometry, surface, opset)
    batch, seq_len = inputs["qkv"].shape[:2]
    capacity = inputs["kv_page_table"].shape[2] * PAGE_SIZE
    dtype = SURFACES[surface][0]
    result = BodyResult(
        np.full((batch, seq_len, geometry.num_q_heads, geometry.head_size), np.nan, dtype),
        np.full(inputs["past_key_value"].shape, np.nan, dtype),
        np.ones((batch, seq_len, capacity), np.bool_),
    )
    binding = session.io_binding()  # by address: onnxruntime does not take bf16 arrays otherwise
    bound = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    for name, array in bound.items():
        binding.bind_input(name, "cpu", 0, _ONNX_TYPES[array.dtype], array.shape, array.ctypes.data)
    for name, array in vars(result).items():
        binding.bind_output(name, "cpu", 0, _ONNX_TYPES[array.dtype], array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return result


def selection_mask(index_lists: NDArray[np.int32], capacity: int) -> NDArray[np.bool_]:
    """Index lists [B, S, W] of the reference as a mask [B, S, capacity]."""
    mask = np.zeros((*index_lists.shape[:2], capacity + 1), np.bool_)
    np.put_along_axis(mask, np.where(index_lists < 0, capacity, index_lists), True, axis=-1)
    return mask[..., :capacity]


def bits(array: Array) -> Array:
    """The bit patterns of a float array: NaN compares equal to itself here."""
    return array.view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)
