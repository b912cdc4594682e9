"""A runtime for those who write their own loop: pages of sequences, and sessions that run prefill and decode.

`PagePool` says which pages hold which sequence. `OnnxSession`, `LayerSession` and `EngineSession` compute, over pools
in memory or on the GPU, and share everything else.
"""

from __future__ import annotations

from ..rope import default_inv_freq, rope_from_config, rope_table
from .engine_session import EngineSession
from .layer_session import LayerSession
from .layout import LayerPool, PoolLayout
from .onnx_session import OnnxSession
from .pages import Growth, PageCopy, PagePool
from .session import Session

__all__ = [
    "EngineSession",
    "Growth",
    "LayerPool",
    "LayerSession",
    "OnnxSession",
    "PageCopy",
    "PagePool",
    "PoolLayout",
    "Session",
    "default_inv_freq",
    "rope_from_config",
    "rope_table",
]
