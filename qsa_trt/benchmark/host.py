"""Host time of an enqueue outside a graph: Python and driver, as TensorRT's thread spends it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qsa_plugin import tensorrt
from qsa_plugin.contract import INPUTS, OUTPUTS, check_call
from qsa_plugin.enqueue import NodeKernels
from qsa_plugin.launch import Launch, ParamBlock
from qsa_trt.plugin_host import PluginContext, runtime_descs

from .cases import ROTARY_DIMS
from .stages import LaunchCall, launch_names, replaced

_CALLS, _BATCH = 1000, 20  # the device is waited for after each batch, so that its queue never holds the host up


@dataclass(frozen=True)
class HostTime:
    """us of one enqueue on the host.

    Attributes:
        us: median.
        low_us: a tenth of the calls took less.
        high_us: a tenth took more.
        parts: medians of the plugin's checks, of the kernels' parameters, and of every launch by kernel.
    """

    us: float
    low_us: float
    high_us: float
    parts: dict[str, float]


def measure(context: PluginContext) -> HostTime:
    """Host time of the call that is bound.

    The checks are what `plugin.enqueue` does besides the kernels' own `enqueue`; both are timed with launches that do
    nothing.
    """
    enqueue, kernels = _enqueue(context), kernels_enqueue(context)
    times = sorted(_times(context, enqueue))
    names = launch_names(enqueue)
    per_launch: dict[str, list[float]] = {name: [] for name in names}
    launches: Iterator[str] = iter(())

    def timed(original: LaunchCall, launch: Launch, stream: int, parameters: ParamBlock) -> None:
        start = time.perf_counter_ns()
        original(launch, stream, parameters)
        per_launch[next(launches)].append((time.perf_counter_ns() - start) / 1000)

    def timed_enqueue() -> None:
        nonlocal launches
        launches = iter(names)
        enqueue()

    with replaced(timed):
        _times(context, timed_enqueue)
    with replaced(lambda original, launch, stream, parameters: None):
        python, own = (statistics.median(_times(context, work)) for work in (enqueue, kernels))
    parts = {"checks": python - own, "parameters": own}
    parts |= {f"launch {name}": statistics.median(us) for name, us in per_launch.items()}
    return HostTime(statistics.median(times), times[len(times) // 10], times[-len(times) // 10], parts)


def _times(context: PluginContext, work: Callable[[], None]) -> list[float]:
    """us of each call of `work`."""
    times = []
    for _ in range(_CALLS // _BATCH):
        context.stream.synchronize()
        for _ in range(_BATCH):
            start = time.perf_counter_ns()
            work()
            times.append((time.perf_counter_ns() - start) / 1000)
    context.stream.synchronize()
    return times


def _addresses(context: PluginContext) -> tuple[list[int], list[int], int, int]:
    """Input, output and workspace addresses, and the stream, as `enqueue` takes them."""
    inputs, outputs = ([context.buffers[t.name].address for t in tensors] for tensors in (INPUTS, OUTPUTS))
    return inputs, outputs, context.buffers["workspace"].address, context.stream.handle


def _enqueue(context: PluginContext) -> Callable[[], None]:
    """`plugin.enqueue` with everything at hand, as TensorRT has it."""
    descs: tuple[list[Any], list[Any]] = runtime_descs(tensorrt(), context.shapes, context.host.surface)
    arguments, plugin = (*descs, *_addresses(context)), context.plugin
    return lambda: plugin.enqueue(*arguments)


def kernels_enqueue(context: PluginContext, portable: bool = False) -> Callable[[], None]:
    """The bound call by `NodeKernels`, without the plugin around them; the kernels are loaded before it returns."""
    geometry = context.host.geometry
    kernels = NodeKernels(geometry, context.host.surface, portable=portable)
    kernels.prepare(ROTARY_DIMS)
    call = check_call(geometry, context.shapes)
    arguments = _addresses(context)
    return lambda: kernels.enqueue(call, *arguments)
