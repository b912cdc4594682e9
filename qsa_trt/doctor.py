"""What this machine offers to qsa-trt, and what to do about what is missing.

The main job is to patch a model and to build an engine from it. What only limits further commands is a note.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from qsa_plugin import ensure_rtx_library, flavour_name, jit, register, tensorrt
from qsa_plugin.contract import PLUGIN_NAME
from qsa_plugin.environment import CACHE_VARIABLE, TENSORRT_VARIABLE, cache_folder, forced_flavour
from qsa_plugin.errors import InputError, MissingPackageError, QsaError
from qsa_plugin.flavour import INSTALL, MODULES
from qsa_plugin.specialisation import SPECIALISATIONS, arch_of

from . import __version__, device
from .columns import columns
from .runtime.engine_file import cannot_execute

Status = Literal["ok", "note", "problem"]
_OLDEST_PYTHON = (3, 11)
#: Distributions behind the extras, and what needs them.
_EXTRAS = {
    "onnxruntime": "validate, patch-onnx --verify, the examples; pip install 'qsa-trt[ort]'",
    "torch": "export; pip install 'qsa-trt[export]'",
    "transformers": "export; pip install 'qsa-trt[export]'",
}
_ENTRY_POINTS = "polygraphy.run.plugins"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is.
        status: `ok`; `note`, something that limits further commands; `problem`, the main job cannot work.
        found: what was found.
        remedy: what to do; empty where nothing has to be done.
    """

    subject: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All findings."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether a model can be patched and built here."""
        return all(finding.status != "problem" for finding in self.findings)

    def json(self) -> str:
        """The report for programs."""
        return json.dumps({"findings": [asdict(f) for f in self.findings], "passed": self.passed}, indent=2)

    def summary(self) -> str:
        """The report for people, and for a bug report."""
        lines = columns([("subject", "status", "found"), *((f.subject, f.status, f.found) for f in self.findings)])
        lines += [f"{f.status}: {f.subject}: {f.remedy}" for f in self.findings if f.remedy]
        able, unable = "models can be patched and built here", "not all that patching and building need is here"
        return "\n".join([*lines, able if self.passed else f"{unable}: see the problems above"])


