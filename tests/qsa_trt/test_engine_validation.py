"""`qsa-trt validate ENGINE`, with onnxruntime behind TensorRT's calls; it fails where the engine is another model."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from qsa_plugin.errors import InputError
from qsa_trt import cli
from qsa_trt.engine_validation import validate_engine
from qsa_trt.patching import patch_onnx
from qsa_trt.runtime import engine_session
from tests.support.fake_cuda import FakeDriver, cuda
from tests.support.fake_engine import FakeTensorRT, write_fake_engine
from tests.support.originals import MODELS
from tests.support.requirements import needs_onnxruntime

__all__ = ["cuda"]
pytestmark = needs_onnxruntime


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched sample and an engine of it."""
    path = tmp_path_factory.mktemp("engine")
    patch_onnx(MODELS / "qsa_lm.onnx", path / "lm.onnx")
    write_fake_engine(path / "lm.onnx", path / "lm.engine")
    return path


@pytest.fixture
def engine(folder: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(folder, folder / "lm.onnx", cuda, monkeypatch)
    return folder / "lm.engine"


def install(folder: Path, computes: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = FakeTensorRT(cuda, computes, json.loads((folder / "lm.engine.json").read_text()))
    for name, value in {
        "tensorrt": lambda flavour: trt,
        "flavour_name": lambda flavour: flavour or "tensorrt_rtx",
        "flavour_version": lambda flavour: "1.7",
        "register": lambda flavour: None,
    }.items():
        monkeypatch.setattr(engine_session, name, value)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_an_engine_of_the_file_passes(engine: Path, cuda: FakeDriver, cuda_graph: bool) -> None:
    report = validate_engine(engine, cuda_graph=cuda_graph)
    assert report.passed, report.summary()
    assert report.original == engine.with_name("lm.onnx")
    # the budget and the tail are 67 tokens: 59 of a prompt and 8 decoded
    assert [(c.phase, c.output, c.rows) for c in report.comparisons] == [
        ("prefill", "logits", 59 + 59 + 33),
        ("decode", "logits", 3 * 8),
    ]
    assert all(c.error == 0 for c in report.comparisons)
    assert cuda.launches == (7 if cuda_graph else 0)


def test_an_engine_that_computes_something_else_fails(
    folder: Path, tmp_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.load(str(folder / "lm.onnx"))
    attention = next(node for node in model.graph.node if node.op_type == "QsaAttention")
    next(a for a in attention.attribute if a.name == "attention_scale").f *= 2
    onnx.save(model, str(tmp_path / "other.onnx"))
    install(folder, tmp_path / "other.onnx", cuda, monkeypatch)
    report = validate_engine(folder / "lm.engine", decode_steps=1)
    assert not report.passed and report.summary().endswith("FAILED")


def test_longer_prompts_and_no_decode(engine: Path) -> None:
    report = validate_engine(engine, lengths="150,3", decode_steps=0)
    assert [(c.phase, c.rows) for c in report.comparisons] == [("prefill", 153)]


@pytest.mark.parametrize("options", [{"lengths": [201]}, {"lengths": [1, 1, 1, 1]}, {"decode_steps": -1}])
def test_sizes_that_the_engine_has_no_room_for(engine: Path, options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"lengths and decode steps: got .*expected at most 3 prompts of "):
        validate_engine(engine, **options)  # type: ignore[arg-type]


def test_another_file_than_the_engines(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"patched file: got .*from which the engine was built; give that file with"):
        validate_engine(engine, original=MODELS / "qsa_lm.onnx")
    with pytest.raises(InputError, match=r"patched file: got .*absent.onnx; expected a readable file"):
        validate_engine(engine, original=tmp_path / "absent.onnx")


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = folder / "made.engine"
    engine.write_bytes(b"ftrt")
    (folder / "made.engine.json").write_text((folder / "lm.engine.json").read_text())
    monkeypatch.setattr("qsa_trt.device.compute_capability", lambda: None)
    assert cli.main(["validate", str(engine), "--cuda-graph"]) == 2
    assert "ENGINE: got" in capsys.readouterr().err  # its content is not the one of the description
    assert cli.main(["validate", str(engine), "--gpu"]) == 2
    assert "--gpu and --config: they have no meaning for an engine" in capsys.readouterr().err
    assert cli.main(["validate", str(MODELS / "qsa_lm.onnx"), "--cuda-graph"]) == 2
    assert "--cuda-graph: MODEL is no engine" in capsys.readouterr().err
