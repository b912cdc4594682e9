"""Weights in files beside the model: never loaded, never lost, and never taken from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.errors import InputError
from qsa_trt.patching import files, patch_onnx
from qsa_trt.patching.external_data import read_tensor
from qsa_trt.recording import PatchedSession
from tests.support.graphs import load
from tests.support.originals import MODELS, Original

LM = MODELS / "qsa_lm.onnx"


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """The causal LM with its weights, norms included, in `weights/lm.data` next to it."""
    folder = tmp_path / "source"
    (folder / "weights").mkdir(parents=True)
    path = folder / "lm.onnx"
    onnx.save(load(), path, save_as_external_data=True, location="weights/lm.data", size_threshold=128)
    return path


def logits(path: Path) -> np.ndarray:
    original = Original("qsa_lm")
    session = PatchedSession(path, batch=1, max_kv_len=50, rope=original.rope(50))
    return session.prefill(original.tokens(np.random.default_rng(0), 1, 50), [50]).outputs["logits"]


@pytest.mark.pitfall(33)
def test_external_data_stays_where_it_is(external: Path) -> None:
    """Next to MODEL nothing is copied: OUT refers to the same file."""
    patch_onnx(external, dtype="fp32")
    output = external.with_name("lm.qsa.onnx")
    assert {t.name for t in external.parent.iterdir()} == {"lm.onnx", "lm.qsa.onnx", "weights"}
    assert output.stat().st_size < 400_000
    patch_onnx(LM, external.with_name("inline.onnx"), dtype="fp32")
    assert np.array_equal(logits(output), logits(external.with_name("inline.onnx")))


@pytest.mark.pitfall(33)
def test_external_data_follows_to_another_folder(external: Path, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere" / "out.onnx"
    output.parent.mkdir()
    patch_onnx(external, output, dtype="fp32")
    assert (output.parent / "weights/lm.data").read_bytes() == (external.parent / "weights/lm.data").read_bytes()
    onnx.checker.check_model(output)
    assert logits(output).shape == (1, 50, 128)
    patch_onnx(external, output, dtype="fp32")  # again: the same data is there already


def test_external_data_of_another_model_is_not_overwritten(external: Path, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere" / "out.onnx"
    (output.parent / "weights").mkdir(parents=True)
    (output.parent / "weights/lm.data").write_bytes(b"something else")
    with pytest.raises(InputError, match=r"a folder without another file weights/lm\.data"):
        patch_onnx(external, output)
    assert not output.exists()


def test_missing_external_data(external: Path) -> None:
    (external.parent / "weights/lm.data").unlink()
    text = refusal(external)
    assert text.startswith("external data: got weights/lm.data; expected a file in ")


def referring_to(location: str, folder: Path) -> Path:
    """A model in `folder` with one external tensor."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [info], [tensor])
    path = folder / "m.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        files.load_model(path)
    return str(error.value)


@pytest.mark.parametrize("location", ["../w.data", "/{}/w.data", "link.data", "folder/w.data", "a/../../w.data"])
def test_data_outside_the_folder(location: str, tmp_path: Path) -> None:
    """Up, absolute, and through links to a file and to a folder: all of them are there, none is read."""
    (tmp_path / "w.data").write_bytes(bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").mkdir()
    (folder / "link.data").symlink_to(tmp_path / "w.data")
    (folder / "folder").symlink_to(tmp_path)
    location = location.format(str(tmp_path).strip("/"))
    assert refusal(referring_to(location, folder)).startswith(f"external data: got {location}; expected a path inside")


@pytest.mark.pitfall(35)
def test_data_of_a_local_function_is_judged_too(tmp_path: Path) -> None:
    model = onnx.load(referring_to("../w.data", tmp_path), load_external_data=False)
    weight = helper.make_node("Constant", [], ["c"])
    weight.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=model.graph.initializer[0])
    del model.graph.initializer[:]
    model.functions.append(helper.make_function("f", "F", [], ["c"], [weight], model.opset_import))
    (tmp_path / "f.onnx").write_bytes(model.SerializeToString())
    assert "got ../w.data; expected a path inside" in refusal(tmp_path / "f.onnx")


def test_a_tensor_is_read_alone(tmp_path: Path) -> None:
    """From its offset, as many bytes as its dims say, where no length is stated; a link more does not matter."""
    np.arange(64, dtype=np.float16).tofile(tmp_path / "w.data")
    (tmp_path / "other").hardlink_to(tmp_path / "w.data")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.data")
    tensor.external_data.add(key="offset", value="20")
    assert read_tensor(tensor, tmp_path).tolist() == [[10, 11, 12], [13, 14, 15]]
    assert not tensor.HasField("raw_data")


