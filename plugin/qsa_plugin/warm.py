"""Every kernel that a node loads on a target: what the cache needs so that the node's first call compiles nothing."""

from __future__ import annotations

from . import jit
from .decode_runner import QsaSparseDecodeRunner
from .prefill_runner import QsaSparsePrefillRunner
from .specialisation import Specialisation


def kernels_of(specialisation: Specialisation, *, portable: bool = False) -> list[jit.Job]:
    """What the runners of both modes load, found by letting them load; needs no GPU.

    Args:
        specialisation: the node's, on the target.
        portable: what portable runners load.
    """
    with jit.noting() as jobs:
        QsaSparseDecodeRunner(specialisation, specialisation.geometry, portable=portable).preflight()
        QsaSparsePrefillRunner(specialisation, specialisation.geometry, portable).preflight()
    return jobs
