"""The hook on launches: it lists, cuts and gives back, without knowing any kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qsa_plugin.launch import Launch
from qsa_trt.benchmark.stages import launch_names, only_first, replaced, stage_times
from qsa_trt.benchmark.timing import STEPS, Effort, Sample, fewer_steps, sample

launched: list[str] = []


class Kernel(Launch):
    """A launch without a device."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launched.clear()
    monkeypatch.setattr(Launch, "__call__", lambda self, stream, parameters: launched.append(self.name))


def enqueue() -> None:
    for name in ("qsa_write", "qsa_attn", "score", "qsa_attn"):
        Kernel(name)(0, None)  # type: ignore[arg-type]


def test_names_are_listed_and_nothing_runs() -> None:
    assert launch_names(enqueue) == ["write", "attn 1", "score", "attn 2"]
    assert launched == []
    enqueue()
    assert len(launched) == 4


def test_only_the_first_are_launched_in_every_call() -> None:
    first = only_first(enqueue, 2)
    first()
    first()
    assert launched == ["qsa_write", "qsa_attn"] * 2


def test_the_hook_goes_when_the_work_fails() -> None:
    before = Launch.__call__
    with pytest.raises(ZeroDivisionError), replaced(lambda *_: None):
        raise ZeroDivisionError
    assert Launch.__call__ is before


def test_stages_are_differences_and_add_up() -> None:
    times = {"qsa_write": 2.0, "qsa_attn": 5.0, "score": 1.0}

    class Clock:
        def time(self, work: Callable[[], None], steps: int) -> Sample:
            launched.clear()
            work()
            return Sample.of([sum(times[name] for name in launched)])

    clock: Any = Clock()
    assert stage_times(clock, enqueue, 13.0) == {"write": 2, "attn 1": 5, "score": 1, "attn 2": 5}


def test_samples() -> None:
    one = Sample.of([3.0, 1.0, 2.0])
    assert one == Sample(2.0, 1.0, 3.0, 3)
    assert one.minus(0.5) == Sample(1.5, 0.5, 2.5, 3)


def test_repeats_follow_the_effort() -> None:
    """A replay of 10 us fits any time; of 10 s none; at least three are made."""
    assert sample(lambda: 10.0, 20, Effort(0.6, 15)) == Sample(0.5, 0.5, 0.5, 15)
    assert sample(lambda: 1e7, 20, Effort(0.6, 15)).repeats == 3


def test_long_calls_share_a_replay_with_fewer() -> None:
    assert [fewer_steps(us) for us in (10, 5000, 10_000, 400_000)] == [STEPS, STEPS, 10, 1]
