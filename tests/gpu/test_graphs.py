"""CUDA graphs, streams, threads, and what an enqueue leaves behind on the host and the device: nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import Mode, PoolIO
from qsa_trt import device
from qsa_trt.plugin_host import PluginContext
from tests.gpu.conftest import RecordError
from tests.support.node import (
    Inputs,
    call_inputs,
    geometry_of,
    launch,
    needs_node,
    open_node,
    output_of,
    prompt,
    same_bits,
    same_outputs,
    token,
)

pytestmark = [*needs_node, pytest.mark.quick]
BOTH_MODES = pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
NAME = "group-7"


@pytest.mark.pitfall(25)
@pytest.mark.parametrize(
    ("name", "mode", "longest"),
    [("real-fp16", Mode.DECODE, 9000), ("group-7", Mode.DECODE, 1200), ("group-7", Mode.PREFILL, 900)],
)
def test_a_graph_replays_with_lengths_changed_in_place(name: str, mode: Mode, longest: int) -> None:
    """Captured at one length, replayed from 1 to the longest across the dense/sparse switch: the bits of eager."""
    inputs = call_inputs(name, [longest, longest], mode)
    inputs["past_key_value"] = np.nan_to_num(inputs["past_key_value"])
    context = open_node(name, inputs)
    context.bind(inputs | {"context_lengths": np.array([700, 3], np.int32)})
    graph = context.capture()
    budget = context.host.geometry.list_width
    for lengths in ([1, 2], [budget, budget + 1], [budget + 2, 127], [longest, 1], [4, 0], [longest - 1, longest]):
        changed = inputs | {"context_lengths": np.array(lengths, np.int32)}
        eager = context.run(changed)
        context.buffers["past_key_value"].write(inputs["past_key_value"])
        context.poison()
        graph.launch()
        assert same_outputs(context.read(), eager), f"{lengths}"


@pytest.mark.pitfall(25)
@BOTH_MODES
def test_a_thousand_replays_are_equal(mode: Mode) -> None:
    """No length completes a block, so that each replay finds what the last one found."""
    inputs = call_inputs(NAME, [901, 33], mode)
    context = open_node(NAME, inputs)
    expected = context.run(inputs)
    context.poison()
    graph = context.capture()
    for _ in range(1000):
        graph.launch()
    assert same_outputs(context.read(), expected)


@pytest.mark.pitfall(8)
@BOTH_MODES
def test_the_number_of_launches_does_not_depend_on_rows(mode: Mode) -> None:
    """The nodes of a graph: the same for one sequence and for nine, for short rows and for long ones."""
    nodes = set()
    for lengths in ([600], [600] * 9, [1] * 8 + [1500], [1500]):
        inputs = call_inputs(NAME, lengths, mode, seq_len=max(lengths) if mode is Mode.PREFILL else None)
        context = open_node(NAME, inputs)
        context.bind(inputs)
        nodes.add(context.capture().nodes)
    assert len(nodes) == 1, f"{nodes} launches"


@pytest.mark.pitfall(26)
@BOTH_MODES
def test_an_enqueue_only_launches(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture refuses allocation, synchronisation, loading and other streams. No driver call but launches is made
    from Python, free memory stays the same, and every node of the graph is a kernel."""
    from cuda.bindings import driver

    inputs = call_inputs(NAME, [900, 515], mode)
    context = open_node(NAME, inputs)
    expected = launch(context, inputs)
    context.buffers["past_key_value"].write(inputs["past_key_value"])
    context.poison()
    called: list[str] = []

    def watch(name: str) -> Any:
        original = getattr(driver, name)
        return lambda *arguments: called.append(name) or original(*arguments)

    free = device.check(driver.cuMemGetInfo())
    with monkeypatch.context() as patched:
        for name in dir(driver):
            if name.startswith("cu") and callable(getattr(driver, name)):
                patched.setattr(driver, name, watch(name))
        context.enqueue()
    assert same_bits(output_of(context), expected)
    assert set(called) <= {"cuLaunchKernelEx"}
    assert device.check(driver.cuMemGetInfo()) == free
    assert node_types(context) == {driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL}


