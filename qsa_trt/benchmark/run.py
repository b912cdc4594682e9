"""The run: every selected case on the plugin itself, its stages, its peers, and the roofs they are measured against."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from qsa_plugin import jit, tensorrt
from qsa_plugin.contract import Mode, check_call
from qsa_plugin.errors import FailedError, InputError
from qsa_plugin.flavour import flavour_name, flavour_version
from qsa_trt import __version__, device
from qsa_trt.plugin_host import PluginContext, PluginHost

from . import host
from .cases import GEOMETRY, HOST_CASE, SURFACE, Case, select
from .counts import work_of
from .inputs import InputMaker, device_bytes, shapes_of_case
from .overlap import measured_jaccard
from .peers import Peers, dense_of, load_torch
from .record import CaseResult, Record
from .stages import stage_times
from .timing import FULL, QUICK, STEPS, Clock, Flush, Sample, copy_tb_s

#: Device memory left alone: contexts, kernels, graphs.
_SPARE_BYTES = 2 << 30


def run_benchmark(
    *,
    quick: bool = False,
    cases: str | None = None,
    json: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Record:
    """Time the plugin on device 0.

    Args:
        quick: fewer cases and repeats.
        cases: patterns of case names, comma-separated; default all, or those of the short run.
        json: where to write the record too.
        progress: gets a line when a case is done.

    Raises:
        InputError: a pattern without a case, a folder of `json` that is not there, or no GPU.
        MissingPackageError: TensorRT is not installed.
        RefusedError: the kernels do not support this device.
        FailedError: a call left no output.
    """
    selected = select([p.strip() for p in cases.split(",")] if cases else [], quick)
    if json is not None and not Path(json).parent.is_dir():
        raise InputError("option --json", json, "a file in a folder that exists", "make the folder")
    if device.compute_capability() is None:
        raise InputError("GPU", "none", "an NVIDIA GPU with its driver", "run this on a machine that has one")
    tensorrt()
    record = _Run(quick, progress).record(selected)
    if json is not None:
        record.write(json)
    return record


class _Run:
    """State of one run: clock, flush, peers, and the roofs."""

    def __init__(self, quick: bool, progress: Callable[[str], None]) -> None:
        self._start = time.perf_counter()
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._say, self._quick = progress, quick
        self._effort = QUICK if quick else FULL
        device.activate()
        self._inputs = InputMaker(GEOMETRY)
        torch = load_torch()
        self._torch = torch
        self._peers = None if torch is None else Peers(torch, GEOMETRY, self._effort)
        self._copy = copy_tb_s(Clock(device.Stream(), self._effort))
        self._rate = None if self._peers is None else self._peers.fp16_tflop_s()
        self._l2_bytes = 0
        self._host: host.HostTime | None = None
        self._report(f"roofs: copy {self._copy:.2f} TB/s, fp16 product {self._rate and round(self._rate)} TFLOP/s")

    def record(self, cases: list[Case]) -> Record:
        """Time them all."""
        results = [self._case(case) for case in cases]
        return Record(
            date=self._date,
            gpu=_gpu(self._l2_bytes),
            versions=_versions(self._torch),
            settings={"surface": SURFACE, "steps": STEPS, "quick": self._quick, **asdict(self._effort)},
            roofs={"copy_tb_s": self._copy, "fp16_tflop_s": self._rate},
            cases=results,
            host=self._host,
            seconds=time.perf_counter() - self._start,
        )

    def _case(self, case: Case) -> CaseResult:
        shapes, work = shapes_of_case(case, GEOMETRY), work_of(case, GEOMETRY)
        plugin = PluginHost(GEOMETRY, SURFACE, shapes)
        result = CaseResult(
            name=case.name,
            mode=case.mode.value,
            batch=case.batch,
            length=case.length,
            target_us=case.target_us,
            relative_to=case.relative_to,
            jaccard_target=case.jaccard,
            bytes=work.bytes,
            flops=work.flops,
            floor_us=work.floor_us(self._copy, self._rate),
            workspace_bytes=plugin.workspace_size,
        )
        needed, free = device_bytes(shapes) + plugin.workspace_size + _SPARE_BYTES, _free_bytes()
        if needed > free:
            reason = f"needs {needed >> 20} MiB of device memory, {free >> 20} are free"
            result = replace(result, skipped=reason)
        else:
            result = self._with_peer(case, self._timed(case, plugin, result))
        self._report(result.line())
        return result

    def _timed(self, case: Case, plugin: PluginHost, result: CaseResult) -> CaseResult:
        """The plugin's own times. Made scores, and the portable kernels, are compared hot alone."""
        context = plugin.context()
        self._inputs.bind(context, case)
        enqueue = host.kernels_enqueue(context, portable=True) if case.portable else context.enqueue
        enqueue()
        _check(context, case)
        clock = Clock(context.stream, self._effort)
        hot = clock.time(enqueue)
        if case.name == HOST_CASE:
            self._host = host.measure(context)
        return replace(
            result,
            jaccard=_jaccard(context),
            hot=hot,
            cold=None if case.scores != "normal" or case.portable else self._cold(clock, enqueue),
            stages_us=stage_times(clock, enqueue, hot.us),
        )

    def _with_peer(self, case: Case, result: CaseResult) -> CaseResult:
        """Dense attention beside every case that is not compared with another one."""
        if case.relative_to:
            return result
        dense = dense_of(self._peers, case)
        if isinstance(dense, Sample):
            return replace(result, dense=dense)
        return replace(result, notes=(f"no dense attention: {dense}",))

    def _cold(self, clock: Clock, enqueue: Callable[[], None]) -> Sample:
        """A step behind a flush, less what flushes alone take."""
        flush = Flush(clock.stream)
        self._l2_bytes = flush.l2_bytes
        alone = clock.time(flush)

        def step() -> None:
            flush()
            enqueue()

        return clock.time(step).minus(alone.us)

    def _report(self, line: str) -> None:
        self._say(f"{time.perf_counter() - self._start:6.1f} s  {line}")


