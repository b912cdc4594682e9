"""Mends the TensorRT-RTX wheels, whose ONNX parser asks for a library name that they do not ship."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import tempfile
from pathlib import Path

from .errors import InputError

UNVERSIONED = "libtensorrt_rtx.so"
VERSIONED = "libtensorrt_rtx.so.1"


def ensure_rtx_library(folder: Path | None = None) -> None:
    """Make sure that TensorRT-RTX's ONNX parser finds `libtensorrt_rtx.so`; without it the process aborts.

    The parser opens the unversioned name right after it created a plugin and looks beside itself and along
    `LD_LIBRARY_PATH`; the wheels ship only `libtensorrt_rtx.so.1`. A relative symbolic link is created where it is
    missing. Safe to call again, from several threads and from several processes.

    Args:
        folder: where the libraries are; None means the installed package `tensorrt_rtx_libs`.

    Raises:
        InputError: the name cannot be found and the link cannot be created.
    """
    folder = folder or _libs_folder()
    if (folder is not None and (folder / UNVERSIONED).is_file()) or _loader_finds_it():
        return
    if folder is None or not (folder / VERSIONED).is_file():
        raise InputError(
            UNVERSIONED,
            f"no {VERSIONED} in {folder}" if folder else "no package tensorrt_rtx_libs",
            "TensorRT-RTX's library where the dynamic loader finds it",
            f"add the folder that holds {UNVERSIONED} to LD_LIBRARY_PATH, or reinstall tensorrt_rtx",
        )
    try:
        _link(folder)
    except OSError as error:
        raise InputError(
            UNVERSIONED,
            f"none in {folder}, and the folder cannot be written ({error.strerror})",
            f"a link to {VERSIONED}, which TensorRT-RTX's ONNX parser opens",
            f"run once as the owner of the folder: ln -s {VERSIONED} {folder / UNVERSIONED}; or put such a link into a"
            " folder of LD_LIBRARY_PATH",
        ) from error


def _link(folder: Path) -> None:
    """Create the link under a name of its own and move it into place, so that nobody ever sees half of it."""
    with tempfile.TemporaryDirectory(prefix=".qsa-trt-", dir=folder) as own:
        link = Path(own) / UNVERSIONED
        link.symlink_to(VERSIONED)
        os.replace(link, folder / UNVERSIONED)  # noqa: PTH105


def _libs_folder() -> Path | None:
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None


def _loader_finds_it() -> bool:
    """Whether the dynamic loader opens the bare name: the loader reads `LD_LIBRARY_PATH` once, at process start."""
    try:
        ctypes.CDLL(UNVERSIONED)
    except OSError:
        return False
    return True
