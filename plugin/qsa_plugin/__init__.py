"""QsaAttention: a TensorRT `IPluginV3` plugin for Qwen Sparse Attention, usable without the `qsa_trt` toolkit.

Importing this package touches no device, imports no TensorRT and creates no folder.
"""

from __future__ import annotations

from .contract import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, Geometry, Mode, PoolIO
from .errors import QsaError

__all__ = ["PLUGIN_NAME", "PLUGIN_NAMESPACE", "PLUGIN_VERSION", "Geometry", "Mode", "PoolIO", "QsaError"]
