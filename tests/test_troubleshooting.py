"""docs/troubleshooting.md quotes texts that the code really has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qsa_plugin
import qsa_trt

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)
PACKAGES = [Path(str(package.__file__)).parent for package in (qsa_plugin, qsa_trt)]
CODE = "\n".join(path.read_text() for package in PACKAGES for path in package.rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert len(ROWS) > 15


@pytest.mark.parametrize("text", ROWS)
def test_the_code_says_what_the_page_quotes(text: str) -> None:
    assert text in CODE
