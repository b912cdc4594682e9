"""`qsa-trt doctor`: every illness is found, has a remedy, and decides the exit code when it stops the main job."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.pathfinder
import pytest

import qsa_plugin.flavour
from qsa_plugin.environment import CACHE_VARIABLE, TENSORRT_VARIABLE
from qsa_plugin.errors import FailedError, InputError, MissingPackageError
from qsa_trt import cli, device, doctor
from qsa_trt.doctor import Finding
from tests.support.requirements import needs_rtx

pytestmark = needs_rtx
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def machine(monkeypatch: Patch, tmp_path: Path) -> None:
    """TensorRT-RTX without a GPU, a cache of the test's own."""
    monkeypatch.setenv(TENSORRT_VARIABLE, "tensorrt_rtx")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(device, "compute_capability", lambda: None)


def examine(subject: str) -> Finding:
    """The one finding about a subject, of a whole examination."""
    [finding] = [f for f in doctor.doctor().findings if f.subject == subject]
    return finding


def fail(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


def test_a_machine_that_builds_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["subject", "status", "found"]
    assert lines[-1] == "models can be patched and built here"
    assert not any(line.startswith("problem: ") for line in lines)
    for subject in ("Python", "numpy", "polygraphy", "tensorrt_rtx", "NVRTC", "CUDA headers", "trial kernel", "plugin"):
        assert examine(subject).status == "ok", subject
    assert examine("GPU") == Finding("GPU", "note", "none, or no driver for it", doctor._NO_GPU)
    assert examine("engines run here").status == "note"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert {"subject": "system", "status": "ok", "found": "Linux x86_64", "remedy": ""} in report["findings"]


def test_a_problem_decides_the_exit_code(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "register", fail(FailedError("the registry holds another one")))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "problem: plugin: run in a fresh process, without other plugin libraries" in lines
    assert lines[-1] == "not all that patching and building need is here: see the problems above"


class TestPackages:
    """Versions of the installed distributions against what qsa-trt asks for."""

    @staticmethod
    def requires(monkeypatch: Patch, *lines: str) -> None:
        monkeypatch.setattr(importlib.metadata, "requires", lambda _: list(lines))

    def test_missing(self, monkeypatch: Patch) -> None:
        self.requires(monkeypatch, "no-such-thing-here<3,>=2.1")
        found = examine("no-such-thing-here")
        assert (found.status, found.found) == ("problem", "not installed")
        assert found.remedy == "pip install 'no-such-thing-here<3,>=2.1'"

    @pytest.mark.parametrize(("line", "wanted"), [("numpy>=99", ">=99"), ("numpy<1.5,>=1", "<1.5,>=1")])
    def test_out_of_bounds(self, monkeypatch: Patch, line: str, wanted: str) -> None:
        self.requires(monkeypatch, line)
        found = examine("numpy")
        assert found.status == "problem"
        assert found.found.endswith(f"; {wanted} is needed")
        assert found.remedy == f"pip install 'numpy{wanted}'"

    def test_extras_do_not_count(self, monkeypatch: Patch) -> None:
        self.requires(monkeypatch, 'no-such-thing-here>=1; extra == "test"')
        assert doctor._requirements() == {}

    def test_what_validation_needs_is_a_note(self, monkeypatch: Patch) -> None:
        monkeypatch.setitem(doctor._EXTRAS, "no-such-thing-here", "tests; pip install 'qsa-trt[x]'")
        found = examine("no-such-thing-here")
        assert (found.status, found.remedy) == ("note", "needed by tests; pip install 'qsa-trt[x]'")

    def test_an_old_python(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(doctor, "_OLDEST_PYTHON", (99, 0))
        assert examine("Python").remedy == "use Python 99.0 or newer"
        assert examine("Python").status == "problem"


class TestTensorrt:
    """Which flavours there are, and which one wins."""

    def test_the_winner_says_why(self, monkeypatch: Patch) -> None:
        assert examine("TensorRT in use").found == "tensorrt_rtx (QSA_TRT_TENSORRT=tensorrt_rtx)"
        monkeypatch.delenv(TENSORRT_VARIABLE)
        monkeypatch.setattr(doctor, "flavour_name", lambda: "tensorrt_rtx")
        assert "the first installed of tensorrt, tensorrt_rtx, tensorrt_lean" in examine("TensorRT in use").found

    def test_none(self, monkeypatch: Patch) -> None:
        missing = fail(MissingPackageError("TensorRT", "no installation", "a package", "install one"))
        monkeypatch.delenv(TENSORRT_VARIABLE)
        for name in ("tensorrt", "flavour_name"):
            monkeypatch.setattr(doctor, name, missing)
        found = examine("TensorRT in use")
        assert found.status == "problem"
        assert found.remedy.startswith("pip install 'qsa-trt[rtx]' (builds without a GPU)")
        assert "engines can be built" not in "".join(finding.remedy for finding in doctor._gpu())

    def test_a_name_that_is_none(self, monkeypatch: Patch) -> None:
        monkeypatch.setenv(TENSORRT_VARIABLE, "tensorflow")
        found = examine("TensorRT in use")
        assert found.status == "problem"
        assert found.remedy == "correct the argument or the variable QSA_TRT_TENSORRT"

    def test_a_broken_installation(self, monkeypatch: Patch) -> None:
        stub = fail(InputError("Python package tensorrt", "version 8.6", "10.15 or newer", "repair it"))
        module = qsa_plugin.flavour.tensorrt("tensorrt_rtx")
        monkeypatch.setattr(doctor, "tensorrt", lambda name: stub() if name == "tensorrt" else module)
        assert examine("tensorrt") == Finding("tensorrt", "note", "version 8.6; expected 10.15 or newer", "repair it")

    def test_one_that_cannot_build(self, monkeypatch: Patch) -> None:
        lean = SimpleNamespace(__file__="/lean/__init__.py", __version__="10.16")
        monkeypatch.setattr(doctor, "tensorrt", lambda name: lean)
        found = examine("TensorRT in use")
        assert (found.status, found.remedy) == (
            "problem",
            "it only runs engines: pip install 'qsa-trt[rtx]' to build them",
        )

    def test_no_link_to_the_rtx_library(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(
            doctor, "ensure_rtx_library", fail(InputError("libtensorrt_rtx.so", "none", "a link", "run once: ln -s"))
        )
        assert examine("RTX library link") == Finding("RTX library link", "problem", "none", "run once: ln -s")


class TestCompiler:
    """NVRTC and the headers that the kernels include."""

    REMEDY = "pip install 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14'"

    def test_no_nvrtc(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", fail(RuntimeError("libnvrtc.so:\n not found")))
        assert examine("NVRTC") == Finding("NVRTC", "problem", "libnvrtc.so: not found", self.REMEDY)

    def test_no_headers(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda _: None)
        assert examine("CUDA headers") == Finding("CUDA headers", "problem", "none", self.REMEDY)

    def test_headers_that_do_not_compile(self, monkeypatch: Patch, tmp_path: Path) -> None:
        (tmp_path / "cuda_fp16.h").write_text("#error broken\n")
        (tmp_path / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
        monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda _: str(tmp_path))
        headers = examine("CUDA headers")
        assert (headers.status, headers.found, headers.remedy) == ("note", f"12.8, {tmp_path}", self.REMEDY)
        assert examine("trial kernel").status == "problem"


class TestGpu:
    """What the GPU can do."""

    @staticmethod
    def gpu(monkeypatch: Patch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(device, "compute_capability", lambda: capability)
        monkeypatch.setattr(doctor, "device_name", lambda: ("NVIDIA Thing", "13.2"))

    def test_one_that_runs_engines(self, monkeypatch: Patch) -> None:
        self.gpu(monkeypatch, (12, 0))
        assert examine("GPU").found == "NVIDIA Thing, compute capability 12.0, driver for CUDA 13.2"
        assert examine("kernels on this GPU").found == "compiled for sm_120"
        assert examine("engines run here") == Finding("engines run here", "ok", "by tensorrt_rtx")

    def test_one_that_this_tensorrt_does_not_run_on(self, monkeypatch: Patch) -> None:
        self.gpu(monkeypatch, (9, 0))
        assert examine("kernels on this GPU").status == "ok"
        found = examine("engines run here")
        assert found.status == "note"
        assert "this GPU has 9.0" in found.found

    def test_one_that_the_kernels_do_not_run_on(self, monkeypatch: Patch) -> None:
        self.gpu(monkeypatch, (7, 0))
        found = examine("kernels on this GPU")
        assert found.status == "note"
        assert "compute capability 7.0 is not supported" in found.found

    def test_full_tensorrt_needs_one(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(doctor, "flavour_name", lambda: "tensorrt")
        found = examine("GPU")
        assert (found.status, found.remedy[:47]) == ("problem", "tensorrt builds for the GPU of this machine: us")


class TestPolygraphy:
    """The entry point."""

    def test_not_seen(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
        found = examine("plugin in polygraphy")
        assert (found.status, found.remedy) == ("note", "pip install qsa-trt in this environment")


class TestCache:
    """The folder of compiled kernels."""

    def test_not_made_yet(self, tmp_path: Path) -> None:
        assert examine("cache") == Finding("cache", "ok", f"{tmp_path / 'cache'} (not made yet)")
        assert not (tmp_path / "cache").exists()

    def test_not_writable(self, monkeypatch: Patch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
        found = examine("cache")
        assert found.status == "note"
        assert found.remedy == f"every process compiles again: set {CACHE_VARIABLE}"

    def test_writable_by_anybody(self, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
        found = examine("cache")
        assert (found.status, found.remedy) == ("note", f"compiled code lies there: chmod o-w {tmp_path / 'cache'}")


def test_a_check_that_fails_itself_is_a_finding(monkeypatch: Patch) -> None:
    def _odd() -> Any:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(doctor, "CHECKS", (_odd, doctor._cache))
    odd, cache = doctor.doctor().findings
    assert odd == Finding("odd", "problem", "ZeroDivisionError: by zero", "report this with its whole text")
    assert cache.status == "ok"


def test_a_device_name_ends_at_its_first_zero() -> None:
    """The driver fills 64 bytes with zeros, and what a longer buffer holds behind them stays."""
    assert doctor.c_string(b"NVIDIA H200" + bytes(53) + b" " * 36) == "NVIDIA H200"
