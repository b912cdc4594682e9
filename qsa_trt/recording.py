"""Runs a patched model in onnxruntime over paged pools, step by step, and records what its QsaAttention nodes see."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import EDGE_LLM_NAME, INPUTS, OUTPUTS, PLUGIN_NAME, Geometry
from qsa_plugin.errors import InputError, MissingPackageError

from .paging import blank_dead_entries, empty_pool, page_table, pages_for
from .patching.files import load_model

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


@dataclass(frozen=True)
class NodeCall:
    """One run of one node: the eleven inputs by contract name, and both outputs. The geometry is the node's."""

    node: QsaNode
    inputs: Mapping[str, Array]
    attn_output: Array
    present_key_value: Array


@dataclass(frozen=True)
class Step:
    """One run of the model: its outputs without the pools, and what each node saw (empty unless recording)."""

    outputs: Mapping[str, Array]
    calls: tuple[NodeCall, ...]


def qsa_nodes(model: onnx.ModelProto) -> list[QsaNode]:
    """The QsaAttention nodes of a patched model, in graph order."""
    return [_qsa_node(node) for node in model.graph.node if node.op_type in (PLUGIN_NAME, EDGE_LLM_NAME)]


def _qsa_node(node: onnx.NodeProto) -> QsaNode:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return QsaNode(
        name=node.name or node.output[0],
        geometry=Geometry.from_attributes({k: v for k, v in attributes.items() if isinstance(v, int | float)}),
        inputs=dict(zip((t.name for t in INPUTS), node.input, strict=True)),
        outputs=dict(zip((t.name for t in OUTPUTS), node.output, strict=True)),
    )


