"""Importing the packages does no work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import sys, {package}
heavy = ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "tensorrt_lean_bindings", "cuda", "onnxruntime", "torch")
print(sorted(m for m in heavy if m in sys.modules))
"""


@pytest.mark.parametrize("package", ["qsa_plugin", "qsa_trt", "qsa_trt.polygraphy_plugin"])
def test_importing_touches_no_device_no_tensorrt_and_no_folder(package: str, tmp_path: Path) -> None:
    # bytecode caches are Python's, not ours
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    for variable in ("XDG_CACHE_HOME", "QSA_TRT_CACHE"):
        environment.pop(variable, None)
    command = [sys.executable, "-c", _CODE.format(package=package)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_plugin_works_without_the_toolkit() -> None:
    toolkit = ("qsa_trt", "onnx", "polygraphy")
    code = f"import sys, qsa_plugin; print([m for m in {toolkit} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