def node_types(context: PluginContext) -> set[Any]:
    """What kinds of nodes an enqueue leaves in a capture."""
    from cuda.bindings import driver

    handle = driver.CUstream(context.stream.handle)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    device.check(driver.cuStreamBeginCapture(handle, mode))
    try:
        context.enqueue()
    finally:
        graph = device.check(driver.cuStreamEndCapture(handle))
    count = int(driver.cuGraphGetNodes(graph, 0)[-1])
    nodes = driver.cuGraphGetNodes(graph, count)[1]
    return {device.check(driver.cuGraphNodeGetType(node)) for node in nodes[:count]}


FIRST_CALL = """
from qsa_plugin.contract import Mode
from tests.support.node import call_inputs, open_node, same_outputs

for mode in Mode:
    inputs = call_inputs("group-7", [700, 33], mode)
    context = open_node("group-7", inputs)
    if not {announced}:
        context.plugin.on_shape_change = lambda *descs: None
    context.bind(inputs)
    graph = context.capture()
    context.poison()
    graph.launch()
    captured = context.read()
    assert same_outputs(captured, context.run(inputs))
print("equal")
"""


@pytest.mark.pitfall(26)
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "unannounced"])
def test_the_first_call_of_a_process_may_be_captured(announced: bool) -> None:
    """The kernels are loaded when shapes are announced, or else in the capture itself; never a broken graph."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "plugin"), *sys.path])}
    command = [sys.executable, "-c", FIRST_CALL.format(announced=announced)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert answer.stdout.strip() == "equal", answer.stderr[-2000:]


def generate(context: PluginContext, whole: Inputs, start: int, steps: int) -> list[Any]:
    """Outputs of a prompt and the tokens after it."""
    outputs = [launch(context, prompt(whole, [start]))]
    return outputs + [launch(context, token(whole, [at])) for at in range(start, start + steps)]


@pytest.mark.pitfall(27)
def test_two_contexts_on_two_threads_and_streams_equal_serial_runs() -> None:
    """200 steps each, of unlike lengths, over the budget, at the same time."""
    requests = [call_inputs(NAME, [total], Mode.PREFILL, seed=total) for total in (600, 720)]
    starts = (400, 505)
    first = open_node(NAME, *requests, *(w | token(w, [0]) for w in requests))
    contexts = [first, first.host.context()]
    serial = [generate(first.host.context(), whole, start, 200) for whole, start in zip(requests, starts, strict=True)]
    results: list[Any] = [None, None]

    def work(index: int) -> None:
        device.activate()
        results[index] = generate(contexts[index], requests[index], starts[index], 200)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for concurrent, expected in zip(results, serial, strict=True):
        assert concurrent is not None
        assert len(concurrent) == 201
        assert all(map(same_bits, concurrent, expected))


@pytest.mark.pitfall(27)
@BOTH_MODES
def test_ten_thousand_enqueues_leave_nothing_behind(mode: Mode, record_error: RecordError) -> None:
    """Resident host memory, free device memory, live Python objects and reference counts."""
    from cuda.bindings import driver

    inputs = call_inputs(NAME, [601, 33], mode)
    context = open_node(NAME, inputs)
    context.bind(inputs)
    held = [context.plugin, context.host.geometry, *context.plugin.__dict__.values()]

    def enqueue(times: int) -> None:
        for index in range(times):
            context.enqueue()
            if index % 500 == 499:  # a queue of the driver's own would grow
                context.stream.synchronize()

    enqueue(1000)
    gc.collect()
    counts = [sys.getrefcount(item) for item in held]
    objects, free, resident = len(gc.get_objects()), device.check(driver.cuMemGetInfo()), resident_bytes()
    enqueue(10_000)
    gc.collect()
    assert [sys.getrefcount(item) for item in held] == counts
    assert device.check(driver.cuMemGetInfo()) == free
    assert abs(len(gc.get_objects()) - objects) < 100
    record_error("resident MiB gained", (resident_bytes() - resident) / 2**20, 2.0)


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.pitfall(25, 26)
def test_a_copied_pool_is_captured_too() -> None:
    """The copy is a node of the graph; the replay takes what the input pool holds at that time."""
    inputs = call_inputs(NAME, [601, 33], Mode.DECODE)
    context = open_node(NAME, inputs, geometry=geometry_of(NAME, pool_io=int(PoolIO.COPY)))
    expected = context.run(inputs)
    graph = context.capture()
    context.poison()
    graph.launch()
    assert same_outputs(context.read(), expected)
