"""`qsa-trt validate --print-polygraphy` prints commands that run as they stand, but for TensorRT, which needs a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from qsa_plugin.errors import MissingPackageError
from qsa_trt import cli, polygraphy_command
from qsa_trt.patching import patch_onnx
from tests.support.originals import MODELS
from tests.support.requirements import needs_onnxruntime


@needs_onnxruntime
@pytest.mark.parametrize("name", ["my model.onnx", "-dash.onnx"])
def test_the_commands_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(MODELS / "qsa_lm.onnx", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["validate", f"./{name}", "--print-polygraphy"]) == 0
    printed = capsys.readouterr().out
    assert "--trt --onnxrt" in printed and sorted(p.name for p in tmp_path.iterdir()) == [name]
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", printed.replace("--trt ", "")],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout


def test_a_patched_file_with_copied_pools_needs_one_command(tmp_path: Path) -> None:
    path = patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "lm.onnx", pool_io="copy").output
    assert "patch-onnx" not in polygraphy_command.polygraphy_command(path)


def test_a_patched_file_with_pools_in_place_has_to_be_patched_again(tmp_path: Path) -> None:
    path = patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "lm.onnx").output
    first, second, *_ = polygraphy_command.polygraphy_command(path).splitlines()
    assert first.startswith("# MODEL as it was before patching")
    assert second == f"qsa-trt patch-onnx MODEL -o {tmp_path / 'lm.copy.onnx'} --pool-io copy"


@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx", None])
def test_the_variable_that_selects_tensorrt_rtx(flavour: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> str:
        if flavour is None:
            raise MissingPackageError("TensorRT", "none", "one", "install it")
        return flavour

    monkeypatch.setattr(polygraphy_command, "flavour_name", name)
    printed = polygraphy_command.polygraphy_command(MODELS / "qsa_lm.onnx")
    assert ("POLYGRAPHY_USE_TENSORRT_RTX=1" in printed) == (flavour == "tensorrt_rtx")


def test_an_engine_is_none_of_its_business(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.engine").write_bytes(b"ftrt")
    assert cli.main(["validate", str(tmp_path / "x.engine"), "--print-polygraphy"]) == 2
    assert "--print-polygraphy: give the ONNX file" in capsys.readouterr().err
