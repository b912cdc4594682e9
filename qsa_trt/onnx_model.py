"""Runs ONNX models in onnxruntime on the CPU, and finds the QsaAttention nodes of patched ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from qsa_plugin.contract import EDGE_LLM_NAME, INPUTS, OUTPUTS, PLUGIN_NAME, Geometry
from qsa_plugin.errors import ContractError, MissingPackageError

from .patching.external_data import read_tensor

if TYPE_CHECKING:
    import onnxruntime

Array = NDArray[Any]
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class QsaNode:
    """One QsaAttention node: its attributes, and its tensors by their contract names."""

    name: str
    geometry: Geometry
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def qsa_nodes(model: onnx.ModelProto) -> list[QsaNode]:
    """The QsaAttention nodes of a patched model, in graph order."""
    return [_qsa_node(node) for node in model.graph.node if node.op_type in (PLUGIN_NAME, EDGE_LLM_NAME)]


def _qsa_node(node: onnx.NodeProto) -> QsaNode:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    name = node.name or next(iter(node.output), "")
    operands, expected = (len(node.input), len(node.output)), (len(INPUTS), len(OUTPUTS))
    if operands != expected:
        got, wanted = ("{} inputs and {} outputs".format(*pair) for pair in (operands, expected))
        raise ContractError(f"node {name}", got, wanted, "patch the original model again")
    return QsaNode(
        name=name,
        geometry=Geometry.from_attributes({k: v for k, v in attributes.items() if isinstance(v, int | float)}),
        inputs=dict(zip((t.name for t in INPUTS), node.input, strict=True)),
        outputs=dict(zip((t.name for t in OUTPUTS), node.output, strict=True)),
    )


def node_weights(proto: onnx.ModelProto, nodes: list[QsaNode], folder: Path | None) -> dict[str, Array]:
    """The initializers that are inputs of nodes, by name.

    Args:
        proto: the model.
        nodes: its nodes.
        folder: where its external data lies.
    """
    wanted = {tensor for node in nodes for tensor in node.inputs.values()}
    return {t.name: read_tensor(t, folder) for t in proto.graph.initializer if t.name in wanted}


def open_session(proto: onnx.ModelProto, folder: Path | None = None, threads: int = 1) -> onnxruntime.InferenceSession:
    """A CPU session of a model.

    Args:
        proto: the model.
        folder: where its external data lies.
        threads: threads that onnxruntime may use.

    Raises:
        MissingPackageError: onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "package onnxruntime", "not installed", "onnxruntime >= 1.20", "run: pip install 'qsa-trt[ort]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_session(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """All outputs of a model by name. bf16 tensors are `ml_dtypes.bfloat16` arrays, which onnxruntime itself refuses.

    Args:
        session: the model.
        feeds: all of its inputs.
    """
    from onnxruntime import OrtValue

    def value(array: Array) -> OrtValue:
        array = np.ascontiguousarray(array)
        if array.dtype == _BF16:
            return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        return OrtValue.ortvalue_from_numpy(array)

    names = [output.name for output in session.get_outputs()]
    results = session.run_with_ort_values(names, {name: value(array) for name, array in feeds.items()})
    return {name: _array(result) for name, result in zip(names, results, strict=True)}


def _array(value: onnxruntime.OrtValue) -> Array:
    if value.element_type() != TensorProto.BFLOAT16:
        return np.asarray(value.numpy())
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(bytearray(content), _BF16).reshape(value.shape())
