"""A TensorRT engine with its pools bound in place: prefill and decode profiles, one execution context each.

Written against the Python API that TensorRT and TensorRT-RTX 1.7 share. It has not run on a GPU: the tests drive it
with an engine made of onnxruntime over memory of the host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qsa_plugin import clear_errors, first_error, flavour_name, flavour_version, register, tensorrt
from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import FailedError, InputError

from .. import device
from ..building.manifest import manifest_path
from ..tensorrt_log import failure, logger
from .engine_file import check_engine
from .layout import PoolLayout, load_manifest, names
from .pages import PageCopy
from .session import Array, Session, check_feeds, check_rope
from .transfers import copy_pages, upload

_STEP = ("context_lengths", "kvcache_start_index", "kv_page_table")
#: TensorRT's name of an element type to NumPy's.
_DTYPES = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "INT64": np.dtype(np.int64),
    "INT32": np.dtype(np.int32),
    "INT8": np.dtype(np.int8),
    "UINT8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class EngineSession(Session):
    """An engine of build-engine on device 0, with its pools and activations. It serves one thread.

    ENGINE.json is read first, and a mismatch of hash, flavour, version or GPU is found before anything of the engine
    is loaded. Engines hold code: deserialize only those you trust.

    Args:
        engine: the file that build-engine wrote, ENGINE.json beside it.
        rope: the rope table fp32 `[1, maxPos, rotary]`; None where the model has it baked in.
        rng: shuffles the page ids; None hands them out in order.
        cuda_graphs: capture decode once a batch size and replay it.
        flavour: the TensorRT package; None resolves it.

    Attributes:
        own_inputs: what callers feed, and its types.
        pools: every layer's pool by the name of its input.

    Raises:
        InputError: the files do not fit each other or this machine, pools are copied (`pool_io` 2), or the rope table
            is missing.
        MissingPackageError: TensorRT is not installed.
        FailedError: TensorRT cannot load the engine, or the plugin refuses it.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str],
        *,
        rope: NDArray[np.float32] | None = None,
        rng: np.random.Generator | None = None,
        cuda_graphs: bool = False,
        flavour: str | None = None,
    ) -> None:
        path = Path(engine)
        manifest = load_manifest(manifest_path(path))
        name = flavour_name(flavour)
        check_engine(
            path, manifest, flavour=name, version=flavour_version(name), capability=device.compute_capability()
        )
        super().__init__(PoolLayout.of_manifest(manifest), rng)
        if any(layer.geometry.pool_io == PoolIO.COPY for layer in self.layout.layers):
            raise InputError("pool_io", "copy", "in place or alias", "patch with --pool-io in-place, and build again")
        self._trt = tensorrt(name)
        register(name)
        device.activate()
        self._stream = device.Stream()
        self._engine = self._deserialize(path)
        self._profiles = [profile["name"] for profile in manifest["profiles"]]
        self._contexts = {profile: self._context(index) for index, profile in enumerate(self._profiles)}
        self._sort_tensors(manifest["rope"])
        self._bind_constants(rope)
        self._outputs: dict[str, device.Buffer] = {}
        self._cuda_graphs = cuda_graphs
        self._graphs: dict[int, device.Graph] = {}

    def _deserialize(self, path: Path) -> Any:
        clear_errors()
        log = logger(self._trt)
        log.restart(verbose=False)
        self._runtime = self._trt.Runtime(log)
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise failure(f"{path} cannot be deserialized", log)
        return engine

    def _context(self, profile: int) -> Any:
        context = self._engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(profile, self._stream.handle):
            raise failure(f"no execution context for profile {self._profiles[profile]}", logger(self._trt))
        self._stream.synchronize()
        return context

    def _sort_tensors(self, rope: Mapping[str, Any]) -> None:
        """Which tensors are whose, and a buffer of the largest shape for every input but the pools."""
        engine = self._engine
        pools = names(self.layout.layers)
        tensors = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in tensors if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT]
        self._results = [name for name in tensors if name not in {*inputs, *pools}]
        self._rope = rope["tensor"] if rope["source"] == "input" else None
        self._dtypes = {name: _DTYPES[engine.get_tensor_dtype(name).name] for name in tensors}
        self.own_inputs = {name: self._dtypes[name] for name in inputs if name not in {*pools, *_STEP, self._rope}}
        self._inputs = {
            name: device.Buffer(self._largest(name) * self._dtypes[name].itemsize)
            for name in inputs
            if name not in pools
        }
        self.pools = {
            layer.past: device.Buffer(math.prod(layer.shape(self.layout.num_pages)) * self.layout.dtype.itemsize)
            for layer in self.layout.layers
        }

    def _largest(self, name: str) -> int:
        """Elements of an input at the maximum of all profiles."""
        profiles = range(len(self._profiles))
        largest = [self._engine.get_tensor_profile_shape(name, profile)[2] for profile in profiles]
        return max(math.prod(int(d) for d in shape) for shape in largest)

    def _bind_constants(self, rope: NDArray[np.float32] | None) -> None:
        """Addresses that never change: the inputs', and one for both ends of every pool; and the rope table."""
        table = None if self._rope is None else check_rope(rope, self._rope, self.layout.max_kv_len)
        for context in self._contexts.values():
            for name, buffer in self._inputs.items():
                self._bind(context, name, buffer)
            for layer in self.layout.layers:
                for tensor in (layer.past, layer.present):
                    self._bind(context, tensor, self.pools[layer.past])
                self._set_shape(context, layer.past, layer.shape(self.layout.num_pages))
            if self._rope is not None and table is not None:
                self._set_shape(context, self._rope, table.shape)
        if self._rope is not None and table is not None:
            upload(self._inputs[self._rope], table, self._stream)

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for pool in self.pools.values():
            copy_pages(pool, self.layout.num_pages, copies, self._stream)

    def _run(self, feeds: Mapping[str, Array], step: Mapping[str, Array]) -> dict[str, Array]:
        batch = step["context_lengths"].size
        check_feeds(feeds, self.own_inputs, batch)
        decodes = step["kvcache_start_index"].size > 0
        context = self._contexts.get("decode" if decodes else "prefill") or self._contexts["all"]
        for name, array in {**feeds, **step}.items():
            self._set_shape(context, name, array.shape)
            upload(self._inputs[name], array, self._stream)
        shapes = self._place_results(context)
        self._execute(context, batch if decodes else None)
        self._stream.synchronize()
        return {name: self._outputs[name].read(shape, self._dtypes[name]) for name, shape in shapes.items()}

    def _set_shape(self, context: Any, name: str, shape: Sequence[int]) -> None:
        if not context.set_input_shape(name, tuple(shape)):
            raise InputError(f"input {name}", f"shape {list(shape)}", "one of the engine's profile", "see ENGINE.json")

    def _place_results(self, context: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs; a buffer that is too small is replaced, which graphs do not survive."""
        try:
            unknown = context.infer_shapes()
        except RuntimeError as error:
            raise failure("the input shapes do not fit each other", logger(self._trt)) from error
        if unknown:
            raise FailedError(f"TensorRT still needs the shapes of {', '.join(unknown)}")
        shapes = {name: tuple(context.get_tensor_shape(name)) for name in self._results}
        for name, shape in shapes.items():
            nbytes = math.prod(shape) * self._dtypes[name].itemsize
            if name not in self._outputs or self._outputs[name].nbytes < nbytes:
                self._outputs[name] = device.Buffer(nbytes)
                self._graphs.clear()
            self._bind(context, name, self._outputs[name])
        return shapes

    def _bind(self, context: Any, name: str, buffer: device.Buffer) -> None:
        if not context.set_tensor_address(name, buffer.address):
            raise failure(f"the engine takes no address for {name}", logger(self._trt))

    def _execute(self, context: Any, graph: int | None) -> None:
        """One call on the stream; `graph` names the batch whose graph may be replayed in its place."""
        if graph in self._graphs:
            self._graphs[graph].launch()
            return
        self._enqueue(context)
        if self._cuda_graphs and graph is not None:  # TensorRT wants one call of these shapes before a capture
            self._stream.synchronize()
            self._graphs[graph] = self._stream.capture(lambda: self._enqueue(context))

    def _enqueue(self, context: Any) -> None:
        clear_errors()
        logger(self._trt).restart(verbose=False)
        if not context.execute_async_v3(self._stream.handle) or first_error() is not None:
            raise failure("the engine failed", logger(self._trt))
