"""The error tree of the plugin and the toolkit.

Every error that a user can cause reads as one line: what, value, expected, how to fix. `exit_code` is what the
command line returns: 2 for anything that can be found before work starts, 1 for valid input that was refused or failed.
"""

from __future__ import annotations


class QsaError(Exception):
    """Base of every error that this project raises on purpose; never raised itself."""

    exit_code = 1


class InputError(QsaError):
    """Something the user gave is wrong, and this was found before any work was done.

    Args:
        what: the thing that is wrong, by the name the user knows (a file, an option, a tensor).
        value: what came.
        expected: what is legal.
        fix: what to do about it, as an imperative.
    """

    exit_code = 2

    def __init__(self, what: str, value: object, expected: str, fix: str) -> None:
        self.what, self.value, self.expected, self.fix = what, value, expected, fix
        super().__init__(f"{what}: got {value if str(value) else 'nothing'}; expected {expected}; {fix}")


class ContractError(InputError):
    """A shape, dtype or attribute that the QsaAttention contract forbids."""


class MissingPackageError(InputError):
    """A Python package that this command needs is not installed."""


class RefusedError(QsaError):
    """Valid input that cannot be handled: the message names the place and the reason."""


class FailedError(QsaError):
    """Work that was started and failed; the message holds the first known cause."""


class PluginError(FailedError):
    """An exception inside a plugin callback, remembered because TensorRT's bindings swallow it."""
