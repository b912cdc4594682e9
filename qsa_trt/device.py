"""Device memory with poison and canaries, streams and CUDA graphs, on cuda-python alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Bytes in front of and behind every buffer that nobody may touch.
CANARY_BYTES = 4096
_CANARY = 0xA5
#: Every byte 0xFF: NaN as fp16, bf16 and fp32, -1 as int32.
POISON = 0xFF


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises on any status but success."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


@functools.cache
def compute_capability() -> tuple[int, int] | None:
    """Of device 0; None where there is no GPU or no driver."""
    try:
        from cuda.bindings import driver

        check(driver.cuInit(0))
        if check(driver.cuDeviceGetCount()) == 0:
            return None
        device = check(driver.cuDeviceGet(0))
        attribute = driver.CUdevice_attribute
        major = check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        return int(major), int(minor)
    except Exception:
        return None


def activate() -> None:
    """Make device 0's primary context current in this thread."""
    from cuda.core import Device

    Device(0).set_current()


def synchronize() -> None:
    """Wait for everything on the device."""
    from cuda.bindings import driver

    check(driver.cuCtxSynchronize())


class Buffer:
    """`nbytes` of device memory at a multiple of 256, poisoned, between two canaries; freed with the object."""

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self.nbytes = nbytes
        self._total = CANARY_BYTES * 2 + -(-max(nbytes, 1) // 256) * 256
        self._base = check(driver.cuMemAlloc(self._total))
        self.address = int(self._base) + CANARY_BYTES
        check(driver.cuMemsetD8(self._base, _CANARY, self._total))
        self._settle()  # also where there is nothing to poison
        self.poison()

    @classmethod
    def of(cls, array: NDArray[Any]) -> Buffer:
        """A buffer that holds a copy of `array`."""
        buffer = cls(array.nbytes)
        buffer.write(array)
        return buffer

    def poison(self) -> None:
        """Fill with `POISON`."""
        if self.nbytes:
            check(self._driver.cuMemsetD8(self.address, POISON, self.nbytes))
            self._settle()

    def write(self, array: NDArray[Any]) -> None:
        """Copy `array` to the front of the buffer."""
        data = np.ascontiguousarray(array)
        assert data.nbytes <= self.nbytes
        if data.nbytes:
            check(self._driver.cuMemcpyHtoD(self.address, data.ctypes.data, data.nbytes))
            self._settle()

    def read(self, shape: tuple[int, ...], dtype: DTypeLike, offset: int = 0) -> NDArray[Any]:
        """Copy from `offset` bytes on back to the host."""
        result = np.empty(shape, dtype)
        if result.nbytes:
            check(self._driver.cuMemcpyDtoH(result.ctypes.data, self.address + offset, result.nbytes))
        return result

    def intact(self) -> bool:
        """Whether both canaries are."""
        behind = self.address + self.nbytes
        for start, end in ((int(self._base), self.address), (behind, int(self._base) + self._total)):
            canary = np.empty(end - start, np.uint8)
            check(self._driver.cuMemcpyDtoH(canary.ctypes.data, start, canary.nbytes))
            if (canary != _CANARY).any():
                return False
        return True

    def _settle(self) -> None:
        """Wait for fills and copies: both may return early, and no non-blocking stream waits for the default one."""
        check(self._driver.cuStreamSynchronize(0))

    def __del__(self) -> None:
        if hasattr(self, "_base"):
            self._driver.cuMemFree(self._base)


class Stream:
    """A non-blocking stream of its own."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.handle = int(self._stream)

    def synchronize(self) -> None:
        """Wait for it; raises what a kernel did wrong."""
        check(self._driver.cuStreamSynchronize(self._stream))

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` enqueues on this stream, as a graph ready to launch."""
        driver = self._driver
        check(driver.cuStreamBeginCapture(self._stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            work()
        finally:
            graph = check(driver.cuStreamEndCapture(self._stream))
        return Graph(graph, self)


class Graph:
    """An instantiated CUDA graph."""

    def __init__(self, graph: Any, stream: Stream) -> None:
        from cuda.bindings import driver

        self._driver, self._stream = driver, stream
        self.nodes = int(driver.cuGraphGetNodes(graph, 0)[-1])
        self._executable = check(driver.cuGraphInstantiate(graph, 0))

    def launch(self) -> None:
        """Enqueue it on the stream it was captured from."""
        check(self._driver.cuGraphLaunch(self._executable, self._stream.handle))
