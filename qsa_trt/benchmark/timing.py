"""Times of CUDA-graph replays: median and spread, with inputs hot in L2 or with an L2 full of something else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from qsa_trt import device

#: Calls in a graph: an event pair around one short call reads about 10 us too much.
STEPS = 20
#: A replay that takes longer holds fewer calls, where only stages or peers are timed.
_LONG_REPLAY_US = 100_000.0
#: Work before the first sample: an idle GPU's clocks take that long to rise.
_WARM_UP_S = 0.03


@dataclass(frozen=True)
class Effort:
    """How often a measurement is repeated: as often as `seconds` allow, but 3 times at least and `most` at most."""

    seconds: float
    most: int


FULL, QUICK = Effort(0.5, 15), Effort(0.15, 7)


@dataclass(frozen=True)
class Sample:
    """Median, smallest and largest of the repeats of one measurement, in us a call."""

    us: float
    low_us: float
    high_us: float
    repeats: int

    @classmethod
    def of(cls, times: list[float]) -> Sample:
        """The sample of these times in us."""
        return cls(statistics.median(times), min(times), max(times), len(times))

    def minus(self, us: float) -> Sample:
        """The sample without a part that was measured by itself; noise may leave less than nothing."""
        return Sample(self.us - us, self.low_us - us, self.high_us - us, self.repeats)


def sample(replay_us: Callable[[], float], calls: int, effort: Effort) -> Sample:
    """Repeat a replay of `calls` calls, after a warm-up.

    Args:
        replay_us: runs it once, waits, and returns its time in us.
        calls: in one replay.
        effort: how often.
    """
    start = time.perf_counter()
    one = replay_us()
    while time.perf_counter() - start < _WARM_UP_S:
        one = replay_us()
    repeats = max(3, min(effort.most, int(effort.seconds * 1e6 / one)))
    return Sample.of([replay_us() / calls for _ in range(repeats)])


def fewer_steps(one_us: float) -> int:
    """Calls of this length in a replay of bearable length."""
    return max(1, min(STEPS, int(_LONG_REPLAY_US / one_us)))


class Clock:
    """Times work on one stream by graph replays.

    Args:
        stream: where the work is captured and replayed.
        effort: how often everything is repeated.
    """

    def __init__(self, stream: device.Stream, effort: Effort) -> None:
        from cuda.bindings import driver

        self._driver, self.stream, self.effort = driver, stream, effort
        self._events = [device.check(driver.cuEventCreate(0)) for _ in range(2)]

    def time(self, work: Callable[[], None], steps: int = STEPS) -> Sample:
        """Time of one call of `work`, which enqueues on the stream."""
        graph = self.stream.capture(lambda: _repeat(work, steps))
        return sample(lambda: self._elapsed_us(graph.launch), steps, self.effort)

    def time_eager(self, work: Callable[[], None], calls: int = 4) -> Sample:
        """The same without a graph, for calls far longer than a launch."""
        return sample(lambda: self._elapsed_us(lambda: _repeat(work, calls)), calls, self.effort)

    def _elapsed_us(self, work: Callable[[], None]) -> float:
        driver, (start, end) = self._driver, self._events
        device.check(driver.cuEventRecord(start, self.stream.handle))
        work()
        device.check(driver.cuEventRecord(end, self.stream.handle))
        self.stream.synchronize()
        return float(device.check(driver.cuEventElapsedTime(start, end))) * 1000


class Flush:
    """Overwrites twice the size of L2, so that a call finds nothing of its own there.

    The lines are left dirty: what the call loads must first push them out, as after an operator that stored
    results.
    """

    def __init__(self, stream: device.Stream) -> None:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        self.l2_bytes = int(device.check(driver.cuDeviceGetAttribute(attribute, device.check(driver.cuCtxGetDevice()))))
        self._driver, self._stream = driver, stream
        self._buffer = device.Buffer(2 * self.l2_bytes)

    def __call__(self) -> None:
        """Enqueue it."""
        words = self._buffer.nbytes // 4
        device.check(self._driver.cuMemsetD32Async(self._buffer.address, 0, words, self._stream.handle))


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


def copy_tb_s(clock: Clock, nbytes: int = 4 << 30) -> float:
    """Device-to-device copy bandwidth in TB/s, bytes read plus bytes written: the best repeat.

    The copies are enqueued, not replayed: in a graph they may go to a copy engine, which is slower.
    """
    from cuda.bindings import driver

    source, target = device.Buffer(nbytes), device.Buffer(nbytes)

    def copy() -> None:
        device.check(driver.cuMemcpyDtoDAsync(target.address, source.address, nbytes, clock.stream.handle))

    device.synchronize()
    return 2 * nbytes / clock.time_eager(copy).low_us / 1e6
