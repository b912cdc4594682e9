"""Rewrites ONNX models so that every QSA attention is one `QsaAttention` node."""

from __future__ import annotations

from .patch import patch_onnx
from .report import LayerReport, PatchReport, TensorReport

__all__ = ["LayerReport", "PatchReport", "TensorReport", "patch_onnx"]
