"""Compiles kernel files with NVRTC to cubins, keeps them on disk, loads them, and launches them.

A kernel file (`kernels/NAME.cu`) is one translation unit with `extern "C"` entries. The generated source is its
defines and one include. Nothing here needs a GPU before `load`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .environment import cache_folder
from .errors import FailedError, MissingPackageError
from .specialisation import Specialisation

#: Options of every compilation, part of the cache key.
_OPTIONS: Mapping[str, Any] = {"std": "c++17", "lineinfo": True, "ptxas_options": ["-v"]}
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
#: Names of the files in the cache folder, unfinished ones too.
_CACHED = re.compile(r"\w+-sm_\w+-[0-9a-f]{40}\.(cubin|log)\w*")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one entry: registers a thread, static shared bytes, stack and spill bytes."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel file and the compiler's report, entry by entry."""

    name: str
    code: bytes
    log: str

    @property
    def resources(self) -> dict[str, Resources]:
        """The report by entry name."""
        return parse_report(self.log)


@dataclass(frozen=True)
class Job:
    """One kernel file to be compiled: its name without suffix, what for, and further defines in alphabetical order."""

    name: str
    specialisation: Specialisation
    tuning: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, name: str, specialisation: Specialisation, tuning: Mapping[str, int] | None) -> Job:
        """Arguments as of `compile_kernel`."""
        return cls(name, specialisation, tuple(sorted((tuning or {}).items())))

    @property
    def source(self) -> str:
        """The generated translation unit."""
        return unit_source(self.name, {**self.specialisation.defines(), **dict(self.tuning)})

    @property
    def path(self) -> Path:
        """Where the cubin lies in the cache once it is compiled."""
        arch = self.specialisation.arch
        return cache_folder() / f"{self.name}-{arch}-{cache_key(self.name, self.source, arch)[:40]}.cubin"


