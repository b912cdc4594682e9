"""Skip conditions: every test that needs more than the core dependencies says so here, with the reason."""

from __future__ import annotations

import importlib.util

import pytest

from qsa_trt.device import compute_capability


def has(package: str) -> bool:
    """Whether `package` can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


needs_oracle = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not (has("torch") and has("transformers")),
        reason="torch and transformers are not installed (pip install 'qsa-trt[oracle]')",
    ),
]
needs_rtx = [
    pytest.mark.rtx,
    pytest.mark.skipif(not has("tensorrt_rtx"), reason="tensorrt_rtx is not installed (pip install 'qsa-trt[rtx]')"),
]
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_capability() is None, reason="no NVIDIA GPU, or no driver for it"),
]
needs_onnxruntime = pytest.mark.skipif(
    not has("onnxruntime"), reason="onnxruntime is not installed (pip install 'qsa-trt[ort]')"
)
