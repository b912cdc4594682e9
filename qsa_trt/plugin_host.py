"""Drives the plugin on a GPU as TensorRT does: its calls, in its order, with its own descriptor classes.

TensorRT hides a plugin behind an engine. Here every step is in the open: creator, build plugin, formats, configure,
workspace, serialised fields, runtime plugin, attach_to_context, on_shape_change, enqueue. Outputs and workspace are
poisoned before a run, and canaries lie around every buffer. It needs cuda-python and any of the TensorRT flavours, of
which the lean runtime (`pip install 'qsa-trt[lean]'`) is the smallest; none of them has to support the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qsa_plugin import register, tensorrt
from qsa_plugin.contract import INPUTS, OUTPUTS, PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, DType, Geometry, PoolIO
from qsa_plugin.errors import InputError, RefusedError

from . import device

Array = NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]

TENSORS = INPUTS + OUTPUTS
#: Surface name to its NumPy dtype and the name of TensorRT's.
SURFACES = {"float16": (np.dtype(np.float16), "HALF"), "bfloat16": (np.dtype(ml_dtypes.bfloat16), "BF16")}


def shapes_of(inputs: Mapping[str, Array], geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Shapes of all inputs and outputs of one call, by contract name.

    Args:
        inputs: the eleven inputs.
        geometry: the node's attributes.
    """
    shapes = {tensor.name: tuple(inputs[tensor.name].shape) for tensor in INPUTS}
    outputs = {
        "attn_output": (*shapes["qkv"][:2], geometry.num_q_heads, geometry.head_size),
        "present_key_value": shapes["past_key_value"],
    }
    return shapes | outputs


def tensor_type(trt: Any, name: str, surface: str) -> Any:
    """TensorRT's type of the contract tensor `name`, in a node of one surface."""
    dtype = next(tensor.dtype for tensor in TENSORS if tensor.name == name)
    fixed = {DType.INT32: "INT32", DType.FP32: "FLOAT"}
    return getattr(trt.DataType, fixed[dtype] if dtype in fixed else SURFACES[surface][1])


def runtime_descs(trt: Any, shapes: Mapping[str, Sequence[int]], surface: str) -> tuple[list[Any], list[Any]]:
    """(input, output) `PluginTensorDesc`s as on_shape_change and enqueue get them."""
    descs = []
    for tensor in TENSORS:
        desc = trt.PluginTensorDesc()
        desc.dims = trt.Dims(list(shapes[tensor.name]))
        desc.type = tensor_type(trt, tensor.name, surface)
        descs.append(desc)
    return descs[: len(INPUTS)], descs[len(INPUTS) :]


def profile_descs(
    trt: Any, smallest: Mapping[str, Sequence[int]], largest: Mapping[str, Sequence[int]], surface: str
) -> tuple[list[Any], list[Any]]:
    """(input, output) `DynamicPluginTensorDesc`s of a profile, as configure and get_workspace_size get them."""
    descs = []
    for tensor in TENSORS:
        low, high = list(smallest[tensor.name]), list(largest[tensor.name])
        dynamic = trt.DynamicPluginTensorDesc()
        dynamic.min, dynamic.opt, dynamic.max = trt.Dims(low), trt.Dims(low), trt.Dims(high)
        dynamic.desc.dims = trt.Dims([a if a == b else -1 for a, b in zip(low, high, strict=True)])
        dynamic.desc.type = tensor_type(trt, tensor.name, surface)
        descs.append(dynamic)
    return descs[: len(INPUTS)], descs[len(INPUTS) :]


def field_collection(trt: Any, values: Mapping[str, int | float]) -> tuple[Any, ...]:
    """(collection, what it points to): keep the tuple as long as the collection."""
    arrays = [np.array([v], np.float32 if isinstance(v, float) else np.int32) for v in values.values()]
    kinds = trt.PluginFieldType
    fields = [
        trt.PluginField(name, array, kinds.FLOAT32 if array.dtype == np.float32 else kinds.INT32)
        for name, array in zip(values, arrays, strict=True)
    ]
    return trt.PluginFieldCollection(fields), fields, arrays


def field_values(collection: Any) -> dict[str, int | float]:
    """Name to value of every field."""
    return {field.name: field.data[0].item() for field in collection}


@dataclass(frozen=True)
class NodeOutputs:
    """What a call left: `attn_output` surface `[B, S, Hq, D]` and the pool, surface `[2, N, P, Hkv, D+Id]`."""

    attn_output: Array
    present_key_value: Array


class PluginHost:
    """One QsaAttention node as an engine holds it: built and serialised.

    Args:
        geometry: the node's attributes.
        surface: "float16" or "bfloat16".
        largest: shapes of all inputs and outputs at the profile's maximum (`shapes_of`).
        smallest: the same at the profile's minimum; default the maximum.
        name: the creator's.

    Attributes:
        workspace_size: bytes that the plugin asked for.

    Raises:
        MissingPackageError, InputError: as `qsa_plugin.tensorrt`.
        ContractError, RefusedError: the plugin refuses the node or its sizes.
    """

    def __init__(
        self,
        geometry: Geometry,
        surface: str,
        largest: Shapes,
        *,
        smallest: Shapes | None = None,
        name: str = PLUGIN_NAME,
    ) -> None:
        register()
        self._trt = trt = tensorrt()
        self.geometry, self.surface, self.largest = geometry, surface, dict(largest)
        self._creator = trt.get_plugin_registry().get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE)
        attributes = field_collection(trt, geometry.to_attributes())
        plugin = self._creator.create_plugin(name, attributes[0], trt.TensorRTPhase.BUILD)
        inputs, outputs = profile_descs(trt, smallest or largest, largest, surface)
        for position in range(len(TENSORS)):
            if not plugin.supports_format_combination(position, [*inputs, *outputs], len(INPUTS)):
                raise RefusedError(f"the plugin refuses the type of {TENSORS[position].name}")
        plugin.configure_plugin(inputs, outputs)
        self.workspace_size: int = plugin.get_workspace_size(inputs, outputs)
        self._serialized = field_values(plugin.get_fields_to_serialize())

    def context(self) -> PluginContext:
        """A new execution context on the current device; device 0 becomes current where none is."""
        trt = self._trt
        fields = field_collection(trt, self._serialized)
        plugin = self._creator.create_plugin("", fields[0], trt.TensorRTPhase.RUNTIME)
        return PluginContext(self, trt, plugin.attach_to_context(None))


