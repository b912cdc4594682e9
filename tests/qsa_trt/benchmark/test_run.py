"""What `qsa-trt bench` finds out before it measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_trt import device
from qsa_trt.cli import main


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compute_capability", lambda: None)


def test_without_a_gpu_it_says_so(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == (
        "qsa-trt: error: GPU: got none; expected an NVIDIA GPU with its driver; run this on a machine that has one\n"
    )


def test_patterns_and_paths_are_checked_first(no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cases", "nonsense"]) == 2
    assert "option --cases: got nonsense" in capsys.readouterr().err
    assert main(["bench", "--json", str(tmp_path / "absent" / "a.json")]) == 2
    assert "option --json" in capsys.readouterr().err
