"""`qsa-trt inspect` on engines: ENGINE.json and this machine; the engine itself only on request."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsa_plugin.errors import FailedError, InputError, MissingPackageError
from qsa_trt import cli, device
from qsa_trt.building import build_engine
from qsa_trt.inspecting import EngineInspection, engine_file, inspect
from qsa_trt.patching import patch_onnx
from tests.support.originals import MODELS
from tests.support.requirements import needs_rtx

pytestmark = needs_rtx
LM = MODELS / "qsa_lm.onnx"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    patched = patch_onnx(LM, folder / "lm.onnx").output
    return build_engine(patched, folder / "lm.engine", max_kv_len=256, max_seq_len=128, tensorrt="tensorrt_rtx").engine


@pytest.fixture
def engine(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the engine, on a machine with a GPU that TensorRT-RTX knows."""
    shutil.copy(f"{built}.json", tmp_path / "lm.engine.json")
    monkeypatch.setenv("QSA_TRT_TENSORRT", "tensorrt_rtx")
    monkeypatch.setattr(device, "compute_capability", lambda: (12, 0))
    return Path(shutil.copy(built, tmp_path / "lm.engine"))


def look(path: Path, **options: Any) -> EngineInspection:
    found = inspect(path, **options)
    assert isinstance(found, EngineInspection)
    return found


def edit(engine: Path, *keys: str, value: object) -> None:
    """Change one entry of the manifest."""
    path = Path(f"{engine}.json")
    manifest = json.loads(path.read_text())
    section = manifest
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    path.write_text(json.dumps(manifest))


def test_what_the_manifest_tells(engine: Path) -> None:
    found = look(engine)
    assert (found.family, found.size, found.mismatches, found.contents) == (
        "TensorRT-RTX",
        engine.stat().st_size,
        (),
        None,
    )
    text = found.summary()
    digest = hashlib.sha256(engine.read_bytes()).hexdigest()
    for said in (
        "QSA attention layers: 2",
        f"engine sha256 {digest}",
        "with tensorrt_rtx 1.7",
        "surface float16",
        "profile prefill:",
        "profile decode:",
        "pools: 2 pages of 128 tokens a plane, 2 a sequence, 524288 bytes in all",
        "rope table: input rope_rotary_cos_sin, 256 positions",
        "nothing is in the way of loading it here",
        "not deserialised: engines hold code",
    ):
        assert said in text, said
    assert "1x128" in text  # the largest prefill


def test_content_decides_not_the_name(engine: Path) -> None:
    renamed = engine.rename(engine.with_name("model.onnx"))
    found = look(renamed)
    assert found.manifest is None
    assert found.mismatches == (
        f"ENGINE.json: got none; expected the file {renamed}.json; copy it along, or build the engine again",
    )
    model = shutil.copy(LM, engine)
    assert not isinstance(inspect(model), EngineInspection)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("engine", "sha256"), "0" * 64, "; expected 000000000000; build the engine again"),
        (("tensorrt", "flavour"), "tensorrt", "TensorRT flavour: got tensorrt_rtx; expected tensorrt, which built"),
        (("tensorrt", "version"), "1.6.0.1", "expected 1.6.0.1, which built"),
        (("targets",), ["SM86"], "compute capability: got 12.0; expected SM86, for which"),
    ],
)
def test_mismatches(engine: Path, keys: tuple[str, ...], value: object, said: str) -> None:
    edit(engine, *keys, value=value)
    [mismatch] = look(engine).mismatches
    assert said in mismatch
    assert f"mismatch: {mismatch}" in look(engine).summary()


def test_all_mismatches_are_listed(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compute_capability", lambda: None)
    edit(engine, "tensorrt", "version", value="1.6.0.1")
    engine.write_bytes(engine.read_bytes()[:-1])
    hash_, version, gpu = look(engine).mismatches
    assert hash_.startswith("ENGINE: got ")
    assert version.startswith("tensorrt_rtx version: got ")
    assert gpu.startswith("GPU: got no NVIDIA GPU with a driver is here")


def test_no_tensorrt(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise MissingPackageError("TensorRT", "no installation", "the Python package tensorrt", "install it")

    monkeypatch.setattr(engine_file, "flavour_name", missing)
    assert look(engine).mismatches == (
        "TensorRT: got no installation; expected the Python package tensorrt; install it",
    )


def test_a_broken_manifest(engine: Path) -> None:
    Path(f"{engine}.json").write_text("{}")
    with pytest.raises(InputError, match=r"expected what build-engine wrote; build the engine again"):
        inspect(engine)


def test_nothing_is_loaded_unless_asked(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr(engine_file, "tensorrt", load)
    monkeypatch.setattr(engine_file, "register", load)
    look(engine)
    with pytest.raises(AssertionError, match="the engine was loaded"):
        inspect(engine, deserialize=True)


def test_what_tensorrt_refuses_is_one_line(engine: Path) -> None:
    engine.write_bytes(engine.read_bytes()[:100])
    with pytest.raises(FailedError, match=r"lm\.engine cannot be deserialised: \S") as error:
        inspect(engine, deserialize=True)
    assert "\n" not in str(error.value)


class StandIn:
    """A deserialised engine, for machines on which TensorRT loads none."""

    num_io_tensors, num_layers, num_optimization_profiles, device_memory_size_v2 = 2, 3, 2, 4096

    def create_engine_inspector(self) -> SimpleNamespace:
        layers = ["embed", {"Name": "[PluginV3] qsa_0/QsaAttention"}, "Reformatting CopyNode for past_key_values_0"]
        return SimpleNamespace(get_engine_information=lambda _: json.dumps({"Layers": layers}))

    def get_tensor_name(self, index: int) -> str:
        return ("input_ids", "logits")[index]

    def get_tensor_mode(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="INPUT" if name == "input_ids" else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="INT64" if name == "input_ids" else "FLOAT")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, -1)

    def get_tensor_format_desc(self, name: str) -> str:
        return "Row major linear"


def test_what_the_engine_tells(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: StandIn() if data == engine.read_bytes() else None)
    trt = SimpleNamespace(Runtime=lambda _: runtime, LayerInformationFormat=SimpleNamespace(JSON=0))
    log = SimpleNamespace(restart=lambda verbose: None, errors=[])
    monkeypatch.setattr(engine_file, "tensorrt", lambda: trt)
    monkeypatch.setattr(engine_file, "register", lambda: None)
    monkeypatch.setattr(engine_file, "logger", lambda _: log)
    found = look(engine, deserialize=True)
    assert found.contents is not None
    assert found.contents["plugin_layers"] == ["[PluginV3] qsa_0/QsaAttention"]
    assert found.contents["reformats"] == ["Reformatting CopyNode for past_key_values_0"]
    text = found.summary()
    assert "deserialised: 3 layers, of which 1 of the plugin; 2 profiles, 4096 bytes of activations" in text
    assert "reformatted or copied: Reformatting CopyNode for past_key_values_0" in text
    assert json.loads(found.json())["contents"]["tensors"][0] == {
        "name": "input_ids",
        "mode": "input",
        "dtype": "int64",
        "shape": [-1, -1],
        "format": "Row major linear",
    }


def test_command(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(engine), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["mismatches"], found["contents"]) == ("engine", [], None)
    assert found["manifest"]["surface_dtype"] == "float16"
