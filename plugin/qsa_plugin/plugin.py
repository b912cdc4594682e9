"""The TensorRT plugin: one `IPluginV3` with core, build (V2) and runtime capabilities.

`Callbacks` holds the behaviour and knows TensorRT only as the module in `self.trt`; `plugin_class` joins it with the
base classes of the flavour in use.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import numpy as np

from .callbacks import callback
from .contract import (
    INPUT_INDEX,
    INPUTS,
    OUTPUT_INDEX,
    OUTPUTS,
    PAGE_SIZE,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    Call,
    DType,
    Geometry,
    PoolIO,
    check_call,
    resolve_dims,
)
from .enqueue import NodeKernels
from .errors import ContractError, QsaError, RefusedError
from .kernel_limits import kernel_refusals
from .workspace import ALIGNMENT, reported_size

#: Version of the serialised fields. An engine that carries a newer one is refused.
FORMAT_VERSION = 1
FORMAT_FIELD = "format_version"

_QKV = INPUT_INDEX["qkv"]
_POOL_IN = INPUT_INDEX["past_key_value"]
_ROPE = INPUT_INDEX["rope_rotary_cos_sin"]
_START = INPUT_INDEX["kvcache_start_index"]
_POOL_OUT = OUTPUT_INDEX["present_key_value"]

Shapes = dict[str, tuple[int, ...]]


class Callbacks:
    """What TensorRT calls, in the order of a plugin's life."""

    trt: ClassVar[Any]

    def __init__(self, name: str, layer_name: str, geometry: Geometry) -> None:
        self.layer_name = layer_name
        self.geometry = geometry
        self.plugin_name = name
        self.plugin_version = PLUGIN_VERSION
        self.plugin_namespace = PLUGIN_NAMESPACE
        self.num_outputs = len(OUTPUTS)
        self.timing_cache_id = self.metadata_string = _describe(geometry)
        self._checked: tuple[tuple[int, int, int], Call, NodeKernels] | None = None
        self._kernels: NodeKernels | None = None

    @callback
    def get_capability_interface(self, kind: Any) -> Any:
        """One object offers all three capabilities."""
        return self

    @callback
    def clone(self) -> Any:
        """A new plugin with every attribute of this one.

        It is never freed: when a build of several plugin layers fails, TensorRT's bindings first drop their reference
        to a clone and then delete it, and a clone that had no other reference is then freed twice.
        """
        clone = self._copy()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(clone))
        return clone

    def _copy(self) -> Any:
        return type(self)(self.plugin_name, self.layer_name, self.geometry)

    # --- build ---

    @callback
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        """Both outputs have the surface dtype.

        Raises:
            ContractError: `qkv` is neither fp16 nor bf16.
        """
        return [self._surface(input_types[_QKV])] * len(OUTPUTS)

    @callback
    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        """`attn_output` [B, S, Hq, D] from `qkv`, and the pool's own shape."""
        attention = self.trt.DimsExprs(4)
        attention[0], attention[1] = inputs[_QKV][0], inputs[_QKV][1]
        attention[2] = builder.constant(self.geometry.num_q_heads)
        attention[3] = builder.constant(self.geometry.head_size)
        return [attention, self.trt.DimsExprs(inputs[_POOL_IN])]

    @callback
    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """Linear layouts only, and one surface dtype for the whole node; reads types up to `pos` and no dims."""
        desc = in_out[pos].desc
        dtype = (INPUTS + OUTPUTS)[pos].dtype
        if not self._is_linear(desc):
            return False
        if dtype is DType.SURFACE:
            surface = in_out[_QKV].desc.type
            return surface in self._surfaces() and desc.type == surface
        return bool(desc.type == self._fixed_type(dtype))

    @callback
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check the sizes at the profile's maximum, where -1 stands for a size that is not known.

        Raises:
            ContractError: pool, page table, rope table or batch sizes do not fit the node or each other.
            RefusedError: the CUDA kernels do not support this node.
        """
        largest = self._largest_call(inputs)
        known_rotary = largest.rotary_dims if inputs[_ROPE].max[2] >= 0 else None
        refusals = kernel_refusals(self.geometry, self._dtype_name(inputs[_QKV].desc.type), known_rotary)
        if refusals:
            raise RefusedError("; ".join(refusals))

    @callback
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Bytes for the profile's maximum and every smaller shape, in both modes.

        Raises:
            ContractError: the maximum of some size is not known, so that no number of bytes would be enough.
        """
        for tensor, desc in zip(INPUTS, inputs, strict=True):
            if any(size < 0 for size in desc.max):
                raise ContractError(tensor.name, list(desc.max), "a known maximum", "add an optimization profile")
        return reported_size(self.geometry, self._largest_call(inputs))

    @callback
    def get_aliased_input(self, output_index: int) -> int:
        """The pool, when `pool_io` is alias; else no alias (-1)."""
        alias = output_index == _POOL_OUT and self.geometry.pool_io == PoolIO.ALIAS
        return _POOL_IN if alias else -1

    # --- runtime ---

    @callback
    def set_tactic(self, tactic: int) -> None:
        """There is one way to compute; TensorRT insists on this method when I/O is aliased."""

    @callback
    def get_fields_to_serialize(self) -> Any:
        """All attributes and the format version."""
        return serialize_fields(self.trt, self.geometry)[0]

    @callback
    def attach_to_context(self, context: Any) -> Any:
        """Every execution context works with a plugin of its own."""
        return self._copy()

    @callback
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Validate the new shapes and load the kernels of both modes, so that enqueue only launches.

        What is wrong is left for enqueue to report: TensorRT may show a profile's maximum here, which in a profile of
        both modes is no legal call, and a machine that only builds engines needs no device that can run them.
        """
        self._checked = None
        with suppress(QsaError):
            call, kernels = self._call(inputs, outputs)
            kernels.prepare(call.rotary_dims)

    @callback
    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Validate the call, then launch it on `stream`.

        Raises:
            ContractError: a shape, dtype or address that the contract forbids; nothing was launched.
            RefusedError: the kernels do not support this device.
            FailedError: there is no device, the kernels do not compile or load, or the driver refused a launch.
        """
        call, kernels = self._call(input_desc, output_desc)
        self._check_addresses(inputs, outputs, workspace)
        kernels.enqueue(call, inputs, outputs, workspace, stream)

    def _kernels_for(self, inputs: Sequence[Any]) -> NodeKernels:
        surface = self._dtype_name(inputs[_QKV].type)
        if self._kernels is None or self._kernels.surface != surface:
            self._kernels = NodeKernels(self.geometry, surface)
        return self._kernels

    def _call(self, input_desc: Sequence[Any], output_desc: Sequence[Any]) -> tuple[Call, NodeKernels]:
        """The sizes of this call and what launches it, validated once for as long as the sizes stay the same.

        A decode step must be cheap. TensorRT announces every change of shapes; a look at B, S and the mode guards
        against one missed, where comparing all dims would cost more than the launches.
        """
        if self._checked is None or self._checked[0] != _leading_sizes(input_desc):
            call = self._check([*input_desc, *output_desc])
            self._checked = (_leading_sizes(input_desc), call, self._kernels_for(input_desc))
        return self._checked[1:]

    def _check(self, descs: Sequence[Any]) -> Call:
        tensors = INPUTS + OUTPUTS
        shapes = {tensor.name: tuple(desc.dims) for tensor, desc in zip(tensors, descs, strict=True)}
        call = check_call(self.geometry, shapes)
        _check_outputs(self.geometry, call, shapes)
        surface = self._surface(descs[_QKV].type)
        for tensor, desc in zip(tensors, descs, strict=True):
            expected = surface if tensor.dtype is DType.SURFACE else self._fixed_type(tensor.dtype)
            if desc.type != expected:
                raise ContractError(tensor.name, desc.type.name, expected.name, "bind a tensor of that type")
            if not self._is_linear(desc):
                raise ContractError(tensor.name, desc.format.name, "format LINEAR", "bind a linear tensor")
        return call

    def _check_addresses(self, inputs: Sequence[int], outputs: Sequence[int], workspace: int) -> None:
        past, present = inputs[_POOL_IN], outputs[_POOL_OUT]
        copy = self.geometry.pool_io == PoolIO.COPY
        if copy and past == present:
            raise ContractError(
                "present_key_value",
                f"address {present:#x}, that of past_key_value",
                "an address of its own (pool_io copy)",
                "bind another buffer, or patch the model with --pool-io in-place",
            )
        if not copy and past != present:
            raise ContractError(
                "present_key_value",
                f"address {present:#x}",
                f"{past:#x}, the address of past_key_value (pool_io {PoolIO(self.geometry.pool_io).option})",
                "bind the same buffer to both, or patch the model with --pool-io copy",
            )
        if workspace % ALIGNMENT:
            raise ContractError(
                "workspace", f"address {workspace:#x}", f"a multiple of {ALIGNMENT}", "align the workspace"
            )

    # --- types ---

    def _surfaces(self) -> tuple[Any, Any]:
        return self.trt.DataType.HALF, self.trt.DataType.BF16

    def _surface(self, dtype: Any) -> Any:
        """`dtype`, if the plugin can compute in it."""
        if dtype not in self._surfaces():
            raise ContractError("qkv", dtype.name, "HALF or BF16", "patch the model with an fp16 or bf16 surface")
        return dtype

    def _dtype_name(self, dtype: Any) -> str:
        return {self.trt.DataType.HALF: "float16", self.trt.DataType.BF16: "bfloat16"}.get(dtype, str(dtype.name))

    def _fixed_type(self, dtype: DType) -> Any:
        return self.trt.DataType.INT32 if dtype is DType.INT32 else self.trt.DataType.FLOAT

    def _is_linear(self, desc: Any) -> bool:
        """The lean runtime has no `TensorFormat`; it runs engines whose formats were negotiated before."""
        formats = getattr(self.trt, "TensorFormat", None)
        return formats is None or desc.format == formats.LINEAR

    def _largest_call(self, inputs: Sequence[Any]) -> Call:
        """The sizes at the profile's maximum, as of a prefill, whose sizes bound those of every call."""
        shapes = {tensor.name: tuple(desc.max) for tensor, desc in zip(INPUTS, inputs, strict=True)}
        batch, start = shapes["qkv"][0], shapes["kvcache_start_index"]
        if len(start) == 1 and batch >= 0 and start[0] > batch:
            raise ContractError("kvcache_start_index", list(start), f"at most [{batch}]", "correct the profile")
        shapes["kvcache_start_index"] = (0,) * len(start)
        return check_call(self.geometry, _fill_unknown(self.geometry, shapes))


