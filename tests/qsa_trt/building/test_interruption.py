"""Ctrl-C during a build: the builder stops at its next step, the exit code is 130, no file is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from qsa_trt.building.engine import _interruptible
from tests.support.qsa_graphs import qsa_model
from tests.support.requirements import needs_rtx

#: A build in which the plugin takes its time, in a process of its own: the signal goes to nobody else.
CHILD = """
import sys, time
from qsa_plugin.plugin import Callbacks
from qsa_trt.__main__ import run
configure = Callbacks.configure_plugin
def slow(self, *args):
    print("configuring", file=sys.__stdout__, flush=True)
    time.sleep(0.3)
    return configure(self, *args)
Callbacks.configure_plugin = slow
sys.stdout = sys.stderr  # the pipe holds the lines of above only
sys.argv[1:] = ["build-engine", sys.argv[1], "--tensorrt", "tensorrt_rtx"]
run()
"""

pytestmark = needs_rtx


def run_child(model: Path, *, signals: int) -> tuple[int, int]:
    """(exit code, how often the plugin was configured)."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    lines = [child.stdout.readline()]
    for _ in range(signals):
        child.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two at once would count as one
    lines += child.stdout.readlines()
    return child.wait(timeout=60), len(lines)


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_stops_the_build_and_leaves_nothing(tmp_path: Path, signals: int) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(qsa_model(), model)
    code, configured = run_child(model, signals=signals)
    assert code == 130
    assert list(tmp_path.iterdir()) == [model]
    complete, configured_in_full = run_child(model, signals=0)
    assert complete == 0
    assert configured < configured_in_full


def test_results_and_errors_come_back_from_the_thread() -> None:
    assert _interruptible(lambda stop: not stop.is_set())
    with pytest.raises(ZeroDivisionError):
        _interruptible(lambda _: 1 // 0)
