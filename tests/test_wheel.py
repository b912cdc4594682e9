"""What a wheel and a source distribution bring, and that the wheel works where the source tree is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.requirements import has, needs_onnxruntime

ROOT = Path(__file__).parents[1]
#: What the tests read beside the packages.
BESIDE = ("tests", "models", "docs", "tools", "README.md", "CHANGELOG.md", "pyproject.toml")
#: Some of every kind: kernels through the compiler, the plugin, the command line, patching and running the sample.
TESTS = (
    "tests/plugin/test_import.py",
    "tests/plugin/test_jit.py",
    "tests/qsa_trt/test_cli.py",
    "tests/qsa_trt/test_selftest.py",
    "tests/qsa_trt/runtime/test_example.py",
)

pytestmark = pytest.mark.skipif(not has("build"), reason="the package build is not installed (pip install build)")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> list[str]:
    (file,) = distributions.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


@pytest.fixture(scope="module")
def source(distributions: Path) -> list[str]:
    (file,) = distributions.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]


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


def test_the_source_distribution_holds_the_sources_alone(source: list[str]) -> None:
    top = {name.split("/")[0] for name in source}
    assert top == {*BESIDE, "qsa_trt", "plugin", "Makefile", "LICENSE", ".gitignore", "PKG-INFO"}
    for file in (ROOT / "plugin" / "qsa_plugin" / "kernels").iterdir():
        assert file.relative_to(ROOT).as_posix() in source


@pytest.mark.slow
@needs_onnxruntime
def test_the_wheel_passes_the_tests_outside_the_source_tree(distributions: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment; the packages themselves come from the wheel alone."""
    python = install(next(distributions.glob("*.whl")), tmp_path / "environment")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in BESIDE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, outside / name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = "import qsa_trt, qsa_plugin; print(qsa_trt.__file__, qsa_plugin.__file__)"
    for arguments in (
        ["-c", where],
        ["-m", "qsa_trt", "cache", "path"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
    ):
        done = subprocess.run(
            [python, *arguments], cwd=outside, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if where in arguments:
            assert all(path.startswith(str(tmp_path)) for path in done.stdout.split()), done.stdout
    assert (python.parent / "qsa-trt").is_file()


def install(wheel: Path, environment: Path) -> Path:
    """An environment with the wheel installed; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "qsa" not in entry.name and not (Path(packages) / entry.name).exists():
            (Path(packages) / entry.name).symlink_to(entry)
    return python
