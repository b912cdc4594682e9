"""Remembers what goes wrong inside plugin callbacks.

TensorRT's Python bindings print an exception of a callback to stderr and turn it into -1, null, False or 0 bytes, so
that a user sees "could not find any implementation". `callback` wraps every method that TensorRT calls; the engine
builder and the runtime ask `first_error()` for the cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .errors import PluginError

#: Errors kept: the first ones hold the cause, later ones follow from it.
CAPACITY = 16

_errors: list[CallbackError] = []
_lock = threading.Lock()


@dataclass(frozen=True)
class CallbackError:
    """One exception of a callback: the layer (empty when TensorRT has not told it), the method, the exception."""

    layer: str
    method: str
    error: BaseException

    def __str__(self) -> str:
        cause = str(self.error) or type(self.error).__name__
        return f"plugin layer {self.layer!r}, {self.method}: {cause}"

    def as_plugin_error(self) -> PluginError:
        """A `PluginError` with this text; raise it `from` `self.error`."""
        return PluginError(str(self))


def remembered_errors() -> tuple[CallbackError, ...]:
    """The remembered errors, oldest first, at most `CAPACITY`."""
    with _lock:
        return tuple(_errors)


def first_error() -> CallbackError | None:
    """The first remembered error since `clear_errors`, which is the cause of those after it."""
    with _lock:
        return _errors[0] if _errors else None


def clear_errors() -> None:
    """Forget all remembered errors; call it before a build or a run whose cause of failure shall be known."""
    with _lock:
        _errors.clear()


class _Layer(Protocol):
    layer_name: str


_Self = TypeVar("_Self", bound=_Layer)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def callback(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Decorate a method that TensorRT calls: whatever it raises (Ctrl-C too) is remembered and raised on."""

    @wraps(method)
    def remembering(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            remember(self.layer_name, method.__name__, error)
            raise

    return remembering


def remember(layer: str, method: str, error: BaseException) -> None:
    """Add one error to the memory."""
    with _lock:
        if len(_errors) < CAPACITY:
            _errors.append(CallbackError(layer, method, error))
