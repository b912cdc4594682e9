"""Compiles the kernels of many specialisations at once, in processes of their own, into the disk cache.

One process compiles the whole table in about two minutes; the tests would spend most of their time on it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

from qsa_plugin import jit, prefill_launchers
from qsa_plugin.decode_plan import decode_tunings
from qsa_plugin.prefill_launchers import PrefillLaunchers
from qsa_plugin.specialisation import Specialisation

Job = tuple[str, Specialisation, tuple[tuple[str, int], ...]]


def compile_ahead(specialisations: Iterable[Specialisation], portable: bool) -> None:
    """Fill the cache, with portable variants or without; what does not compile is left to the test that needs it."""
    jobs = list(dict.fromkeys(job for spec in specialisations for job in jobs_of(spec, portable)))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(_compile, jobs))


def jobs_of(spec: Specialisation, portable: bool) -> list[Job]:
    """Every (kernel file, specialisation, defines) that the runners load."""
    jobs: list[Job] = []

    def note(name: str, spec: Specialisation, entries: Sequence[str], tuning: Mapping[str, int] | None = None) -> Any:
        jobs.append((name, spec, tuple(sorted((tuning or {}).items()))))
        return [None] * len(entries)

    for capability in [spec.compute_capability] + [(8, 0)] * portable:
        for name, tuning in decode_tunings(spec, capability):
            note(name, spec, [name], tuning)
    with (
        mock.patch.object(jit, "kernels", note),
        mock.patch.object(prefill_launchers, "Launch", mock.Mock()),
        mock.patch.object(prefill_launchers, "_sm_count", lambda: 132),
    ):
        for variant in {False, portable}:
            PrefillLaunchers(spec, spec.geometry, variant)
    return jobs


def _compile(job: Job) -> None:
    name, spec, tuning = job
    with contextlib.suppress(Exception):
        jit.compile_kernel(name, spec, dict(tuning))