def doctor() -> DoctorReport:
    """Look at everything; nothing is changed but for the link that TensorRT-RTX's wheels lack."""
    return DoctorReport(tuple(finding for check in CHECKS for finding in _safely(check)))


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that fails itself is a finding too: a doctor does not stop at the first illness."""
    try:
        yield from check()
    except Exception as error:
        subject = check.__name__.strip("_").replace("_", " ")
        yield Finding(subject, "problem", f"{type(error).__name__}: {_line(error)}", "report this with its whole text")


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _python() -> Iterator[Finding]:
    status: Status = "ok" if sys.version_info >= _OLDEST_PYTHON else "problem"
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    remedy = "" if status == "ok" else f"use Python {oldest} or newer"
    yield Finding("Python", status, f"{platform.python_version()}, {sys.executable}", remedy)
    system = f"{platform.system()} {platform.machine()}"
    tested = system == "Linux x86_64"
    yield Finding(
        "system",
        "ok" if tested else "note",
        system,
        "" if tested else "only Linux on x86-64 is tested: go on with care",
    )


def _packages() -> Iterator[Finding]:
    yield Finding("qsa-trt", "ok", f"{__version__}, {Path(__file__).parent}")
    for name, bounds in _requirements().items():
        version, where = _installed(name)
        wanted = ",".join(operator + bound for operator, bound in bounds)
        if version is None:
            yield Finding(name, "problem", "not installed", f"pip install '{name}{wanted}'")
        elif not all(_FITS[operator](_numbers(version), _numbers(bound)) for operator, bound in bounds):
            yield Finding(name, "problem", f"{version}, {where}; {wanted} is needed", f"pip install '{name}{wanted}'")
        else:
            yield Finding(name, "ok", f"{version}, {where}")
    for name, use in _EXTRAS.items():
        version, where = _installed(name)
        yield (
            Finding(name, "ok", f"{version}, {where}")
            if version is not None
            else Finding(name, "note", "not installed", f"needed by {use}")
        )


_FITS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda version, bound: version >= bound,
    "<": lambda version, bound: version < bound,
}


def _requirements() -> dict[str, list[tuple[str, str]]]:
    """The distributions that qsa-trt needs without any extra, each with its bounds as (operator, version)."""
    try:
        lines = importlib.metadata.requires("qsa-trt") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source folder
        return {}
    needed = [line for line in lines if "extra ==" not in line]
    return {re.split(r"[^\w.-]", line)[0]: re.findall(r"(>=|<)\s*([\d.]+)", line) for line in needed}


def _installed(name: str) -> tuple[str | None, str]:
    """Version and folder of a distribution."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    return distribution.version, str(distribution.locate_file(""))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _tensorrt() -> Iterator[Finding]:
    for name in MODULES:
        try:
            module = tensorrt(name)
        except MissingPackageError:
            yield Finding(name, "ok", "not installed")
        except InputError as error:
            yield Finding(name, "note", f"{_line(error.value)}; expected {error.expected}", error.fix)
        else:
            yield Finding(name, "ok", f"{module.__version__}, {Path(module.__file__ or '').parent}")
    try:
        winner = flavour_name()
    except QsaError as error:
        install = f"{INSTALL['tensorrt_rtx']} (builds without a GPU), or {INSTALL['tensorrt']}"
        remedy = error.fix if isinstance(error, InputError) and forced_flavour() else install
        yield Finding("TensorRT in use", "problem", _line(error), remedy)
        return
    forced = forced_flavour()
    why = f"{TENSORRT_VARIABLE}={forced}" if forced else f"the first installed of {', '.join(MODULES)}"
    can_build = hasattr(tensorrt(winner), "Builder")
    remedy = "" if can_build else f"it only runs engines: {INSTALL['tensorrt_rtx']} to build them"
    yield Finding("TensorRT in use", "ok" if can_build else "problem", f"{winner} ({why})", remedy)


def _plugin() -> Iterator[Finding]:
    winner = _winner()
    if winner is None:
        return
    if winner == "tensorrt_rtx":
        try:
            ensure_rtx_library()
        except InputError as error:
            yield Finding("RTX library link", "problem", _line(error.value), error.fix)
            return
        yield Finding("RTX library link", "ok", "the parser finds libtensorrt_rtx.so")
    try:
        names = ", ".join(register(winner).names)
    except QsaError as error:
        yield Finding("plugin", "problem", _line(error), "run in a fresh process, without other plugin libraries")
        return
    status: Status = "ok" if PLUGIN_NAME in names else "problem"
    yield Finding("plugin", status, f"registered with {winner} as {names}")


def _winner() -> str | None:
    try:
        return flavour_name()
    except QsaError:
        return None


def _compiler() -> Iterator[Finding]:
    from cuda.pathfinder import find_nvidia_header_directory, load_nvidia_dynamic_lib

    remedy = "pip install 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14'"
    try:
        library = load_nvidia_dynamic_lib("nvrtc").abs_path
        version = jit.nvrtc_version()
    except Exception as error:  # whatever the loader raises: it is not usable
        yield Finding("NVRTC", "problem", _line(error), remedy)
        return
    yield Finding("NVRTC", "ok", f"{version[0]}.{version[1]}, {library}")
    folder = find_nvidia_header_directory("cudart")
    header = Path(folder or "") / "cuda_fp16.h"
    if folder is None or not header.is_file():
        yield Finding("CUDA headers", "problem", "none", remedy)
        return
    found = _header_version(Path(folder))
    fits = found is not None and found[0] == version[0]
    spelled = "unknown version" if found is None else f"{found[0]}.{found[1]}"
    yield Finding("CUDA headers", "ok" if fits else "note", f"{spelled}, {folder}", "" if fits else remedy)
    yield _trial(str(folder), remedy)


