"""The sample causal LM, patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_trt.patching import patch_onnx
from tests.support.fake_cuda import cuda
from tests.support.originals import MODELS

__all__ = ["cuda"]


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an fp16 surface and the rope table as an input."""
    path = tmp_path_factory.mktemp("runtime") / "lm.qsa.onnx"
    patch_onnx(MODELS / "qsa_lm.onnx", path)
    return path
