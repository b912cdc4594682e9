"""QsaAttention: a TensorRT `IPluginV3` plugin for Qwen Sparse Attention, usable without the `qsa_trt` toolkit.

Importing this package touches no device, imports no TensorRT and creates no folder. `register()` makes the plugin
known to TensorRT.
"""

from __future__ import annotations

from .callbacks import CallbackError, clear_errors, first_error, remembered_errors
from .contract import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, Geometry, Mode, PoolIO
from .creator import Registration, register
from .errors import MissingPackageError, QsaError
from .flavour import flavour_name, flavour_version, tensorrt
from .kernel_limits import kernel_refusals
from .rtx_library import ensure_rtx_library

__all__ = [
    "PLUGIN_NAME",
    "PLUGIN_NAMESPACE",
    "PLUGIN_VERSION",
    "CallbackError",
    "Geometry",
    "MissingPackageError",
    "Mode",
    "PoolIO",
    "QsaError",
    "Registration",
    "clear_errors",
    "ensure_rtx_library",
    "first_error",
    "flavour_name",
    "flavour_version",
    "kernel_refusals",
    "register",
    "remembered_errors",
    "tensorrt",
]