class PluginContext:
    """One execution context: a runtime plugin, its device buffers, and a stream. It serves one thread at a time.

    A thread other than the one that made it calls `device.activate()` first.

    Attributes:
        host: the node it was made from.
        plugin: the attached plugin.
        stream: what `enqueue` uses by default.
        buffers: every input and output by contract name, and `workspace`. Both pools are one buffer, except where
            `pool_io` is copy.
    """

    def __init__(self, host: PluginHost, trt: Any, plugin: Any) -> None:
        device.activate()
        self.host, self._trt = host, trt
        self.plugin = plugin
        self.stream = device.Stream()
        self.buffers: dict[str, device.Buffer] = {"workspace": device.Buffer(host.workspace_size)}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._descs: tuple[list[Any], list[Any]] = ([], [])

    def bind(self, inputs: Mapping[str, Array]) -> None:
        """Upload inputs and announce their shapes. A tensor that is not given stays as it is, the pool for one.

        Buffers of unchanged size keep their addresses.

        Raises:
            InputError: a shape is larger than the profile's.
        """
        shapes = self.shapes | {name: tuple(array.shape) for name, array in inputs.items()}
        geometry = self.host.geometry
        shapes["attn_output"] = (*shapes["qkv"][:2], geometry.num_q_heads, geometry.head_size)
        shapes["present_key_value"] = shapes["past_key_value"]
        self._check(shapes)
        self.shapes = shapes
        for tensor in TENSORS:
            self._place(tensor.name)
        for name, array in inputs.items():
            self.buffers[name].write(array)
        self._descs = runtime_descs(self._trt, shapes, self.host.surface)
        self.plugin.on_shape_change(*self._descs)

    def enqueue(self, stream: int | None = None) -> None:
        """Enqueue one call on a raw stream handle; does not wait.

        Raises:
            ContractError: the contract forbids the bound shapes; nothing was launched.
            RefusedError, FailedError: as the plugin's enqueue.
        """
        addresses = [self.buffers[tensor.name].address for tensor in TENSORS]
        inputs, outputs = addresses[: len(INPUTS)], addresses[len(INPUTS) :]
        handle = self.stream.handle if stream is None else stream
        self.plugin.enqueue(*self._descs, inputs, outputs, self.buffers["workspace"].address, handle)

    def capture(self) -> device.Graph:
        """One call as a CUDA graph on the context's stream."""
        return self.stream.capture(self.enqueue)

    def poison(self) -> None:
        """Fill attention output and workspace with NaN, and wait; a pool output of its own too."""
        for name in ("attn_output", "workspace", "present_key_value"):
            if name != "present_key_value" or self.host.geometry.pool_io == PoolIO.COPY:
                self.buffers[name].poison()
        device.synchronize()

    def read(self) -> NodeOutputs:
        """Wait for the context's stream and copy both outputs back.

        Raises:
            RuntimeError: a kernel failed, or something wrote outside a buffer.
        """
        self.stream.synchronize()
        for name, buffer in self.buffers.items():
            if not buffer.intact():
                raise RuntimeError(f"something wrote outside {name}")
        dtype = SURFACES[self.host.surface][0]
        return NodeOutputs(*(self.buffers[tensor.name].read(self.shapes[tensor.name], dtype) for tensor in OUTPUTS))

    def run(self, inputs: Mapping[str, Array]) -> NodeOutputs:
        """Bind, poison, enqueue, read."""
        self.bind(inputs)
        self.poison()
        self.enqueue()
        return self.read()

    def _place(self, name: str) -> None:
        """A buffer of the bound size."""
        if name == "present_key_value" and self.host.geometry.pool_io != PoolIO.COPY:
            self.buffers[name] = self.buffers["past_key_value"]
            return
        itemsize = tensor_itemsize(name)
        nbytes = int(np.prod(self.shapes[name], dtype=np.int64)) * itemsize
        if name not in self.buffers or self.buffers[name].nbytes != nbytes:
            self.buffers[name] = device.Buffer(nbytes)

    def _check(self, shapes: Shapes) -> None:
        for name, largest in self.host.largest.items():
            got = shapes[name]
            if len(got) == len(largest) and any(size > limit for size, limit in zip(got, largest, strict=True)):
                raise InputError(
                    name, list(got), f"at most {list(largest)}, the profile's", "make a host for larger shapes"
                )


def tensor_itemsize(name: str) -> int:
    """Bytes an element of the contract tensor `name`."""
    dtype = next(tensor.dtype for tensor in TENSORS if tensor.name == name)
    return 2 if dtype is DType.SURFACE else 4
