"""Everything wrong with a path is found before work, in one line; what is written is written whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from qsa_plugin.errors import FailedError, InputError
from qsa_trt.patching import files, patch_onnx
from qsa_trt.recording import PatchedSession
from tests.support.graphs import load
from tests.support.originals import MODELS, Original

LM = MODELS / "qsa_lm.onnx"


def error_of(path: Path) -> str:
    with pytest.raises(InputError) as error:
        files.load_model(path)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    return str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.onnx"
    assert error_of(path) == f"MODEL: got {path}; expected an ONNX file; check the path"


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    assert "a readable file (File name too long); check its permissions" in error_of(tmp_path / ("x" * 300))
    path = tmp_path / "\udcff.onnx"
    path.write_bytes(LM.read_bytes())
    assert error_of(path).endswith("\\udcff.onnx'; expected a file name in UTF-8; rename the file")


def test_folder_is_no_model(tmp_path: Path) -> None:
    assert error_of(tmp_path).startswith(f"MODEL: got {tmp_path}; expected an ONNX file")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "(empty)"),
        (b"hello, this is no model\n" * 9, "(not ONNX, or truncated)"),
        (b"\x08\x07", "(no graph in it)"),
        (LM.read_bytes()[:-1000], "(not ONNX, or truncated)"),
        (LM.read_bytes()[:1000], "(not ONNX, or truncated)"),
    ],
)
def test_broken_files(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    assert error_of(path) == f"MODEL: got {path} {said}; expected an ONNX file; give a complete ONNX file"


def test_file_cut_between_graph_and_imports(tmp_path: Path) -> None:
    """Parses, but names no opset: as good as truncated."""
    model = load()
    del model.opset_import[:]
    path = tmp_path / "cut.onnx"
    path.write_bytes(model.SerializeToString())
    assert "(no graph in it)" in error_of(path)


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


def test_external_data_stays_where_it_is(external: Path) -> None:
    """Next to MODEL nothing is copied: OUT refers to the same file."""
    patch_onnx(external, dtype="fp32")
    output = external.with_name("lm.qsa.onnx")
    assert {t.name for t in external.parent.iterdir()} == {"lm.onnx", "lm.qsa.onnx", "weights"}
    assert output.stat().st_size < 400_000
    patch_onnx(LM, external.with_name("inline.onnx"), dtype="fp32")
    assert np.array_equal(logits(output), logits(external.with_name("inline.onnx")))


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
    text = error_of(external)
    assert text.startswith("external data: got weights/lm.data; expected a file in ")


@pytest.mark.parametrize("location", ["../lm.data", "/etc/passwd"])
def test_external_data_outside_the_folder(location: str, tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    info = helper.make_tensor_value_info("y", 1, [4])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [info], [tensor])
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    assert error_of(path).startswith(f"external data: got {location}; expected a path inside")


def test_default_output() -> None:
    assert files.default_output(Path("a/b.onnx")) == Path("a/b.qsa.onnx")
    assert files.default_output(Path("a/model.pb")) == Path("a/model.pb.qsa.onnx")


class TestOutput:
    """OUT is judged before any work."""

    @staticmethod
    def refused(output: Path, expected: str) -> None:
        before = LM.read_bytes()
        with pytest.raises(InputError, match=expected) as error:
            patch_onnx(LM, output)
        assert str(error.value).startswith(f"OUT: got {output}; expected ")
        assert LM.read_bytes() == before

    def test_is_the_model(self) -> None:
        self.refused(LM, "another file than MODEL; choose another name with -o")

    def test_is_a_link_to_the_model(self, tmp_path: Path) -> None:
        link = tmp_path / "link.onnx"
        link.symlink_to(LM)
        self.refused(link, "another file than MODEL")

    def test_is_a_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "a file; name the file to write")

    def test_folder_is_missing(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "no" / "out.onnx", "a file in an existing folder; create ")

    def test_not_writable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        output = tmp_path / "out.onnx"
        output.write_bytes(b"read-only")
        self.refused(output, "a writable file; check the permissions, or choose another name with -o")

    def test_folder_is_not_writable(self) -> None:
        self.refused(Path("/proc/out.onnx"), r"a writable file \(.+\); check the permissions, or choose another")

    def test_name_is_too_long(self, tmp_path: Path) -> None:
        self.refused(tmp_path / ("x" * 300), r"a writable file \(File name too long\)")
        self.refused(tmp_path / ("x" * 250), r"a writable file \(File name too long\)")  # with the temporary's suffix
        assert not list(tmp_path.iterdir())

    def test_is_a_pipe(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        self.refused(pipe, "a regular file, no device or pipe; choose another name with -o")
        assert pipe.is_fifo()

    def test_name_is_no_utf8(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"OUT: got '.*\\udcff\.onnx'; expected a file name in UTF-8; choose a"):
            patch_onnx(LM, tmp_path / "\udcff.onnx")


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: the old OUT stays, no temporary file is left."""
    output = tmp_path / "out.onnx"
    output.write_bytes(b"the file from before")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FailedError, match=f"cannot write {output}: No space left on device; nothing was written"):
        patch_onnx(LM, output)
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]
    assert output.read_bytes() == b"the file from before"


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


def test_too_large_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PROTOBUF_LIMIT", 1000)
    with pytest.raises(InputError, match="weights in external data"):
        patch_onnx(LM, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())
