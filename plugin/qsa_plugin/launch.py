"""Launches whose arguments are packed once: a struct by value, a prebuilt configuration, one driver call.

A kernel takes one `const __grid_constant__ PARAMS` struct. Its layout is a `struct` format; the driver copies the bytes
during the call, so one `ParamBlock` serves all kernels of an enqueue and may be packed again at once. Neither class may
be shared by threads.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from . import jit
from .errors import FailedError


class ParamBlock:
    """The bytes of a kernel's only parameter, and the `void**` that the driver wants.

    Args:
        layout: a `struct` format in native order without padding surprises: pointers ("Q") first, then 4-byte fields.
    """

    def __init__(self, layout: str) -> None:
        self._struct = struct.Struct("=" + layout)
        self._bytes = np.zeros((self._struct.size + 7) // 8 * 8, np.uint8)  # C pads the struct to its alignment
        self._pointers = np.array([self._bytes.ctypes.data], np.uint64)
        self.address = int(self._pointers.ctypes.data)

    @property
    def size(self) -> int:
        """sizeof() of the C struct."""
        return len(self._bytes)

    def pack(self, *values: int | float) -> None:
        """Set every field, in order."""
        self._struct.pack_into(self._bytes.data, 0, *values)


class Launch:
    """One kernel with its launch configuration; the grid may be changed between calls.

    Args:
        kernel: a `cuda.core.Kernel`.
        block: threads a block.
        shared_bytes: dynamic shared memory; the limit of 48 KiB, static memory included, is raised here, once.
        dependent: let the kernel start before the one in front of it in the stream has finished (programmatic dependent
            launch, compute capability 9.0 and later); the kernel itself waits where it must.
        cluster: blocks a cluster along x.

    Raises:
        FailedError: the device has too little shared memory, or the kernel cannot be loaded.
    """

    def __init__(
        self, kernel: Any, block: int, shared_bytes: int = 0, dependent: bool = False, cluster: int = 1
    ) -> None:
        if kernel is jit.NOTED:
            return
        from cuda.bindings import driver

        self._launch = driver.cuLaunchKernelEx
        self._keep = kernel
        self._kernel = driver.CUkernel(int(kernel.handle))
        self._ok = driver.CUresult.CUDA_SUCCESS
        self._function = self._prepare(driver, shared_bytes, cluster)
        self._cluster = cluster
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX = self._config.gridDimY = self._config.gridDimZ = 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = block, 1, 1
        self._config.sharedMemBytes = shared_bytes
        attributes = []
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        if attributes:
            self._config.attrs = attributes
        self._config.numAttrs = len(attributes)

    def _prepare(self, driver: Any, shared_bytes: int, cluster: int) -> Any:
        """Load the kernel into the current context now, and raise its limits; returns its function."""
        status, function = driver.cuKernelGetFunction(self._kernel)
        if status == self._ok:
            (status,) = driver.cuFuncLoad(function)
        attribute = driver.CUfunction_attribute
        if status == self._ok and shared_bytes > 32 * 1024:
            (status,) = driver.cuFuncSetAttribute(
                function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
        if status == self._ok and cluster > 8:
            (status,) = driver.cuFuncSetAttribute(
                function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
            )
        if status != self._ok:
            raise FailedError(f"a kernel cannot be prepared ({shared_bytes} bytes of shared memory): {status.name}")
        return function

    def clusters_at_a_time(self) -> int:
        """Clusters of this launch that the device runs at a time; 0 where it cannot run them, or is not asked."""
        if jit.only_notes():
            return 0
        from cuda.bindings import driver

        self.grid(self._cluster)
        status, clusters = driver.cuOccupancyMaxActiveClusters(self._function, self._config)
        return int(clusters) if status == self._ok else 0

    @property
    def name(self) -> str:
        """The kernel's entry point."""
        from cuda.bindings import driver

        status, name = driver.cuKernelGetName(self._kernel)
        return str(name.decode()) if status == self._ok else "unknown"

    def grid(self, x: int, y: int = 1, z: int = 1) -> None:
        """Set the grid; x may reach 2^31 - 1, y and z 65,535."""
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = x, y, z

    def __call__(self, stream: int, parameters: ParamBlock) -> None:
        """Enqueue on the raw stream handle.

        Raises:
            FailedError: the driver refused the launch.
        """
        self._config.hStream = stream
        (status,) = self._launch(self._config, self._kernel, parameters.address, 0)
        if status != self._ok:
            raise FailedError(f"a kernel launch failed: {status.name}")


def sm_count() -> int:
    """Multiprocessors of the current device; 1 where kernels are only noted."""
    if jit.only_notes():
        return 1
    from cuda.core import Device

    return int(Device().properties.multiprocessor_count)
