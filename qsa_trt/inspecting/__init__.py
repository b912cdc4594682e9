"""Says what a file holds: an ONNX model, patched or not, or a TensorRT engine; told apart by content."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..patching.config import load_config
from ..patching.files import load_model
from .engine_file import EngineInspection, inspect_engine, is_engine
from .onnx_file import OnnxInspection, inspect_onnx

__all__ = ["EngineInspection", "OnnxInspection", "inspect"]


def inspect(
    file: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    deserialize: bool = False,
) -> OnnxInspection | EngineInspection:
    """Look into a file without changing anything.

    Args:
        file: an ONNX model, or a TensorRT engine with ENGINE.json beside it.
        config: an unpatched model's `config.json`, for what the graph does not tell.
        deserialize: load the engine with the installed TensorRT too. Engines hold code: only those you trust.

    Raises:
        InputError: no such file, or neither of the two.
        FailedError: the engine cannot be deserialised.
    """
    path = Path(file)
    if is_engine(path):
        return inspect_engine(path, deserialize=deserialize)
    return inspect_onnx(load_model(file, "FILE", "an ONNX file or a TensorRT engine"), load_config(config))
