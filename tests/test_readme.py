"""The README's commands run as they stand, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.requirements import needs_onnxruntime, needs_oracle, needs_rtx

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_there_are_commands_to_run() -> None:
    assert len(BLOCKS) >= 4
    for command in (
        "qsa-trt patch-onnx",
        "qsa-trt export",
        "qsa-trt build-engine",
        "polygraphy run",
        "polygraphy convert",
    ):
        assert any(command in block for block in BLOCKS), command


def marks(block: str) -> list[pytest.MarkDecorator]:
    """Engines are built without a GPU; exports need torch and transformers."""
    return [*needs_rtx, *(needs_oracle if "qsa-trt export" in block else [])]


@pytest.mark.parametrize("block", [pytest.param(b, marks=marks(b), id=f"block {i}") for i, b in enumerate(BLOCKS)])
@needs_onnxruntime
def test_commands(block: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "models", tmp_path / "models")
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_python_example_names_exist() -> None:
    """The imports of the example; its calls are those of the demo."""
    (example,) = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    for line in example.splitlines():
        if line.startswith("from "):
            module, name = re.match(r"from (\S+) import (\w+)", line).groups()  # type: ignore[union-attr]
            assert hasattr(__import__(module, fromlist=[name]), name), line
