"""Options of the builder that not every TensorRT flavour has: timing cache, other versions, other GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qsa_plugin.errors import FailedError, InputError

from ..new_file import new_file
from ..patching.files import check_writable

#: Spelling of --hardware-compatible to TensorRT's name.
LEVELS = {"ampere+": "AMPERE_PLUS", "same-cc": "SAME_COMPUTE_CAPABILITY"}


def check_compatibility(
    flavour: str, *, timing_cache: Path | None, version_compatible: bool, hardware_compatible: str | None
) -> tuple[str, ...]:
    """Find what this flavour cannot do; returns notes on what it does not need.

    Args:
        flavour: `tensorrt` or `tensorrt_rtx`.
        timing_cache: a file, which need not exist.
        version_compatible: whether later versions shall load the engine.
        hardware_compatible: a key of `LEVELS`.

    Raises:
        InputError: an option that this flavour does not have, an unknown level, or a cache file that cannot be written.
    """
    if hardware_compatible is not None and hardware_compatible not in LEVELS:
        raise InputError("--hardware-compatible", hardware_compatible, " or ".join(LEVELS), "correct the option")
    if flavour == "tensorrt_rtx":
        if version_compatible:
            raise InputError(
                "--version-compatible", flavour, "tensorrt, which can build such engines", "leave the option out"
            )
        if hardware_compatible is not None:
            raise InputError(
                "--hardware-compatible",
                flavour,
                "tensorrt; engines of tensorrt_rtx run on every GPU that is named",
                "name them with --target sm_86,sm_120",
            )
        if timing_cache is not None:
            return (f"{flavour} times nothing while it builds: {timing_cache} is neither read nor written",)
    if timing_cache is not None:
        check_writable(timing_cache)
    return ()


def set_compatibility(trt: Any, config: Any, *, version_compatible: bool, hardware_compatible: str | None) -> None:
    """Tell the builder. A version-compatible engine gets no code of the host, so that nobody has to allow that."""
    if version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    if hardware_compatible is not None:
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, LEVELS[hardware_compatible])


def load_timing_cache(config: Any, file: Path) -> Any:
    """Give the builder the timings of a file, or an empty cache where there is none.

    Raises:
        FailedError: it cannot be read, or holds the timings of another TensorRT or GPU.
    """
    try:
        data = file.read_bytes() if file.is_file() else b""
    except OSError as error:
        raise FailedError(f"--timing-cache {file} cannot be read: {error.strerror}") from error
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        raise FailedError(f"--timing-cache {file} is of another TensorRT or GPU, or no timing cache; name another file")
    return cache


def save_timing_cache(cache: Any, file: Path) -> None:
    """Write the timings back, all or nothing.

    Raises:
        FailedError: the file cannot be written.
    """
    try:
        with new_file(file) as new:
            new.write_bytes(memoryview(cache.serialize()))
            new.replace(file)
    except OSError as error:
        raise FailedError(f"--timing-cache {file} cannot be written: {error.strerror}") from error
