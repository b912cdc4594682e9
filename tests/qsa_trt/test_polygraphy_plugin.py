"""Polygraphy finds the plugin by the installed entry point, and is never disturbed by it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import onnx
import pytest

import qsa_plugin
from qsa_plugin.errors import FailedError, MissingPackageError
from qsa_trt.polygraphy_plugin import register_with_polygraphy
from tests.support.qsa_graphs import HIDDEN, ROTARY, qsa_model
from tests.support.requirements import has, needs_rtx

Test = TypeVar("Test")


@pytest.fixture
def flavours(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The flavours that `register` is called with."""
    asked: list[str | None] = []
    monkeypatch.setattr(qsa_plugin, "register", asked.append)
    return asked


def raises(error: Exception) -> Any:
    def register(flavour: str | None = None) -> None:
        raise error

    return register


def configure_polygraphy(monkeypatch: pytest.MonkeyPatch, rtx: bool) -> None:
    monkeypatch.setattr("polygraphy.config.USE_TENSORRT_RTX", rtx)


def test_the_installed_entry_point_is_this_function() -> None:
    (ours,) = [e for e in entry_points(group="polygraphy.run.plugins") if e.name == "qsa-trt"]
    assert ours.load() is register_with_polygraphy


@pytest.mark.parametrize(("rtx", "flavour"), [(True, "tensorrt_rtx"), (False, "tensorrt")])
def test_registers_in_the_flavour_that_polygraphy_uses(
    rtx: bool, flavour: str, flavours: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_polygraphy(monkeypatch, rtx)
    assert register_with_polygraphy() == []
    assert flavours == [flavour]


def test_is_silent_where_no_tensorrt_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_polygraphy(monkeypatch, False)
    monkeypatch.setattr(qsa_plugin, "register", raises(MissingPackageError("TensorRT", "none", "one", "install")))
    assert register_with_polygraphy() == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("rtx", "error"),
    [
        (True, MissingPackageError("TensorRT", "no installation", "the Python package tensorrt_rtx", "install it")),
        (False, FailedError("its registry already holds one of that name")),
        (True, RuntimeError("anything")),
    ],
)
def test_says_in_one_line_what_the_user_should_know_and_never_raises(
    rtx: bool, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_polygraphy(monkeypatch, rtx)
    monkeypatch.setattr(qsa_plugin, "register", raises(error))
    assert register_with_polygraphy() == []
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"qsa-trt: the QsaAttention plugin is not registered: {error}\n"


def rtx(test: Test) -> Test:
    """Mark one test as `needs_rtx` marks a module."""
    for mark in needs_rtx:
        test = mark(test)
    return test


def polygraphy(*arguments: str | Path, use_rtx: bool = True) -> subprocess.CompletedProcess[str]:
    """The command line, in a process of its own."""
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1" if use_rtx else "0"}
    environment.pop("QSA_TRT_TENSORRT", None)
    command = [str(Path(sys.executable).with_name("polygraphy")), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(qsa_model(2), path)
    return path


def test_a_command_without_tensorrt_stays_quiet(model: Path) -> None:
    if has("tensorrt"):
        pytest.skip("tensorrt is installed here: this is about machines without it")
    done = polygraphy("inspect", "model", model, use_rtx=False)
    assert done.returncode == 0
    assert "qsa-trt" not in done.stdout + done.stderr


@rtx
def test_inspect_capability_finds_the_plugin(model: Path, tmp_path: Path) -> None:
    done = polygraphy("inspect", "capability", model, "-o", tmp_path / "capability")
    assert done.returncode == 0, done.stderr
    assert "Graph is fully supported by TensorRT" in done.stdout


@rtx
def test_convert_builds_an_engine_of_plugins(model: Path, tmp_path: Path) -> None:
    def shapes(batch: int, seq: int, start: int) -> list[str]:
        pools = [f"past_key_values_{i}:[2,8,128,2,128]" for i in range(2)]
        return [
            f"hidden_states:[{batch},{seq},{HIDDEN}]",
            f"context_lengths:[{batch}]",
            f"kvcache_start_index:[{start}]",
            f"kv_page_table:[{batch},2,2]",
            f"rope_rotary_cos_sin:[1,256,{ROTARY}]",
            *pools,
        ]

    engine = tmp_path / "model.engine"
    done = polygraphy(
        *("convert", model, "--convert-to", "trt", "-o", engine, "--compute-capabilities", "8.6"),
        *("--trt-min-shapes", *shapes(1, 1, 0), "--trt-opt-shapes", *shapes(2, 1, 2)),
        *("--trt-max-shapes", *shapes(2, 256, 2)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert engine.stat().st_size > 0
