"""What TensorRT says: one logger that remembers errors, and failures that name their first cause."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from qsa_plugin import first_error
from qsa_plugin.errors import FailedError


@cache
def logger(trt: Any) -> Any:
    """One logger for the process: TensorRT keeps the first it sees for good. `restart` forgets the errors it heard."""

    class RememberingLogger(trt.ILogger):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.restart(verbose=False)

        def restart(self, verbose: bool) -> None:
            self.errors: list[str] = []
            self.verbose = verbose

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))
            if self.verbose:
                print(f"[TensorRT] {severity.name}: {message}", file=sys.stderr)

    return RememberingLogger()


def failure(what: str, log: Any) -> FailedError:
    """The plugin's first error as the cause, else what TensorRT logged first."""
    cause = first_error()
    if cause is not None:
        failure = FailedError(f"{what}: {cause}")
        failure.__cause__ = cause.error
        return failure
    return FailedError(f"{what}: {log.errors[0] if log.errors else 'TensorRT gave no reason'}")