@cache
def plugin_class(trt: Any) -> type[Callbacks]:
    """The plugin class on the base classes of one TensorRT module."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    # Callbacks comes first: the bindings look a callback up along the MRO, and their own bases define each of them.
    class QsaAttentionPlugin(Callbacks, *bases):  # type: ignore[misc]  # the bases are known at run time only
        def __init__(self, name: str, layer_name: str, geometry: Geometry) -> None:
            for base in bases:
                base.__init__(self)
            super().__init__(name, layer_name, geometry)

    QsaAttentionPlugin.trt = trt
    return QsaAttentionPlugin


def _leading_sizes(inputs: Sequence[Any]) -> tuple[int, int, int]:
    """B, S, and the length of `kvcache_start_index`."""
    qkv, start = inputs[_QKV].dims, inputs[_START].dims
    return qkv[0], qkv[1], start[0]


@cache
def serialize_fields(trt: Any, geometry: Geometry) -> tuple[Any, ...]:
    """(field collection, what it points to), kept for good: TensorRT holds raw pointers and outlives plugins."""
    values: dict[str, int | float] = {FORMAT_FIELD: FORMAT_VERSION, **geometry.to_attributes()}
    arrays = [np.array([v], dtype=np.float32 if isinstance(v, float) else np.int32) for v in values.values()]
    types = trt.PluginFieldType
    fields = [
        trt.PluginField(name, array, types.FLOAT32 if array.dtype == np.float32 else types.INT32)
        for name, array in zip(values, arrays, strict=True)
    ]
    return trt.PluginFieldCollection(fields), fields, arrays


def _describe(geometry: Geometry) -> str:
    """The attributes as one line; equal lines mean plugins whose timings and engines are interchangeable."""
    return ";".join(f"{name}={value}" for name, value in geometry.to_attributes().items())


def _check_outputs(geometry: Geometry, call: Call, shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = {
        "attn_output": (call.batch, call.seq_len, geometry.num_q_heads, geometry.head_size),
        "present_key_value": shapes["past_key_value"],
    }
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ContractError(name, list(shapes[name]), f"shape {list(shape)}", "bind a tensor of that shape")


def _fill_unknown(geometry: Geometry, shapes: Shapes) -> Shapes:
    """Replace -1 by what the contract or another tensor says, else by the smallest size that fits."""
    known: dict[str, int] = {}
    for tensor in INPUTS:
        for dim, size in zip(tensor.dims, shapes[tensor.name], strict=False):
            if isinstance(dim, str) and size >= 0:
                known.setdefault(dim, size)
    smallest = {"B": 1, "S": 1, "N": 1, "rotary": 2, "maxPos": known.get("S", 1)}
    smallest["M"] = math.ceil(known.get("S", 1) / PAGE_SIZE)
    filled: Shapes = {}
    for tensor in INPUTS:
        legal = resolve_dims(tensor.dims, geometry)
        filled[tensor.name] = tuple(
            size if size >= 0 or axis >= len(legal) else _size_of(legal[axis], known, smallest)
            for axis, size in enumerate(shapes[tensor.name])
        )
    return filled


def _size_of(dim: int | str, known: Mapping[str, int], smallest: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else known.get(dim, smallest.get(dim, 0))
