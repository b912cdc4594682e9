"""Compiles the kernels of many specialisations at once, in processes of their own, into the disk cache.

One process compiles the whole table in about two minutes; the tests would spend most of their time on it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Iterable

from qsa_plugin import jit
from qsa_plugin.jit import Job
from qsa_plugin.specialisation import Specialisation
from qsa_plugin.warm import kernels_of


def compile_ahead(specialisations: Iterable[Specialisation], portable: bool) -> None:
    """Fill the cache, with portable variants or without; what does not compile is left to the test that needs it."""
    jobs = list(dict.fromkeys(job for spec in specialisations for job in jobs_of(spec, portable)))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(_compile, jobs))


def jobs_of(spec: Specialisation, portable: bool) -> list[Job]:
    """Everything that the runners load, on this target and, if `portable`, portably too."""
    return [job for variant in (False, True)[: 1 + portable] for job in kernels_of(spec, portable=variant)]


def _compile(job: Job) -> None:
    with contextlib.suppress(Exception):
        jit.compile_kernel(job.name, job.specialisation, dict(job.tuning))
