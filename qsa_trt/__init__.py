"""qsa-trt: patch Qwen Sparse Attention in ONNX into QsaAttention nodes and build TensorRT engines from them."""

from __future__ import annotations

__version__ = "0.1.0"
