"""Reads and writes ONNX files: everything that can be wrong with a path is found before any work starts."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from qsa_plugin.errors import FailedError, InputError

from .well_formed import check_well_formed

PATCHED_SUFFIX = ".qsa.onnx"
_PROTOBUF_LIMIT = (1 << 31) - 1
_EXPORT_AGAIN = "give a complete ONNX file"
_OTHER_NAME = "choose another name with -o"


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file as it was loaded, its external data left on disk."""

    path: Path
    model: onnx.ModelProto
    #: Files with weights, relative to the model's folder.
    external: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the external data lies."""
        return self.path.parent


def load_model(path: str | os.PathLike[str]) -> ModelFile:
    """Load a model without its external data.

    Raises:
        InputError: no such file, empty, truncated, not ONNX, or malformed as `check_well_formed` says.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise InputError("MODEL", path, "an ONNX file", "check the path")
        str(path).encode()
        data = path.read_bytes()
    except UnicodeEncodeError as error:  # TensorRT and onnx open files by names in UTF-8
        raise InputError("MODEL", ascii(str(path)), "a file name in UTF-8", "rename the file") from error
    except OSError as error:
        raise InputError("MODEL", path, f"a readable file ({error.strerror})", "check its permissions") from error
    if not data:
        raise InputError("MODEL", f"{path} (empty)", "an ONNX file", _EXPORT_AGAIN)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise InputError("MODEL", f"{path} (not ONNX, or truncated)", "an ONNX file", _EXPORT_AGAIN) from error
    if not model.ir_version or not model.opset_import or not model.graph.node:
        raise InputError("MODEL", f"{path} (no graph in it)", "an ONNX file", _EXPORT_AGAIN)
    return ModelFile(path, model, check_well_formed(model, path.parent))


def default_output(model: Path) -> Path:
    """MODEL with `.qsa.onnx` in place of `.onnx`."""
    return model.with_name(model.name.removesuffix(".onnx") + PATCHED_SUFFIX)


def check_writable(output: Path) -> None:
    """Make sure that a file can be written, by making and removing an empty one beside it.

    Raises:
        InputError: it is a folder, a device or a pipe, or in a folder that is missing or not writable.
    """
    try:
        if output.is_dir():
            raise InputError("OUT", output, "a file", "name the file to write")
        if output.exists() and not output.is_file():
            raise InputError("OUT", output, "a regular file, no device or pipe", _OTHER_NAME)
        if not output.parent.is_dir():
            raise InputError("OUT", output, "a file in an existing folder", f"create {output.parent} first")
        if output.exists() and not os.access(output, os.W_OK):
            raise InputError("OUT", output, "a writable file", "check the permissions, or " + _OTHER_NAME)
        str(output).encode()
        with new_file(output):
            pass
    except UnicodeEncodeError as error:
        raise InputError("OUT", ascii(str(output)), "a file name in UTF-8", _OTHER_NAME) from error
    except OSError as error:
        raise InputError(
            "OUT", output, f"a writable file ({error.strerror})", "check the permissions, or " + _OTHER_NAME
        ) from error


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A new empty file beside `target`, to be moved onto it when it is complete; whatever is left of it goes."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    path = Path(name)
    try:
        path.chmod(0o666 & ~_umask())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def check_output(source: ModelFile, output: Path) -> None:
    """Make sure that `output` can be written, and that writing it destroys nothing.

    Raises:
        InputError: as `check_writable`; OUT is MODEL itself, or another file there has the name of the model's
            external data.
    """
    check_writable(output)
    if output.exists() and output.samefile(source.path):
        raise InputError("OUT", output, "another file than MODEL", _OTHER_NAME)
    for location, target in _copies(source, output):
        if target.exists() and not filecmp.cmp(source.folder / location, target, shallow=False):
            raise InputError(
                "OUT", output, f"a folder without another file {location}", "choose another folder: weights lie there"
            )


def save_model(model: onnx.ModelProto, source: ModelFile, output: Path) -> None:
    """Write the model and, when it goes to another folder, copies of its external data; all or nothing.

    Raises:
        InputError: the model is too large for one file.
        FailedError: the disk refused.
    """
    content = _serialize(model, source.path)
    copied: list[Path] = []
    try:
        for location, target in _copies(source, output):
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                copied.append(target)
                _write(target, source.folder / location)
        _write(output, content)
    except BaseException as error:
        for target in copied:
            target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FailedError(f"cannot write {output}: {error.strerror}; nothing was written") from error
        raise


def _serialize(model: onnx.ModelProto, path: Path) -> bytes:
    too_large = InputError("MODEL", path, "weights in external data", "save it with external data first (over 2 GB)")
    if model.ByteSize() > _PROTOBUF_LIMIT:
        raise too_large
    try:
        return bytes(model.SerializeToString())
    except EncodeError as error:  # a size close to the limit
        raise too_large from error


def _copies(source: ModelFile, output: Path) -> list[tuple[str, Path]]:
    """(location, where it has to lie too) of each external file, when the model moves to another folder."""
    if output.parent.resolve() == source.folder.resolve():
        return []
    return [(location, output.parent / location) for location in source.external]


def _write(target: Path, content: bytes | Path) -> None:
    """Write bytes, or copy a file, through a temporary name in the same folder."""
    with new_file(target) as temporary:
        if isinstance(content, Path):
            shutil.copyfile(content, temporary)
        else:
            temporary.write_bytes(content)
        temporary.replace(target)
