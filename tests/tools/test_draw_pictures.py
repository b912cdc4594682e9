"""The pictures in docs/ are those that the code draws."""

from __future__ import annotations

import pytest

from tools.draw_pictures import ROOT, pictures


@pytest.mark.parametrize("name", pictures())
def test_the_committed_picture_is_up_to_date(name: str) -> None:
    committed = (ROOT / "docs" / "pictures" / name).read_text()
    assert committed == pictures()[name], "run: python tools/draw_pictures.py"
