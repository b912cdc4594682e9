"""Which kernels an enqueue launches, and what each adds to it; no list of kernels is kept here.

Every kernel of the plugin goes through `Launch.__call__`, which is replaced for as long as a measurement lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qsa_plugin.launch import Launch, ParamBlock

from .timing import Clock, fewer_steps

LaunchCall = Callable[[Launch, int, ParamBlock], None]


@contextmanager
def replaced(call: Callable[[LaunchCall, Launch, int, ParamBlock], None]) -> Iterator[None]:
    """Let `call(original, launch, stream, parameters)` stand for every launch. Not for several threads."""
    original = Launch.__call__
    Launch.__call__ = lambda self, stream, parameters: call(original, self, stream, parameters)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.__call__ = original  # type: ignore[method-assign]


def launch_names(work: Callable[[], None]) -> list[str]:
    """Names of the kernels that `work` would launch, in order; nothing is launched. A repeated name gets a number."""
    names: list[str] = []
    with replaced(lambda original, launch, stream, parameters: names.append(launch.name.removeprefix("qsa_"))):
        work()
    return [name if names.count(name) == 1 else f"{name} {names[:i].count(name) + 1}" for i, name in enumerate(names)]


def only_first(work: Callable[[], None], count: int) -> Callable[[], None]:
    """`work` without the launches from number `count` on."""

    def first() -> None:
        seen = 0

        def launch_first(original: LaunchCall, launch: Launch, stream: int, parameters: ParamBlock) -> None:
            nonlocal seen
            seen += 1
            if seen <= count:
                original(launch, stream, parameters)

        with replaced(launch_first):
            work()

    return first


def stage_times(clock: Clock, work: Callable[[], None], whole_us: float) -> dict[str, float]:
    """us that each kernel adds to the chain in front of it, by name: a difference of two chains, overlap included.

    Args:
        clock: times the chains.
        work: one enqueue.
        whole_us: about what it takes.
    """
    stages: dict[str, float] = {}
    before = 0.0
    for count, name in enumerate(launch_names(work), start=1):
        chain = clock.time(only_first(work, count), fewer_steps(whole_us)).us
        stages[name] = chain - before
        before = chain
    return stages
