"""What `plan_build` refuses before TensorRT starts to work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsa_plugin.errors import InputError
from qsa_trt.building import engine as engine_module
from qsa_trt.building import parse_bytes, plan_build
from qsa_trt.building.network import parse_targets
from qsa_trt.patching import patch_onnx
from tests.support.requirements import needs_rtx

pytestmark = needs_rtx

MODELS = Path(__file__).parents[3] / "models"


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        plan_build(path, tensorrt="tensorrt_rtx", **options)
    return str(error.value)


def test_a_model_patched_with_an_fp32_surface_is_refused(tmp_path: Path) -> None:
    path = patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "model.qsa.onnx", dtype="fp32").output
    assert re.match("node .*, input qkv: got float32; expected float16 or bfloat16", refusal(path))


def test_an_unpatched_model_is_refused() -> None:
    assert refusal(MODELS / "qsa_lm.onnx").endswith(f"run: qsa-trt patch-onnx {MODELS / 'qsa_lm.onnx'}")


def test_targets_are_for_rtx_only() -> None:
    with pytest.raises(InputError) as error:
        parse_targets(None, "tensorrt", ["sm_86,sm_120"])
    assert str(error.value) == (
        "--target: got sm_86,sm_120; expected no target with tensorrt, which builds for the GPU of this machine; "
        "leave --target out, or use tensorrt_rtx (set QSA_TRT_TENSORRT=tensorrt_rtx)"
    )


def test_the_lean_runtime_does_not_build(model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "flavour_name", lambda _: "tensorrt_lean")
    monkeypatch.setattr(engine_module, "load_tensorrt", lambda _: None)
    assert refusal(model_file()) == (
        "TensorRT flavour: got tensorrt_lean; expected tensorrt or tensorrt_rtx: tensorrt_lean runs engines, it does "
        "not build them; pip install 'qsa-trt[rtx]', or set QSA_TRT_TENSORRT"
    )


def test_targets_are_checked(model_file: Callable[..., Path]) -> None:
    assert refusal(model_file(), target=["sm_86", "sm_90"]) == (
        "--target: got sm_90; expected one or more of sm_75, sm_80, sm_86, sm_89, sm_120, sm_121; correct the option"
    )


def test_workspace_is_checked(model_file: Callable[..., Path]) -> None:
    assert refusal(model_file(), workspace=0) == (
        "--workspace: got 0; expected a positive number of bytes, such as 4G; correct the option"
    )


def test_outputs_are_checked(model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file()
    folder = path.parent
    assert refusal(path, output=path) == (
        f"output {path}: got a file of the model itself; expected another file; give another name with -o"
    )
    assert refusal(path, output=folder) == (f"output {folder}: got a folder; expected a file name; correct -o")
    assert refusal(path, output=folder / "none" / "x.engine") == (
        f"output {folder / 'none' / 'x.engine'}: got no folder {folder / 'none'}; expected an existing folder; "
        "create it, or correct -o"
    )
    monkeypatch.setattr(engine_module.os, "access", lambda *_: False)  # root may write anywhere
    assert refusal(path, output=folder / "x.engine") == (
        f"output {folder / 'x.engine'}: got no right to write in {folder}; expected a writable folder; "
        "give another with -o"
    )


def test_a_manifest_name_that_is_a_folder_is_refused(model_file: Callable[..., Path]) -> None:
    path = model_file()
    (path.parent / "x.engine.json").mkdir()
    assert refusal(path, output=path.parent / "x.engine") == (
        f"output {path.parent / 'x.engine.json'}: got a folder; expected a file name; correct -o"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("4G", 4 << 30), ("512M", 512 << 20), ("64k", 64 << 10), ("1e9", 10**9), ("1.5K", 1536), (" 10 ", 10)],
)
def test_bytes_are_read_as_polygraphy_spells_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "four", "-1", "0", "4T", "1e", "0.1"])
def test_other_spellings_of_bytes_are_refused(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_bytes(text)
    assert str(error.value) == (
        f"--workspace: got {text}; expected a positive number of bytes, such as 4G or 512M; correct the option"
    )