def _check(context: PluginContext, case: Case) -> None:
    """A call that wrote nothing, or wrote elsewhere, is not worth timing."""
    context.stream.synchronize()
    last = GEOMETRY.num_q_heads * GEOMETRY.head_size
    output = context.buffers["attn_output"]
    row = output.read((last,), np.float16, output.nbytes - 2 * last).astype(np.float32)
    if not np.isfinite(row).all() or not row.any():
        raise FailedError(f"{case.name}: the last row of attn_output was not computed")
    for name, buffer in context.buffers.items():
        if not buffer.intact():
            raise FailedError(f"{case.name}: a kernel wrote outside {name}")


def _jaccard(context: PluginContext) -> float | None:
    call = check_call(GEOMETRY, context.shapes)
    if call.mode is not Mode.PREFILL:
        return None
    workspace = context.buffers["workspace"]
    return measured_jaccard(GEOMETRY, call, lambda offset, count: workspace.read((count,), np.int32, offset))


def _free_bytes() -> int:
    from cuda.bindings import driver

    status, free, _ = driver.cuMemGetInfo()
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return int(free)


def _gpu(l2_bytes: int) -> dict[str, Any]:
    from cuda.core import Device

    properties = Device().properties
    return {
        "name": Device().name,
        "compute_capability": ".".join(map(str, device.compute_capability() or ())),
        "multiprocessors": int(properties.multiprocessor_count),
        "l2_bytes": l2_bytes or int(properties.l2_cache_size),
    }


def _versions(torch: Any) -> dict[str, str]:
    """Of the driver and of everything that compiles or launches."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    versions = {
        "qsa-trt": __version__,
        "driver": driver,
        "nvrtc": ".".join(map(str, jit.nvrtc_version())),
        flavour_name(): flavour_version(),
        "python": platform.python_version(),
    }
    for package in ("cuda-core", "cuda-bindings", "numpy"):
        versions[package] = importlib.metadata.version(package)
    if torch is not None:
        versions["torch"], versions["cudnn"] = torch.__version__, str(torch.backends.cudnn.version())
    return versions
