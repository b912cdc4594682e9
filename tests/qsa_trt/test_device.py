"""Device memory over a stand-in for the driver that does everything as late as CUDA may."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_trt import device
from tests.support.fake_cuda import FakeDriver, cuda, read, write

__all__ = ["cuda"]  # the fixture


def test_a_new_buffer_is_filled_before_another_stream_can_touch_it(cuda: FakeDriver) -> None:
    """A fill that comes late would overwrite what a kernel on a non-blocking stream has written."""
    buffer = device.Buffer(8)
    assert (read(buffer.address, (8,), np.uint8) == device.POISON).all()
    write(buffer.address, np.arange(8, dtype=np.uint8))  # a kernel
    device.synchronize()
    assert (buffer.read((8,), np.uint8) == np.arange(8)).all()
    assert buffer.intact()


def test_poison_and_uploads_are_there_when_the_call_returns(cuda: FakeDriver) -> None:
    buffer = device.Buffer.of(np.arange(4, dtype=np.int32))
    assert read(buffer.address, (4,), np.int32).tolist() == [0, 1, 2, 3]
    buffer.poison()
    assert read(buffer.address, (4,), np.int32).tolist() == [-1] * 4


@pytest.mark.parametrize("at", [-1, 8])
def test_a_canary_that_was_written_over_is_seen(cuda: FakeDriver, at: int) -> None:
    buffer = device.Buffer(8)
    write(buffer.address + at, np.zeros(1, np.uint8))
    assert not buffer.intact()
