"""`qsa-trt validate --gpu` with the real plugin, on the sample models."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_trt.layer_validation import validate_layers
from qsa_trt.patching import patch_onnx
from tests.support.originals import MODELS
from tests.support.plugin_host import needs_tensorrt
from tests.support.requirements import needs_gpu, needs_onnxruntime

pytestmark = [*needs_gpu, needs_onnxruntime, needs_tensorrt]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("pool_io", ["in-place", "copy"])
def test_every_layer_of_a_causal_lm(dtype: str, pool_io: str, tmp_path: Path) -> None:
    patched = patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "lm.onnx", dtype=dtype, pool_io=pool_io).output
    report = validate_layers(patched)
    assert report.passed, report.summary()
    assert {(r.mode, r.rows > 0) for r in report.layers} == {("prefill", True), ("decode", True)}


def test_an_fp16_layer_that_is_not_patched_yet() -> None:
    report = validate_layers(MODELS / "real_layer_fp16.onnx", lengths=(300, 129), decode_steps=2)
    assert report.passed, report.summary()
