"""Finds the TensorRT package to work with: `tensorrt`, else `tensorrt_rtx`, else `tensorrt_lean`.

The three offer one API. Every module that needs TensorRT asks `tensorrt()` here; nothing imports it by name, and
nothing imports it before it is asked for.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

from .environment import TENSORRT_VARIABLE, forced_flavour
from .errors import InputError, MissingPackageError

#: Flavour name -> module names under which it may be installed, in the order of preference.
MODULES = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx",),
    "tensorrt_lean": ("tensorrt_lean", "tensorrt_lean_bindings"),
}
#: The first release of each flavour in which Python `IPluginV3` plugins with aliased I/O work.
OLDEST = {"tensorrt": (10, 15), "tensorrt_rtx": (1, 7), "tensorrt_lean": (10, 15)}
INSTALL = {
    "tensorrt": "pip install 'tensorrt>=10.15'",
    "tensorrt_rtx": "pip install 'qsa-trt[rtx]'",
    "tensorrt_lean": "pip install 'qsa-trt[lean]'",
}


def tensorrt(flavour: str | None = None) -> Any:
    """The TensorRT module in use.

    Args:
        flavour: `tensorrt`, `tensorrt_rtx` or `tensorrt_lean`; None means the environment variable
            `QSA_TRT_TENSORRT`, else the first of the three that is installed.

    Raises:
        MissingPackageError: none of the candidates is installed.
        InputError: the name is not a flavour, or the package is installed but cannot be used.
    """
    return _resolve(flavour or forced_flavour())[1]


def flavour_name(flavour: str | None = None) -> str:
    """The flavour that `tensorrt(flavour)` resolves to; same errors."""
    return _resolve(flavour or forced_flavour())[0]


def flavour_version(flavour: str | None = None) -> str:
    """The version of the TensorRT package that `tensorrt(flavour)` resolves to; same errors."""
    return str(tensorrt(flavour).__version__)


@cache
def _resolve(forced: str | None) -> tuple[str, Any]:
    if forced is not None and forced not in MODULES:
        raise InputError(
            "TensorRT flavour",
            forced,
            " or ".join(MODULES),
            f"correct the argument or the variable {TENSORRT_VARIABLE}",
        )
    candidates = (forced,) if forced else tuple(MODULES)
    for name in candidates:
        module = _import(name)
        if module is not None:
            return name, module
    raise MissingPackageError(
        "TensorRT",
        "no installation",
        "the Python package " + " or ".join(candidates),
        INSTALL[forced] if forced else f"{INSTALL['tensorrt_rtx']}, or {INSTALL['tensorrt']}",
    )


def _import(name: str) -> Any | None:
    """The usable module of a flavour; None when it is not installed."""
    for module_name in MODULES[name]:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise _unusable(name, f"an installation whose import fails: {error}") from error
        except Exception as error:  # a stub without its libraries raises whatever its author chose
            raise _unusable(name, f"an installation whose import fails: {type(error).__name__}: {error}") from error
        else:
            return _check_version(name, module)
    return None


def _check_version(name: str, module: Any) -> Any:
    version = str(getattr(module, "__version__", ""))
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not numbers or not hasattr(module, "IPluginV3OneBuildV2"):
        where = getattr(module, "__file__", None) or list(getattr(module, "__path__", []))
        raise _unusable(name, f"a module without TensorRT's plugin classes, from {where}")
    if numbers < OLDEST[name]:
        raise _unusable(name, f"version {version}")
    return module


def _unusable(name: str, got: str) -> InputError:
    oldest = ".".join(str(n) for n in OLDEST[name])
    others = " or ".join(other for other in MODULES if other != name)
    return InputError(
        f"Python package {name}",
        " ".join(got.split()),
        f"a working {name} {oldest} or newer",
        f"repair it ({INSTALL[name]}), or use another by {TENSORRT_VARIABLE}={others}",
    )
