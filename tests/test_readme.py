"""The commands of the README and of the quick start run as they stand, and their links lead somewhere."""

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
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
BLOCKS = [
    (f"{page.stem} {number}", block)
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL))
]


def test_there_are_commands_to_run() -> None:
    assert len(BLOCKS) >= 4
    for command in (
        "qsa-trt patch-onnx",
        "qsa-trt export",
        "qsa-trt build-engine",
        "polygraphy run",
        "polygraphy convert",
    ):
        assert any(command in block for _, block in BLOCKS), command


def marks(block: str) -> list[pytest.MarkDecorator]:
    """Engines are built without a GPU; exports need torch and transformers."""
    return [*needs_rtx, *(needs_oracle if "qsa-trt export" in block else [])]


@pytest.mark.parametrize("block", [pytest.param(block, marks=marks(block), id=name) for name, block in BLOCKS])
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "quick-start.md"], ids=lambda page: page.stem)
def test_python_example_names_exist(page: Path) -> None:
    """The imports of the example; its calls are those of the demo and of the runners' tests."""
    (example,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in example.splitlines():
        if line.startswith("from "):
            module, names = re.match(r"from (\S+) import ([\w, ]+)", line).groups()  # type: ignore[union-attr]
            for name in names.split("#")[0].split(","):
                assert hasattr(__import__(module, fromlist=[name.strip()]), name.strip()), line