def _header_version(folder: Path) -> tuple[int, int] | None:
    """CUDA_VERSION of cuda.h, or the runtime's, as (major, minor)."""
    for name in ("cuda.h", "cuda_runtime_api.h"):
        file = folder / name
        match = re.search(r"#define (?:CUDA|CUDART)_VERSION\s+(\d+)", file.read_text()) if file.is_file() else None
        if match is not None:
            return int(match[1]) // 1000, int(match[1]) % 1000 // 10
    return None


def _trial(headers: str, remedy: str) -> Finding:
    """Compile the smallest kernel anew; it includes the headers that the others do."""
    spec = SPECIALISATIONS["real-fp16"]
    source = jit.unit_source(_TRIAL, spec.defines())
    try:
        jit.compile_source(_TRIAL, source, spec.arch, headers)
    except QsaError as error:
        return Finding("trial kernel", "problem", _line(error)[:200], remedy)
    return Finding("trial kernel", "ok", f"{_TRIAL} compiles for {spec.arch}")


_TRIAL = "prefill_plan"


def _gpu() -> Iterator[Finding]:
    capability, winner = device.compute_capability(), _winner()
    if capability is None:
        alone = winner == "tensorrt"
        remedy = "tensorrt builds for the GPU of this machine: use tensorrt_rtx, which needs none" if alone else ""
        other = "this machine compiles kernels, and does not run them" if winner is None else _NO_GPU
        yield Finding("GPU", "problem" if alone else "note", "none, or no driver for it", remedy or other)
    else:
        name, driver = device_name()
        yield Finding(
            "GPU", "ok", f"{name}, compute capability {capability[0]}.{capability[1]}, driver for CUDA {driver}"
        )
        try:
            yield Finding("kernels on this GPU", "ok", f"compiled for {arch_of(capability)}")
        except QsaError as error:
            yield Finding("kernels on this GPU", "note", _line(error), "engines can be built here, and run elsewhere")
    if winner is not None:
        reason = cannot_execute(winner, capability)
        remedy = "" if reason is None else "engines can be built here, and run on a machine with such a GPU"
        yield Finding("engines run here", "ok" if reason is None else "note", reason or f"by {winner}", remedy)


_NO_GPU = "engines can be built here, and run elsewhere"


def device_name() -> tuple[str, str]:
    """Name of device 0, and the newest CUDA version that the driver knows."""
    from cuda.bindings import driver

    handle = device.check(driver.cuDeviceGet(0))
    raw: Any = device.check(driver.cuDeviceGetName(100, handle))
    version = int(device.check(driver.cuDriverGetVersion()))
    return c_string(raw), f"{version // 1000}.{version % 1000 // 10}"


def c_string(raw: bytes) -> str:
    """The text of a C buffer: up to the first zero, whatever is behind it."""
    return raw.split(b"\0")[0].decode()


def _polygraphy() -> Iterator[Finding]:
    entries = [e for e in importlib.metadata.entry_points(group=_ENTRY_POINTS) if e.name == "qsa-trt"]
    if not entries:
        yield Finding("plugin in polygraphy", "note", "not seen", "pip install qsa-trt in this environment")
        return
    entries[0].load()
    yield Finding("plugin in polygraphy", "ok", f"seen through {entries[0].value}")


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(
            "cache", "note", f"{folder} cannot be written", f"every process compiles again: set {CACHE_VARIABLE}"
        )
        return
    if existing == folder and stat.S_IMODE(folder.stat().st_mode) & stat.S_IWOTH:
        yield Finding(
            "cache", "note", f"{folder}: anybody may write to it", f"compiled code lies there: chmod o-w {folder}"
        )
        return
    yield Finding("cache", "ok", f"{folder}{'' if existing == folder else ' (not made yet)'}")


CHECKS = (_python, _packages, _tensorrt, _plugin, _compiler, _gpu, _polygraphy, _cache)