def cached_files() -> list[Path]:
    """What `compile_kernel` has left in the cache folder; other files in it are not ours.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = cache_folder()
    return sorted(file for file in folder.iterdir() if _CACHED.fullmatch(file.name)) if folder.is_dir() else []


def parse_report(log: str) -> dict[str, Resources]:
    """Read the output of `ptxas -v`: entry name to resources."""
    found: dict[str, Resources] = {}
    pieces = _ENTRY.split(log)
    for entry, text in zip(pieces[1::2], pieces[2::2], strict=True):
        frame, used, shared = _FRAME.search(text), _USED.search(text), _SHARED.search(text)
        if frame is None or used is None:
            continue
        stack, stores, loads = (int(value) for value in frame.groups())
        found[entry] = Resources(int(used[1]), int(shared[1]) if shared else 0, stack, max(stores, loads))
    return found


def kernel_folder() -> Path:
    """The folder of the `.cu` and `.cuh` files of this package."""
    return Path(str(resources.files(__package__) / "kernels"))


def unit_source(name: str, defines: Mapping[str, int]) -> str:
    """The generated translation unit: sorted defines, then the kernel file."""
    lines = [f"#define {macro} {value}" for macro, value in sorted(defines.items())]
    return "\n".join([*lines, f'#include "{name}.cu"', ""])


def cache_key(name: str, source: str, arch: str) -> str:
    """Digest of all that the cubin depends on: source, every shared header's bytes, options, target, compiler."""
    digest = hashlib.sha256()
    for part in (source, arch, repr(_OPTIONS), ".".join(map(str, nvrtc_version()))):
        digest.update(part.encode() + b"\0")
    for path in [kernel_folder() / f"{name}.cu", *sorted(kernel_folder().glob("*.cuh"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC in use."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise FailedError(f"NVRTC does not answer: {status}")
    return int(major), int(minor)


def compile_kernel(name: str, specialisation: Specialisation, tuning: Mapping[str, int] | None = None) -> Cubin:
    """Compile `kernels/NAME.cu`, or take it from the disk cache.

    Args:
        name: the kernel file without its suffix.
        specialisation: gives the target and the defines.
        tuning: further defines of this kernel alone (tile sizes).

    Raises:
        FailedError: the compiler refused; the message holds its first error, the cause its whole log.
        MissingPackageError: the CUDA headers are not installed.
    """
    job = Job.of(name, specialisation, tuning)
    code_path = job.path
    log_path = code_path.with_suffix(".log")
    try:
        return Cubin(name, code_path.read_bytes(), log_path.read_text())
    except OSError:
        pass  # not cached, or a cache that cannot be read: compile
    cubin = compile_source(name, job.source, specialisation.arch)
    _write_atomically(log_path, cubin.log.encode())  # the log first: a cubin in the cache always has its log
    _write_atomically(code_path, cubin.code)
    return cubin


def compile_source(name: str, source: str, arch: str, headers: str | None = None) -> Cubin:
    """One NVRTC run, past the cache.

    Args:
        name: of the kernel, for errors.
        source: the translation unit, as `unit_source` makes it.
        arch: NVRTC target.
        headers: folder of cuda_fp16.h; None is that of the installed package.

    Raises:
        FailedError, MissingPackageError: as `compile_kernel`.
    """
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=f"{name}_unit.cu",
        arch=arch,
        include_path=[str(kernel_folder()), headers or _cuda_headers()],
        **_OPTIONS,
    )
    try:
        code = Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        text = log.getvalue() or str(error)
        first = next((line for line in text.splitlines() if "error" in line), text.strip().splitlines()[0])
        raise FailedError(f"kernel {name} does not compile for {arch}: {first.strip()}") from error
    return Cubin(name, bytes(code), log.getvalue())


@functools.cache
def _cuda_headers() -> str:
    """Folder of cuda_fp16.h."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise MissingPackageError(
            "the CUDA runtime headers", "none found", "cuda_fp16.h", "pip install 'nvidia-cuda-runtime>=13'"
        )
    return str(folder)


def _write_atomically(path: Path, data: bytes) -> None:
    """Write the cache; a cache that cannot be written costs time, not correctness."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return


_loaded: dict[Job, Any] = {}
_loading = threading.Lock()


def load(name: str, specialisation: Specialisation, tuning: Mapping[str, int] | None = None) -> Any:
    """The loaded `cuda.core.ObjectCode` of one kernel file; compiled and loaded once a process. Not for enqueue."""
    from cuda.core import ObjectCode

    key = Job.of(name, specialisation, tuning)
    with _loading:
        if key not in _loaded:
            cubin = compile_kernel(name, specialisation, tuning)
            entries = list(cubin.resources)
            code = ObjectCode.from_cubin(cubin.code, name=name)
            for entry in entries:
                code.get_kernel(entry)  # resolves the module now: safe before a capture
            _loaded[key] = code
        return _loaded[key]


#: What `kernels` returns while it only notes; a `Launch` of it loads nothing and cannot be launched.
NOTED = object()
_noted: ContextVar[list[Job] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[Job]]:
    """In this context `kernels` compiles and loads nothing: the list says what it was asked for. It needs no GPU."""
    jobs: list[Job] = []
    token = _noted.set(jobs)
    try:
        yield jobs
    finally:
        _noted.reset(token)


def only_notes() -> bool:
    """Whether this is the context of a `noting`."""
    return _noted.get() is not None


def kernels(
    name: str, specialisation: Specialisation, entries: Sequence[str], tuning: Mapping[str, int] | None = None
) -> list[Any]:
    """The loaded `cuda.core.Kernel` objects of `entries`, in that order."""
    noted = _noted.get()
    if noted is not None:
        job = Job.of(name, specialisation, tuning)
        if job not in noted:
            noted.append(job)
        return [NOTED] * len(entries)
    code = load(name, specialisation, tuning)
    return [code.get_kernel(entry) for entry in entries]