class PatchedSession:
    """A patched model, its pools and its page table: one prefill, then any number of decode steps.

    Args:
        model: a patched file, or the model itself; it needs its reference body.
        batch: sequences.
        max_kv_len: longest sequence that will be run.
        rope: the rope table fp32 `[1, maxPos, rotary]`; None where the model has it baked in.
        record: keep every node's inputs and outputs.
        rng: shuffles the page ids, those of K and of V independently; None hands them out in order.
        fill: what the pools hold at first; NaN finds reads of stale state.
        threads: threads that onnxruntime may use.

    Raises:
        InputError: the model is not patched, has no reference body, or lacks a rope table.
        MissingPackageError: onnxruntime is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        *,
        batch: int,
        max_kv_len: int,
        rope: NDArray[np.float32] | None = None,
        record: bool = False,
        rng: np.random.Generator | None = None,
        fill: float = 0.0,
        threads: int = 1,
    ) -> None:
        folder = None if isinstance(model, onnx.ModelProto) else Path(model).parent
        proto = model if isinstance(model, onnx.ModelProto) else load_model(model).model
        self.nodes = qsa_nodes(proto)
        self.record = record
        self._fill = fill
        self._types = {v.name: v.type.tensor_type.elem_type for v in proto.graph.input}
        self._check(proto)
        self._weights = _node_weights(proto, self.nodes, folder)
        self._outputs = [v.name for v in proto.graph.output]
        pages = pages_for(max_kv_len)
        self.num_pages = batch * pages + 1  # one page belongs to no sequence
        self.max_kv_len = max_kv_len
        self._table = page_table(batch, pages, self.num_pages, rng=rng)
        self._rope = self._rope_feed(rope)
        self._session = open_session(_exposing(proto, self._recorded()) if record else proto, folder, threads)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences: empty pools, lengths 0."""
        self.lengths = np.zeros(self._table.shape[0], np.int32)
        self.pools = {
            node.inputs["past_key_value"]: empty_pool(
                node.geometry,
                self.num_pages,
                helper.tensor_dtype_to_np_dtype(self._types[node.inputs["past_key_value"]]),
                self._fill,
            )
            for node in self.nodes
        }

    def prefill(self, feeds: Mapping[str, Array], lengths: Sequence[int] | NDArray[Any]) -> Step:
        """Run padded prompts, one a sequence.

        Args:
            feeds: the model's own inputs, `[B, S, ...]`, padded on the right.
            lengths: live tokens of each sequence; 0 leaves it inactive.
        """
        self.lengths = np.asarray(lengths, np.int32)
        return self._run(feeds, np.zeros(0, np.int32))

    def decode(self, feeds: Mapping[str, Array], active: Sequence[bool] | NDArray[np.bool_] | None = None) -> Step:
        """Run one more token of each sequence.

        Args:
            feeds: the model's own inputs, `[B, 1, ...]`.
            active: which sequences go on; the others pass length 0 and keep their state. Default all.
        """
        past = self.lengths
        goes_on = np.ones(past.size, bool) if active is None else np.asarray(active, bool)
        self.lengths = np.where(goes_on, past + 1, 0).astype(np.int32)
        step = self._run(feeds, past)
        self.lengths = np.where(goes_on, past + 1, past).astype(np.int32)
        return step

    def _run(self, feeds: Mapping[str, Array], start: NDArray[np.int32]) -> Step:
        if self.lengths.max(initial=0) > self.max_kv_len:
            raise InputError("length", int(self.lengths.max()), f"at most max_kv_len {self.max_kv_len}", "raise it")
        own = {
            "context_lengths": self.lengths,
            "kvcache_start_index": start,
            "kv_page_table": blank_dead_entries(self._table, self.lengths),
        }
        shared = {self.nodes[0].inputs[name]: value for name, value in own.items()}
        fed = {**feeds, **self.pools, **shared, **self._rope}
        values = run_session(self._session, fed)
        known = {**self._weights, **fed, **values}
        calls = tuple(_call(node, known) for node in self.nodes) if self.record else ()
        for node in self.nodes:
            self.pools[node.inputs["past_key_value"]] = values[node.outputs["present_key_value"]]
        pools = {node.outputs["present_key_value"] for node in self.nodes}
        return Step({n: values[n] for n in self._outputs if n not in pools}, calls)

    def _recorded(self) -> list[str]:
        """The tensors of the nodes that the graph computes inside."""
        wanted = [t for node in self.nodes for t in (*node.inputs.values(), *node.outputs.values())]
        known = {*self._types, *self._weights, *self._outputs}
        return [t for t in dict.fromkeys(wanted) if t not in known]

    def _rope_feed(self, rope: NDArray[np.float32] | None) -> dict[str, Array]:
        name = self.nodes[0].inputs["rope_rotary_cos_sin"]
        if name in self._weights:
            return {}
        if rope is None:
            raise InputError("rope table", "nothing", f"fp32 [1, maxPos, rotary] for input {name}", "pass rope=")
        return {name: rope}

    def _check(self, proto: onnx.ModelProto) -> None:
        if not self.nodes:
            raise InputError("model", "no QsaAttention node", "a patched model", "run: qsa-trt patch-onnx MODEL")
        if not any(function.name in (PLUGIN_NAME, EDGE_LLM_NAME) for function in proto.functions):
            raise InputError("model", "no reference body", "one", "patch it without --no-reference-body")


def _call(node: QsaNode, known: Mapping[str, Array]) -> NodeCall:
    inputs = {name: known[tensor] for name, tensor in node.inputs.items()}
    return NodeCall(node, inputs, known[node.outputs["attn_output"]], known[node.outputs["present_key_value"]])


def _node_weights(proto: onnx.ModelProto, nodes: list[QsaNode], folder: Path | None) -> dict[str, Array]:
    wanted = {tensor for node in nodes for tensor in node.inputs.values()}
    return {t.name: numpy_helper.to_array(t, str(folder or "")) for t in proto.graph.initializer if t.name in wanted}


def _exposing(proto: onnx.ModelProto, tensors: list[str]) -> onnx.ModelProto:
    """A copy of the model with more tensors among its outputs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    exposed.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in tensors)
    return exposed


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
