"""`make demo`: what it prints, what it makes, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_trt.comparison import Comparison, ValidationReport
from tests.support.requirements import needs_onnxruntime, needs_rtx
from tools import demo

pytestmark = [*needs_rtx, needs_onnxruntime]


@pytest.mark.parametrize("worst", [1e-7, 1e-3])
def test_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, worst: float
) -> None:
    passes = worst < 1e-5
    if not passes:
        wrong = Comparison("prefill", "logits", rows=9, ignored=0, error=worst, cosine=0.9, bound=1e-5)
        monkeypatch.setattr(demo, "validate", lambda model: ValidationReport(model, model, (wrong,), ()))
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    assert demo.main() == (0 if passes else 1)
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("PASSED in " if passes else "FAILED in ")
    assert "2 QSA attention layers patched" in out
    assert {f.name for f in tmp_path.iterdir()} == {"qsa_lm.qsa.onnx", "qsa_lm.qsa.engine", "qsa_lm.qsa.engine.json"}


def test_a_missing_model_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", "--model", str(tmp_path / "absent.onnx"), "--out", str(tmp_path)])
    assert demo.main() == 2
    assert capsys.readouterr().err.startswith("demo: error: ")
