"""Everything wrong with a path is found before work, in one line; what is written is written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsa_plugin.errors import FailedError, InputError
from qsa_trt.patching import files, patch_onnx
from tests.support.graphs import load
from tests.support.originals import MODELS

LM = MODELS / "qsa_lm.onnx"


def error_of(path: Path) -> str:
    with pytest.raises(InputError) as error:
        files.load_model(path)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    return str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.onnx"
    assert error_of(path) == f"MODEL: got {path} (no such file); expected an ONNX file; check the path"


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    assert "a readable file (File name too long); check its permissions" in error_of(tmp_path / ("x" * 300))
    path = tmp_path / "\udcff.onnx"
    path.write_bytes(LM.read_bytes())
    assert error_of(path).endswith("\\udcff.onnx'; expected a file name in UTF-8; rename the file")


def test_folder_is_no_model(tmp_path: Path) -> None:
    assert error_of(tmp_path).startswith(f"MODEL: got {tmp_path} (a folder); expected an ONNX file")


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b' {"flavour": "tensorrt_rtx"}', "(JSON); expected an ONNX file; give a complete ONNX file"),
        (b"PK\x03\x04 and more", "(a zip archive, such as .npz); expected an ONNX file; give a complete ONNX file"),
        (
            (2).to_bytes(8, "little") + b"{}and weights",
            "(safetensors weights); expected an ONNX file; make the model from its checkpoint: qsa-trt export",
        ),
    ],
)
def test_what_lies_beside_models_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(content)
    assert error_of(path) == f"MODEL: got {path} {said}"


def test_a_manifest_leads_to_its_engine(tmp_path: Path) -> None:
    path, engine = tmp_path / "m.engine.json", tmp_path / "m.engine"
    path.write_text("{}")
    engine.write_bytes(b"x")
    assert error_of(path) == f"MODEL: got {path} (JSON); expected an ONNX file; give the model of {engine}"
    with pytest.raises(InputError, match=f"give {engine}, which it describes"):
        files.load_model(path, "FILE", "an ONNX file or a TensorRT engine")


def test_file_cut_between_graph_and_imports(tmp_path: Path) -> None:
    """Parses, but names no opset: as good as truncated."""
    model = load()
    del model.opset_import[:]
    path = tmp_path / "cut.onnx"
    path.write_bytes(model.SerializeToString())
    assert "(no graph in it)" in error_of(path)


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
        self.refused(LM, "another file than MODEL and its external data; choose another name with -o")

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


def test_too_large_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PROTOBUF_LIMIT", 1000)
    with pytest.raises(InputError, match="weights in external data"):
        patch_onnx(LM, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", None, "MODEL: got an empty name; expected an ONNX file"),
        ("absent.onnx", None, r"MODEL: got .*absent\.onnx \(no such file\); expected an ONNX file"),
        (".", None, r"MODEL: got .* \(a folder\); expected an ONNX file"),
        ("m.engine", b"vtrt\0\0\0", r"\(a TensorRT engine\); expected an ONNX file; give the model it was built from"),
    ],
)
def test_what_is_no_model_is_told_apart(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name if name else ""
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(InputError, match=message):
        files.load_model(path)


def test_the_argument_that_named_the_file_is_in_the_error() -> None:
    with pytest.raises(InputError, match="--original: got nope"):
        files.load_model("nope", "--original")
