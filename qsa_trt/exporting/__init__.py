"""Exports Hugging Face `qwen4_exp` checkpoints to ONNX, with `QsaAttention` nodes or with plain operators."""

from __future__ import annotations

from .export import export_onnx
from .report import ExportReport

__all__ = ["ExportReport", "export_onnx"]
