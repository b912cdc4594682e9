"""What the command `qsa-trt` starts: `cli.main`, safe from Ctrl-C before and after it."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def run() -> None:
    """Run the command line and exit with its code."""
    sys.stdout = sys.stdout or _nowhere()  # None where the caller closed it
    sys.stderr = sys.stderr or _nowhere()
    try:
        from .cli import main

        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("qsa-trt: interrupted; no file is left half-written", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # nobody reads the rest of the results
        code = 1
    if code == 130:
        os._exit(code)  # TensorRT may still be building in a thread, which the end of the interpreter would abort
    sys.exit(code)


def _nowhere() -> TextIO:
    """A stream in place of a closed one; it takes the free descriptor, before a file of results gets it."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


if __name__ == "__main__":
    run()
