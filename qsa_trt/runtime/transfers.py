"""What sessions on the GPU move: activations up and down, and pages inside a pool; a stream orders it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device import Buffer, Stream, check
from .pages import PageCopy


def upload(buffer: Buffer, array: NDArray[Any], stream: Stream) -> None:
    """Copy an array to the front of a buffer; the array may be changed afterwards."""
    from cuda.bindings import driver

    data = np.ascontiguousarray(array)
    assert data.nbytes <= buffer.nbytes
    if data.nbytes:  # pageable memory: the driver has staged it when the call returns
        check(driver.cuMemcpyHtoDAsync(buffer.address, data.ctypes.data, data.nbytes, stream.handle))


def copy_pages(pool: Buffer, num_pages: int, copies: Sequence[PageCopy], stream: Stream) -> None:
    """Copy pages inside one layer's pool.

    Args:
        pool: `[2, N, P, Hkv, D+Id]`.
        num_pages: N.
        copies: source and target ids in [0, 2N).
        stream: orders them before the next call.
    """
    from cuda.bindings import driver

    page_bytes = pool.nbytes // (2 * num_pages)
    for copy in copies:
        target, source = (pool.address + page * page_bytes for page in (copy.target, copy.source))
        check(driver.cuMemcpyDtoDAsync(target, source, page_bytes, stream.handle))
