"""`qsa-trt cache`: counts, clears and warms its own files only."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from qsa_plugin import jit
from qsa_plugin.contract import Geometry
from qsa_plugin.environment import CACHE_VARIABLE
from qsa_plugin.errors import InputError, RefusedError
from qsa_plugin.specialisation import SPECIALISATIONS
from qsa_plugin.warm import kernels_of
from qsa_trt import cache, cli
from qsa_trt.machine_commands import cache_warm_command
from qsa_trt.patching import patch_onnx
from qsa_trt.progress import Progress
from tests.support.fake_engine import write_fake_engine
from tests.support.originals import MODELS

SMALL = Geometry(4, 2, 32, 2, 32, 16, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("qsa_trt.device.compute_capability", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compilations, each of which leaves what a real one does."""
    names: list[str] = []

    def compile_(name: str, source: str, arch: str) -> jit.Cubin:
        names.append(f"{name} {arch}")
        return jit.Cubin(name, b"code", "log")

    monkeypatch.setattr(jit, "compile_source", compile_)
    return names


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["cache", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_warming_compiles_what_the_runners_load_and_only_once(compiled: list[str], folder: Path) -> None:
    progress = Progress()
    report = cache.warm_cache(geometry=SMALL, rotary=16, surface="bf16", arch="sm_90,sm_86", progress=progress)
    [hopper, ampere] = report.specialisations
    assert (hopper.arch, ampere.arch, hopper.surface) == ("sm_90a", "sm_86", "bfloat16")
    assert hopper.geometry == SMALL and hopper.rotary_dims == 16
    expected = [f"{job.name} {job.specialisation.arch}" for spec in (hopper, ampere) for job in kernels_of(spec)]
    assert compiled == expected and report.compiled == len(expected) == progress.done == progress.total
    again = cache.warm_cache(geometry=SMALL, rotary=16, surface="bf16", arch="sm_90a")
    assert (again.compiled, again.found) == (0, len(kernels_of(hopper))) and compiled == expected
    assert f"0 kernels compiled, {again.found} were there, in {folder}" in again.summary()


def test_the_real_geometry_is_the_default(compiled: list[str]) -> None:
    report = cache.warm_cache(arch="sm_120")
    real = SPECIALISATIONS["real-fp16"], SPECIALISATIONS["real-bf16"]
    assert report.specialisations == tuple(spec.on("sm_120") for spec in real)


def test_a_model_and_its_engine_need_the_same_kernels(compiled: list[str], tmp_path: Path) -> None:
    model = patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "lm.onnx").output
    write_fake_engine(model, tmp_path / "lm.engine")
    first = cache.warm_cache(model, arch="sm_80")
    second = cache.warm_cache(tmp_path / "lm.engine.json", arch=["sm_80"])
    assert first.specialisations == second.specialisations and len(first.specialisations) == 1
    assert first.specialisations[0].rotary_dims == 32
    assert (second.compiled, second.found) == (0, first.compiled)
    (tmp_path / "lm.engine").write_bytes(b"vtrt")  # the first bytes of TensorRT-RTX's engines
    assert cache.warm_cache(tmp_path / "lm.engine", arch="sm_80").specialisations == first.specialisations
    with pytest.raises(InputError, match="--rotary: got 64; expected 32, as"):
        cache.warm_cache(model, arch="sm_80", rotary=64)
    with pytest.raises(InputError, match=r"MODEL: got .*; expected no geometry and no surface beside it"):
        cache.warm_cache(model, arch="sm_80", surface="fp16")


def test_all_architectures(compiled: list[str]) -> None:
    report = cache.warm_cache(geometry=SMALL, rotary=16, surface="fp16", arch="all")
    assert len(report.specialisations) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--arch: got nothing; expected an architecture, as no GPU is here; pass --arch sm_90,sm_86"),
        ({"arch": "sm_75"}, "--arch: got sm_75; expected some of sm_80"),
        ({"arch": "sm_80", "geometry": "x"}, "--geometry: got x"),
        ({"arch": "sm_80", "surface": "fp32"}, "--surface: got fp32; expected fp16 or bf16"),
    ],
)
def test_wrong_arguments(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cache.warm_cache(**options)  # type: ignore[arg-type]


def test_an_architecture_of_this_machines_gpu(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsa_trt.device.compute_capability", lambda: (8, 9))
    assert {spec.arch for spec in cache.warm_cache(geometry=SMALL, rotary=16).specialisations} == {"sm_89"}


def test_a_geometry_that_the_kernels_refuse() -> None:
    with pytest.raises(RefusedError, match="head_size"):
        cache.warm_cache(geometry=Geometry(4, 2, 96, 2, 32, 16, 4), arch="sm_80")


def test_other_files_are_neither_counted_nor_deleted(
    compiled: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "size") == (0, f"0 kernels, 0.0 MiB in {folder}\n", "")
    cache.warm_cache(geometry=SMALL, rotary=16, surface="fp16", arch="sm_80")
    count = len(compiled)
    for name in ("letter.txt", "decode_score-sm_80.cubin"):
        (folder / name).write_text("mine")
    leftover = next(folder.glob("*.cubin")).name + "a1_b"
    (folder / leftover).write_text("half")
    size = cache.cache_size()
    assert (size.kernels, size.nbytes) == (count, count * 7 + 4)
    assert run(capsys, "clear") == (0, f"deleted {size.summary()}\n", "")
    assert sorted(file.name for file in folder.iterdir()) == ["decode_score-sm_80.cubin", "letter.txt"]


def test_the_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "path") == (0, f"{folder}\n", "")


def test_a_folder_that_is_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("no folder")
    code, out, err = run(capsys, "warm", "--arch", "sm_80")
    assert (code, out) == (2, "") and "cache folder: got" in err and CACHE_VARIABLE in err and err.count("\n") == 1


def test_the_command_compiles_for_real(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "lm.onnx").output
    code, out, err = run(capsys, "warm", str(model), "--arch", "sm_86")
    assert (code, err) == (0, "")
    assert out.startswith("sm_86   float16   rotary 32\n") and "0 were there" in out
    assert all(file.read_bytes()[:4] == b"\x7fELF" for file in folder.glob("*.cubin"))


def test_every_option_of_warm_is_a_keyword() -> None:
    keywords = set(inspect.signature(cache.warm_cache).parameters)
    assert {p.name for p in cache_warm_command.params if p.expose_value} == keywords - {"progress"}
