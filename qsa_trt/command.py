"""What all commands have in common: -v and -q, exit codes in the help, and progress on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from .progress import Progress, shown

_Function = TypeVar("_Function", bound=Callable[..., Any])
EPILOG = "Exit codes: 0 done; 1 refused or failed; 2 wrong input, found before any work; 130 interrupted."


@dataclass
class Settings:
    """How much one invocation says on stderr; results on stdout are the same."""

    verbose: bool = False
    quiet: bool = False


def settings() -> Settings:
    """Those of the running command."""
    context = click.get_current_context(silent=True)
    return (context.find_object(Settings) if context else None) or Settings()


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value and parameter.name:
        setattr(context.ensure_object(Settings), parameter.name, True)
    return value


def verbose(text: str) -> Callable[[_Function], _Function]:
    """A decorator that gives a command a -v of its own, as keyword `verbose`."""
    return click.option("-v", "--verbose", is_flag=True, help=text, callback=_remember)


def _common(parameters: list[click.Parameter]) -> None:
    """Add -v, where a command has none of its own, and -q."""
    if not any(parameter.name == "verbose" for parameter in parameters):
        parameters.append(_flag("-v", "--verbose", "Print the traces behind an error."))
    parameters.append(_flag("-q", "--quiet", "Print no progress to stderr."))


def _flag(short: str, long: str, text: str) -> click.Option:
    return click.Option([short, long], is_flag=True, help=text, callback=_remember, expose_value=False)


class Command(click.Command):
    """A command with -v and -q."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **({"epilog": EPILOG} | options))
        _common(self.params)


class Group(click.Group):
    """A group of such commands, and with -v and -q itself."""

    command_class = Command
    group_class = type

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **({"epilog": EPILOG} | options))
        _common(self.params)


def progress(text: str = "") -> AbstractContextManager[Progress]:
    """A spinner while the command works, unless it is told to be quiet, or a log would run through it.

    Args:
        text: what is being done, as long as nobody sets it.
    """
    chosen = settings()
    return shown(text, quiet=chosen.quiet or chosen.verbose)


def say(line: str) -> None:
    """A line on stderr about what is being done."""
    if not settings().quiet:
        click.echo(line, err=True)
