"""Finds the ONNX sample files, which are exports made by real exporters and are not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).parents[3] / "shared" / "samples"


def sample(name: str) -> Path:
    """Path of one sample (`qsa2_raw`); skips the test when the samples are not on this machine."""
    folder = Path(os.environ.get("QSA_TRT_SAMPLES", _DEFAULT))
    path = folder / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"sample {path.name} is not on this machine (set QSA_TRT_SAMPLES to the folder that holds it)")
    return path
