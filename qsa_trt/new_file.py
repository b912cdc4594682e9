"""Writes files all or nothing: a temporary file beside the target, moved onto it when it is complete."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qsa_plugin.errors import InputError


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A new empty file beside `target`, to be moved onto it when it is complete; whatever is left of it goes.

    Raises:
        InputError: `target` is /dev/stdout or the like, which the file would replace.
    """
    if target.is_symlink() and target.readlink().is_relative_to("/proc"):
        raise InputError("OUT", target, "a regular file, no stream of a process", "name the file to write")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    path = Path(name)
    try:
        path.chmod(0o666 & ~_umask())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
