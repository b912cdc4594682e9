"""Rewrites ONNX models so that every QSA attention is one `QsaAttention` node."""
