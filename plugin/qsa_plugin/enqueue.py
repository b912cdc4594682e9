"""From one call's addresses to the kernels: picks the runner of the mode, and copies the pool where `pool_io` says so.

`NodeKernels` belongs to one plugin in one execution context. `prepare` compiles and loads; after it, `enqueue` only
launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from .contract import INPUT_INDEX, INPUTS, OUTPUT_INDEX, PAGE_SIZE, Call, Geometry, Mode, PoolIO
from .decode_runner import DecodeParams, QsaSparseDecodeRunner
from .errors import FailedError
from .prefill_runner import PrefillParams, QsaSparsePrefillRunner
from .specialisation import Specialisation, arch_of

_POOL_IN, _POOL_OUT = INPUT_INDEX["past_key_value"], OUTPUT_INDEX["present_key_value"]
_ATTENTION_OUT = OUTPUT_INDEX["attn_output"]
#: The inputs whose addresses the kernels take, in the order of the fields of their parameters.
_addresses_of = itemgetter(*(INPUT_INDEX[tensor.name] for tensor in INPUTS if tensor.name != "kvcache_start_index"))
_SURFACE_BYTES = 2

Runner = QsaSparseDecodeRunner | QsaSparsePrefillRunner


class NodeKernels:
    """The runners of one node, made and loaded together.

    Args:
        geometry: the node's attributes.
        surface: "float16" or "bfloat16".
        portable: use nothing that only newer compute capabilities have.
    """

    def __init__(self, geometry: Geometry, surface: str, *, portable: bool = False) -> None:
        self.surface = surface
        self._geometry = geometry
        self._portable = portable
        self._runners: dict[int, Mapping[Mode, Runner]] = {}  # by rotary dims

    def prepare(self, rotary_dims: int) -> Mapping[Mode, Runner]:
        """The loaded runners of both modes, so that no later call has to load anything; safe inside a capture.

        Raises:
            RefusedError: the kernels support neither this node nor this device, with the reason.
            FailedError: the kernels do not compile or load, or there is no device.
        """
        if rotary_dims not in self._runners:
            spec = Specialisation.of(self._geometry, self.surface, rotary_dims, arch_of(_compute_capability()))
            runners: Mapping[Mode, Runner] = {
                Mode.DECODE: QsaSparseDecodeRunner(spec, self._geometry, portable=self._portable),
                Mode.PREFILL: QsaSparsePrefillRunner(spec, self._geometry, self._portable),
            }
            with _loading_allowed():
                for runner in runners.values():
                    runner.preflight()
            self._runners[rotary_dims] = runners
        return self._runners[rotary_dims]

    def enqueue(self, call: Call, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int) -> None:
        """Launch a call that `check_call` has accepted.

        Args:
            call: its sizes.
            inputs: device addresses in the order of `contract.INPUTS`.
            outputs: device addresses in the order of `contract.OUTPUTS`; the pool's is that of the input pool unless
                `pool_io` is copy.
            workspace: device address at a multiple of 256, of `workspace.layout(geometry, call).size` bytes.
            stream: raw CUstream handle.

        Raises:
            RefusedError, FailedError: as `prepare`, if it was not called before.
            FailedError: the driver refused the copy or a launch.
        """
        runner = self.prepare(call.rotary_dims)[call.mode]
        if self._geometry.pool_io == PoolIO.COPY:
            pool = outputs[_POOL_OUT]
            _copy(pool, inputs[_POOL_IN], pool_bytes(self._geometry, call), stream)
            inputs = [pool if index == _POOL_IN else address for index, address in enumerate(inputs)]
        values = [call, *_addresses_of(inputs), outputs[_ATTENTION_OUT], workspace, stream]
        if isinstance(runner, QsaSparseDecodeRunner):
            runner.run(DecodeParams._make(values))
        else:
            runner.run(PrefillParams._make(values))


def pool_bytes(geometry: Geometry, call: Call) -> int:
    """Bytes of the whole pool."""
    return math.prod((2, call.num_pages, PAGE_SIZE, geometry.num_kv_heads, geometry.pool_width)) * _SURFACE_BYTES


def _compute_capability() -> tuple[int, int]:
    """Of the device of the current context."""
    from cuda.core import Device

    try:
        capability: Any = Device().compute_capability
    except Exception as error:
        raise FailedError(f"no CUDA device: {error}") from error
    return int(capability[0]), int(capability[1])


def _copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Device to device, on the stream."""
    from cuda.bindings import driver

    (status,) = driver.cuMemcpyDtoDAsync(target, source, nbytes, stream)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise FailedError(f"the pool could not be copied: {status.name}")


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Let this thread load modules while one of its streams is being captured; loading enqueues nothing on it."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    status, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        if status == driver.CUresult.CUDA_SUCCESS:
            driver.cuThreadExchangeStreamCaptureMode(before)
