"""What an installed wheel brings: two packages and their data, nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_two_top_level_packages(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"qsa_trt", "qsa_plugin"}


def test_every_source_file_and_kernel_is_in_it(wheel: list[str]) -> None:
    for package in (ROOT / "qsa_trt", ROOT / "plugin" / "qsa_plugin"):
        for file in package.rglob("*"):
            if file.suffix in {".py", ".cu", ".cuh", ".typed"}:
                assert file.relative_to(package.parent).as_posix() in wheel


def test_the_sample_model_is_in_it(wheel: list[str]) -> None:
    assert {"qsa_trt/sample/qsa_lm.onnx", "qsa_trt/sample/qsa_lm.config.json"} <= set(wheel)
