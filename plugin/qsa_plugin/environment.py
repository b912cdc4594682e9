"""The environment variables that this project reads: the only module that looks at `os.environ`."""

from __future__ import annotations

import os
from pathlib import Path

TENSORRT_VARIABLE = "QSA_TRT_TENSORRT"
#: Folder of the compiled kernels; unset means `$XDG_CACHE_HOME/qsa-trt`, else `~/.cache/qsa-trt`.
CACHE_VARIABLE = "QSA_TRT_CACHE"


def forced_flavour() -> str | None:
    """The TensorRT package that the user forces by `QSA_TRT_TENSORRT`; None when unset or empty."""
    return os.environ.get(TENSORRT_VARIABLE) or None


def cache_folder() -> Path:
    """Where compiled kernels are kept; the folder need not exist yet."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qsa-trt"
