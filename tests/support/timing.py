"""GPU time of work on a stream, from replays of a CUDA graph that holds it many times."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from qsa_trt import device


def microseconds(stream: device.Stream, work: Callable[[], None], steps: int = 20, repeats: int = 15) -> float:
    """Median time of one `work`, which enqueues on `stream`; `steps` of them are one graph, and 3 replays warm up."""
    from cuda.bindings import driver

    def many() -> None:
        for _ in range(steps):
            work()

    graph = stream.capture(many)
    start, end = (device.check(driver.cuEventCreate(0)) for _ in range(2))
    times = []
    for index in range(repeats + 3):
        device.check(driver.cuEventRecord(start, stream.handle))
        graph.launch()
        device.check(driver.cuEventRecord(end, stream.handle))
        device.check(driver.cuEventSynchronize(end))
        if index >= 3:
            times.append(device.check(driver.cuEventElapsedTime(start, end)) * 1000 / steps)
    for event in (start, end):
        device.check(driver.cuEventDestroy(event))
    return statistics.median(times)
