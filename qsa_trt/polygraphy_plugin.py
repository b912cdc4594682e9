"""Makes polygraphy's command line find the plugin: the entry point of the group `polygraphy.run.plugins`.

Polygraphy loads that group at the start of every sub-command, so `run`, `convert` and `inspect` need no option.
"""

from __future__ import annotations

import sys
from typing import Any


def register_with_polygraphy() -> list[Any]:
    """Register the plugin in the TensorRT flavour that polygraphy uses.

    Never raises, since that would break every polygraphy command: without that flavour it does nothing, and anything
    that the user should know goes to stderr in one line.

    Returns:
        The argument groups that the group's contract asks for: none.
    """
    try:
        _register()
    except Exception as error:
        print(f"qsa-trt: the QsaAttention plugin is not registered: {error}", file=sys.stderr)
    return []


def _register() -> None:
    from polygraphy import config

    from qsa_plugin import MissingPackageError, register

    try:
        register("tensorrt_rtx" if config.USE_TENSORRT_RTX else "tensorrt")
    except MissingPackageError:
        if config.USE_TENSORRT_RTX:  # the user asked for it by name
            raise
