"""The polygraphy command lines of the README, as a user types them: no option tells polygraphy of the plugin."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from qsa_trt import data_loader
from qsa_trt.patching import patch_onnx
from tests.support.requirements import needs_onnxruntime, needs_rtx

MODEL = Path(__file__).parents[2] / "models" / "qsa_lm.onnx"
POLYGRAPHY = Path(sysconfig.get_path("scripts")) / "polygraphy"
LOADER = data_loader.__file__
#: Shapes of the data loader's prefill. polygraphy makes its only profile of them; a star stands for every layer.
SHAPES = [
    "input_ids:[2,160]",
    "past_key_values_*:[2,5,128,2,128]",
    "context_lengths:[2]",
    "rope_rotary_cos_sin:[1,256,32]",
    "kvcache_start_index:[0]",
    "kv_page_table:[2,2,2]",
]
SMALLEST = ["input_ids:[1,1]", SHAPES[1], "context_lengths:[1]", SHAPES[3], SHAPES[4], "kv_page_table:[1,2,2]"]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patch_onnx(MODEL, tmp_path_factory.mktemp("patched") / "qsa_lm.qsa.onnx").output


def polygraphy(*arguments: str | Path, rtx: bool = False) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        [POLYGRAPHY, *map(str, arguments)],
        env=os.environ | {"POLYGRAPHY_USE_TENSORRT_RTX": str(int(rtx))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_onnxruntime
def test_run_in_onnxruntime(patched: Path) -> None:
    output = polygraphy("run", patched, "--onnxrt", "--data-loader-script", LOADER, "--validate")
    assert "FAILED" not in output
    for iteration in (0, 1):
        for name in ("logits", "present_key_values_0", "present_key_values_1"):
            assert f"Iteration {iteration} | Validating output: {name} " in output
    assert output.count("is valid") == 6


@needs_onnxruntime
def test_one_function_of_the_loader(patched: Path) -> None:
    output = polygraphy("run", patched, "--onnxrt", "--data-loader-script", f"{LOADER}:decode", "--validate")
    assert output.count("is valid") == 3
    assert "input_ids [dtype=int64, shape=(2, 1)]" in output


def test_inspect(patched: Path) -> None:
    output = polygraphy("inspect", "model", patched)
    assert "Other Opsets: {'qsa': 1}" in output
    assert "past_key_values_1 [dtype=float16, shape=(2, 'num_pages', 128, 2, 128)]" in output


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--input-shapes", *SHAPES], marks=needs_rtx, id="one shape"),
        pytest.param(
            ["--trt-min-shapes", *SMALLEST, "--trt-opt-shapes", *SHAPES, "--trt-max-shapes", *SHAPES],
            marks=needs_rtx,
            id="a range",
        ),
        pytest.param(
            ["--preview-features", "ALIASED_PLUGIN_IO_10_03", "--input-shapes", *SHAPES],
            marks=needs_rtx,
            id="aliased pools",
        ),
    ],
)
def test_convert(tmp_path: Path, options: list[str]) -> None:
    pool_io: Any = "alias" if "--preview-features" in options else "in-place"
    model = patch_onnx(MODEL, tmp_path / "qsa_lm.qsa.onnx", pool_io=pool_io).output
    engine = tmp_path / "qsa_lm.engine"
    polygraphy("convert", model, "--convert-to", "trt", "-o", engine, *options, rtx=True)
    # The plugin's own field, once a layer: it is not there when the local function was inlined.
    assert engine.read_bytes().count(b"indexer_budget") >= 2


def test_compare_tensorrt_and_onnxruntime(tmp_path: Path) -> None:
    """The command is complete and understood; running it takes a GPU that the installed TensorRT supports."""
    model = patch_onnx(MODEL, tmp_path / "qsa_lm.copy.onnx", pool_io="copy").output
    command = ["run", model, "--trt", "--onnxrt", "--strongly-typed", "--input-shapes", *SHAPES]
    command += ["--data-loader-script", f"{LOADER}:prefill", "--atol", "5e-2"]
    script = polygraphy(*command, "--gen-script", "-")
    assert "strongly_typed=True" in script
    assert "Profile().add('input_ids', min=[2, 160], opt=[2, 160], max=[2, 160])" in script
    assert "name='prefill')" in script


def test_the_shapes_are_those_of_the_loader(patched: Path) -> None:
    loader = data_loader.prefill()
    loader.input_metadata = {
        value.name: (
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
            [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim],
        )
        for value in onnx.load(patched).graph.input
    }
    (feed,) = loader
    spelled = {f"{name}:{list(array.shape)}".replace(" ", "") for name, array in feed.items()}
    assert spelled == {shape.replace("*", str(i)) for shape in SHAPES for i in (0, 1)}