def test_failed_write_takes_back_the_copies(external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are copied, the model is not: neither stays. Ctrl-C at that moment does the same."""
    output = tmp_path / "elsewhere" / "out.onnx"
    output.parent.mkdir()
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target == output:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch_onnx(external, output)
    assert [p for p in output.parent.rglob("*") if p.is_file()] == []
    assert (external.parent / "weights/lm.data").is_file()


class TestOtherFolder:
    """What `--external-data` does when OUT is in another folder."""

    @staticmethod
    def out(tmp_path: Path) -> Path:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        return folder / "out.onnx"

    def test_link(self, external: Path, tmp_path: Path) -> None:
        output = self.out(tmp_path)
        report = patch_onnx(external, output, dtype="fp32", external_data="link")
        data = output.parent / "weights/lm.data"
        assert data.samefile(external.parent / "weights/lm.data") and not data.is_symlink()
        assert any("are one file now: a change of one changes both" in w for w in report.warnings)
        assert logits(output).shape == (1, 50, 128)
        patch_onnx(external, output, dtype="fp32", external_data="link")  # again: the link is there already

    def test_link_where_the_file_system_has_none(
        self, external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other_device(*_: object) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(Path, "hardlink_to", other_device)
        output = self.out(tmp_path)
        report = patch_onnx(external, output, external_data="link")
        data = output.parent / "weights/lm.data"
        assert data.read_bytes() == (external.parent / "weights/lm.data").read_bytes()
        assert not data.samefile(external.parent / "weights/lm.data")
        said = f"{data} is a copy of the weights: they cannot be linked there (Invalid cross-device link)"
        assert said in report.warnings

    def test_reference(self, external: Path, tmp_path: Path) -> None:
        """OUT above the data: its locations go down to it."""
        output = tmp_path / "out.onnx"
        patch_onnx(external, output, dtype="fp32", external_data="reference")
        assert {p.name for p in tmp_path.iterdir()} == {"source", "out.onnx"}
        assert files.load_model(output).external == ("source/weights/lm.data",)
        patch_onnx(LM, tmp_path / "inline.onnx", dtype="fp32")
        assert np.array_equal(logits(output), logits(tmp_path / "inline.onnx"))
        onnx.checker.check_model(output)

    def test_reference_may_not_leave_the_folder(self, external: Path, tmp_path: Path) -> None:
        output = self.out(tmp_path)
        expected = "expected OUT in a folder above weights/lm.data, since a location may not leave the model's folder"
        with pytest.raises(InputError, match=expected):
            patch_onnx(external, output, external_data="reference")
        assert not list(output.parent.iterdir())

    def test_weights_do_not_go_through_a_link_to_a_third_folder(self, external: Path, tmp_path: Path) -> None:
        output = self.out(tmp_path)
        (tmp_path / "third").mkdir()
        (output.parent / "weights").symlink_to(tmp_path / "third")
        with pytest.raises(InputError, match=r"expected a place where .*/elsewhere/weights/lm\.data can hold weights"):
            patch_onnx(external, output)
        assert not list((tmp_path / "third").iterdir())

    @pytest.mark.parametrize(("location", "name"), [("weights/lm.data", "weights"), ("lm.data", "lm.data")])
    def test_out_may_not_have_the_name_of_the_data(self, location: str, name: str, tmp_path: Path) -> None:
        source = tmp_path / "source" / "lm.onnx"
        (source.parent / location).parent.mkdir(parents=True)
        onnx.save(load(), source, save_as_external_data=True, location=location)
        output = self.out(tmp_path).with_name(name)
        with pytest.raises(InputError, match=rf"expected a place where .*/{location} can hold weights"):
            patch_onnx(source, output)
        assert not list(output.parent.iterdir())


def test_out_may_not_be_the_data(external: Path) -> None:
    data = external.parent / "weights/lm.data"
    before = data.read_bytes()
    with pytest.raises(InputError, match="expected another file than MODEL and its external data"):
        patch_onnx(external, data)
    assert data.read_bytes() == before


#: Runs in a process of its own. VmHWM is its peak since it was started; getrusage's begins with the parent's.
_MEASURED = """
import re, sys
from pathlib import Path
from qsa_trt.patching import patch_onnx
report = patch_onnx(sys.argv[1], sys.argv[2], external_data=sys.argv[3], fuse_qkv=len(sys.argv) > 4)
print(len(report.layers), re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
GIB = 1 << 30


@pytest.mark.pitfall(33)
@pytest.mark.parametrize(
    ("out", "how"),
    [
        ("source/out.onnx", ["copy"]),
        ("out/out.onnx", ["link"]),
        ("out.onnx", ["reference"]),
        ("out.onnx", ["reference", "fuse"]),
    ],
)
def test_five_gigabytes_stay_on_disk(out: str, how: list[str], tmp_path: Path) -> None:
    """A vocabulary that fills 5 GB, in a sparse file that takes no disk; the norms the patcher reads lie behind it."""
    path = tmp_path / "source" / "big.onnx"
    data = path.with_name("big.data")
    data.parent.mkdir()
    (tmp_path / "out").mkdir()
    model = load()
    embedding = next(t for t in model.graph.initializer if t.dims[0] == 128 and t.name.endswith("embed_tokens.weight"))
    rows = 5 * GIB // (4 * embedding.dims[1])
    with data.open("wb") as file:
        file.truncate(rows * embedding.dims[1] * 4)
        for tensor in model.graph.initializer:
            offset = 0
            if tensor is not embedding:
                offset = file.seek(0, os.SEEK_END)
                file.write(numpy_helper.to_array(tensor).tobytes())
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=data.name)
            tensor.external_data.add(key="offset", value=str(offset))
    embedding.dims[0] = rows
    path.write_bytes(model.SerializeToString())
    assert data.stat().st_size > 5 * GIB
    assert data.stat().st_blocks * 512 < GIB // 100
    arguments = [sys.executable, "-c", _MEASURED, path, tmp_path / out, *how]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    layers, peak_kib = map(int, done.stdout.split())
    assert layers == 2
    assert peak_kib * 1024 < GIB
    assert (tmp_path / out).stat().st_size < 1 << 20
    assert sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file()) < GIB // 20
