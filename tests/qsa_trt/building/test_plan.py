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


@pytest.mark.parametrize("target", ["", ","])
def test_a_target_without_a_name_is_refused(model_file: Callable[..., Path], target: str) -> None:
    assert refusal(model_file(), target=[target]).startswith("--target: got nothing; expected one or more of sm_75, ")


def test_workspace_is_checked(model_file: Callable[..., Path]) -> None:
    assert refusal(model_file(), workspace=0) == (
        "--workspace: got 0; expected a positive number of bytes below 2^63, such as 4G or 512M; correct the option"
    )


def test_outputs_are_checked(model_file: Callable[..., Path]) -> None:
    path = model_file()
    folder = path.parent
    other = "choose another name with -o"
    assert refusal(path, output=path) == f"OUT: got {path}; expected another file than those of MODEL; {other}"
    assert refusal(path, output=folder) == f"OUT: got {folder}; expected a file; name the file to write"
    assert refusal(path, output=Path()) == "OUT: got .; expected a file; name the file to write"
    missing = folder / "none" / "x.engine"
    assert refusal(path, output=missing) == (
        f"OUT: got {missing}; expected a file in an existing folder; create {folder / 'none'} first"
    )
    assert refusal(path, output=Path("/proc/x.engine")).startswith(
        "OUT: got /proc/x.engine; expected a writable file ("
    )
    long = folder / ("x" * 240)  # the manifest's name is longer
    assert refusal(path, output=long).startswith(f"OUT: got {long}")
    assert list(folder.iterdir()) == [path]


def test_the_manifest_does_not_replace_the_model(model_file: Callable[..., Path]) -> None:
    path = model_file()
    model = path.rename(path.with_name("x.engine.json"))
    assert refusal(model, output=path.with_name("x.engine")) == (
        f"OUT: got {model}; expected another file than those of MODEL; choose another name with -o"
    )


@pytest.mark.parametrize("path", [Path(), Path("/")])
def test_folders_are_no_models(path: Path) -> None:
    assert refusal(path) == f"MODEL: got {path} (a folder); expected an ONNX file; check the path"


def test_a_manifest_name_that_is_a_folder_is_refused(model_file: Callable[..., Path]) -> None:
    path = model_file()
    (path.parent / "x.engine.json").mkdir()
    assert refusal(path, output=path.parent / "x.engine") == (
        f"OUT: got {path.parent / 'x.engine.json'}; expected a file; name the file to write"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("4G", 4 << 30), ("512M", 512 << 20), ("64k", 64 << 10), ("1e9", 10**9), ("1.5K", 1536), (" 10 ", 10)],
)
def test_bytes_are_read_as_polygraphy_spells_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "G", "four", "-1", "0", "4T", "1e", "0.1", "1e999", "9223372036854775808", "99999999999G", "\u0661G"],
)
def test_other_spellings_of_bytes_are_refused(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_bytes(text)
    assert str(error.value) == (
        f"--workspace: got {text or 'nothing'}; expected a positive number of bytes below 2^63, such as 4G or 512M; "
        "correct the option"
    )
