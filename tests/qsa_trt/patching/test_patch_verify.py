"""`patch-onnx --verify`: the result is compared with the model before it is kept."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from qsa_plugin.errors import FailedError
from qsa_trt import comparison
from qsa_trt.patching import patch_onnx
from tests.support.originals import MODELS
from tests.support.requirements import needs_onnxruntime

pytestmark = needs_onnxruntime
LM = MODELS / "qsa_lm.onnx"


def test_the_report_holds_the_comparison(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    report = patch_onnx(LM, output, rope_table="initializer", max_positions=60, verify=True)
    assert report.verification is not None
    assert report.verification.model == output
    assert report.verification.passed
    assert {c.phase: c.rows for c in report.verification.comparisons} == {"prefill": 90, "decode": 90}
    assert re.search(r"^  PASSED\nwritten: ", report.summary(), re.MULTILINE)
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]
    assert patch_onnx(LM, output).verification is None


def test_a_difference_keeps_the_result_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.onnx"
    output.write_bytes(b"from before")
    monkeypatch.setattr(comparison, "row_error", lambda a, e: np.full(a.shape[:-1], 1e-3))
    said = f"{output} would differ from {LM}: prefill, logits: largest row error 1.0e-03, bound 1e-05; nothing was"
    with pytest.raises(FailedError, match=re.escape(said)):
        patch_onnx(LM, output, verify=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]
    assert output.read_bytes() == b"from before"


def test_what_is_compared_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    judge = comparison.validate

    def spy(model: Path, **options: object) -> object:
        seen.append(model.read_bytes())
        return judge(model, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "validate", spy)
    patch_onnx(LM, tmp_path / "out.onnx", verify=True)
    assert seen == [(tmp_path / "out.onnx").read_bytes()]


def test_a_dry_run_is_verified_too(tmp_path: Path) -> None:
    report = patch_onnx(LM, tmp_path / "out.onnx", verify=True, dry_run=True)
    assert report.verification is not None
    assert report.verification.passed
    assert not list(tmp_path.iterdir())


def test_a_patched_model_says_how_it_can_be_verified(tmp_path: Path) -> None:
    patched = patch_onnx(LM, tmp_path / "out.onnx").output
    report = patch_onnx(patched, verify=True)
    assert report.warnings == (f"not verified: run qsa-trt validate {patched} --original FILE",)
