"""What does not fit an engine is said before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsa_plugin.errors import InputError
from qsa_trt.runtime.engine_file import cannot_execute, check_engine
from qsa_trt.runtime.layout import load_manifest
from tests.support.fake_engine import write_fake_engine

HERE = {"flavour": "tensorrt_rtx", "version": "1.7", "capability": (8, 6)}


@pytest.fixture(scope="module")
def engine(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "lm.engine"
    write_fake_engine(language_model, path, targets=("SM86", "SM120"))
    return path


def manifest(engine: Path) -> dict[str, Any]:
    return load_manifest(engine.with_name(engine.name + ".json"))


def test_an_engine_of_this_machine_passes(engine: Path) -> None:
    check_engine(engine, manifest(engine), **HERE)


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"flavour": "tensorrt"}, "TensorRT flavour: got tensorrt; expected tensorrt_rtx, which built"),
        ({"version": "1.8"}, "tensorrt_rtx version: got 1.8; expected 1.7, which built"),
        ({"capability": None}, "GPU: got no NVIDIA GPU with a driver is here"),
        ({"capability": (9, 0)}, "and this GPU has 9.0; expected one that tensorrt_rtx executes"),
        ({"capability": (8, 9)}, "compute capability: got 8.9; expected SM86 or SM120, for which"),
    ],
)
def test_what_does_not_fit_this_machine(engine: Path, here: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_engine(engine, manifest(engine), **(HERE | here))


def test_a_version_compatible_engine_runs_in_another_version(engine: Path) -> None:
    described = manifest(engine)
    described["flags"]["version_compatible"] = True
    check_engine(engine, described, **(HERE | {"version": "1.8"}))


def test_a_lean_runtime_executes_engines_of_the_full_one(engine: Path) -> None:
    described = manifest(engine)
    described["tensorrt"] = {"flavour": "tensorrt", "version": "11.4"}
    check_engine(engine, described, flavour="tensorrt_lean", version="11.4", capability=(8, 6))


def test_an_engine_that_was_changed_or_is_gone(engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.engine"
    other.write_bytes(b"something else")
    with pytest.raises(InputError, match=r"other\.engine with sha256 [0-9a-f]{12}; .*build the engine again"):
        check_engine(other, manifest(engine), **HERE)
    with pytest.raises(InputError, match=r"absent; expected a readable file \(No such file or directory\)"):
        check_engine(tmp_path / "absent", manifest(engine), **HERE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"expected a readable file \(No such file or directory\)"),
        ("no JSON", "expected what build-engine wrote"),
        ("[]", "expected what build-engine wrote"),
        (json.dumps({"format": 2}), "got format 2; expected format 1"),
    ],
)
def test_files_that_are_no_manifest(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_manifest(path)


def test_what_each_flavour_executes() -> None:
    assert cannot_execute("tensorrt", (9, 0)) is None
    assert cannot_execute("tensorrt_rtx", (12, 0)) is None
    assert "9.0" in str(cannot_execute("tensorrt_rtx", (9, 0)))
    assert "no NVIDIA GPU" in str(cannot_execute("tensorrt", None))
