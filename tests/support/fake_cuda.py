"""The CUDA driver over memory of the host, as far as `qsa_trt.device` and the runtime use it.

What is enqueued runs when its stream is synchronised and no earlier; fills and uploads from pageable memory when the
default stream (0) or the whole device is: the latest moments that CUDA allows. What forgets to wait reads stale bytes.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsa_trt import device

Work = Callable[[], None]


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0


class FakeDriver:
    """Stands in for `cuda.bindings.driver`."""

    CUresult = Status
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.queue: list[Work] = []
        self.unordered: list[Work] = []
        self.captured: list[Work] | None = None
        self.launches = 0

    def enqueue(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        block = np.empty(nbytes + 256, np.uint8)
        address = -(-block.ctypes.data // 256) * 256
        self.memory[address] = block
        return Status.CUDA_SUCCESS, address

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        del self.memory[address]
        return (Status.CUDA_SUCCESS,)

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> tuple[Any, ...]:
        self.unordered.append(lambda: ctypes.memset(address, value, nbytes) and None)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        staged = ctypes.string_at(source, nbytes)
        self.unordered.append(lambda: ctypes.memmove(target, staged, nbytes) and None)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        self._settle()
        ctypes.memmove(target, source, nbytes)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        staged = ctypes.string_at(source, nbytes)
        self.enqueue(lambda: ctypes.memmove(target, staged, nbytes) and None)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        self.enqueue(lambda: ctypes.memmove(target, source, nbytes) and None)
        return (Status.CUDA_SUCCESS,)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, 7

    def _settle(self) -> None:
        work, self.unordered = self.unordered, []
        for item in work:
            item()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        if stream == 0:
            self._settle()
            return (Status.CUDA_SUCCESS,)
        work, self.queue = self.queue, []
        for item in work:
            item()
        return (Status.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self._settle()
        return self.cuStreamSynchronize(7)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        self.captured = []
        return (Status.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        graph, self.captured = self.captured, None
        return Status.CUDA_SUCCESS, graph

    def cuGraphGetNodes(self, graph: list[Work], count: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, None, len(graph)

    def cuGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, graph

    def cuGraphLaunch(self, graph: list[Work], stream: int) -> tuple[Any, ...]:
        self.launches += 1
        self.queue.extend(graph)
        return (Status.CUDA_SUCCESS,)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """`qsa_trt.device` works on it, and takes it for a GPU of compute capability 8.6."""
    import cuda.bindings.driver  # noqa: F401  # so that the name below is there to be replaced

    driver = FakeDriver()
    monkeypatch.setattr("cuda.bindings.driver", driver)
    monkeypatch.setattr(device, "activate", lambda: None)
    monkeypatch.setattr(device, "compute_capability", lambda: (8, 6))
    return driver


def read(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A copy of what lies there."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype).reshape(shape)


def write(address: int, array: np.ndarray) -> None:
    """Put an array there."""
    data = np.ascontiguousarray(array)
    ctypes.memmove(address, data.ctypes.data, data.nbytes)
