"""What `kernels_of` lists is what the runners load: with it in the cache they compile nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from qsa_plugin import decode_runner, jit, prefill_launchers
from qsa_plugin.decode_runner import QsaSparseDecodeRunner
from qsa_plugin.environment import CACHE_VARIABLE
from qsa_plugin.prefill_runner import QsaSparsePrefillRunner
from qsa_plugin.specialisation import SPECIALISATIONS
from qsa_plugin.warm import kernels_of


def test_runners_find_all_of_their_kernels_in_a_warm_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(jit, "_loaded", {})
    spec = SPECIALISATIONS["smallest"].on("sm_90a")
    jobs = kernels_of(spec)
    for job in jobs:
        jit.compile_kernel(job.name, job.specialisation, dict(job.tuning))
    assert [file for file in jit.cached_files() if file.suffix == ".cubin"] == sorted(job.path for job in jobs)
    monkeypatch.setattr(jit, "compile_source", lambda name, *_: pytest.fail(f"{name} was compiled"))
    loaded: list[Any] = []
    with (
        mock.patch("cuda.core.ObjectCode") as object_code,
        mock.patch.object(prefill_launchers, "Launch", mock.Mock()),
        mock.patch.object(decode_runner, "Launch", mock.MagicMock()),
        mock.patch.object(prefill_launchers, "_sm_count", lambda: 132),
        mock.patch.object(decode_runner, "sm_count", lambda: 132),
    ):
        object_code.from_cubin = lambda code, name: loaded.append(name) or mock.Mock()
        QsaSparseDecodeRunner(spec, spec.geometry).preflight()
        QsaSparsePrefillRunner(spec, spec.geometry).preflight()
    assert sorted(loaded) == sorted(job.name for job in jobs)


def test_noting_ends_with_its_context() -> None:
    with jit.noting() as jobs:
        assert jit.kernels("decode_score", SPECIALISATIONS["smallest"], ["a", "b"]) == [jit.NOTED] * 2
        assert jit.only_notes()
    assert [job.name for job in jobs] == ["decode_score"] and not jit.only_notes()
