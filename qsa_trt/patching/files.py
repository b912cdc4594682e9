"""Reads and writes ONNX files: everything that can be wrong with a path is found before any work starts."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from qsa_plugin.errors import FailedError, InputError

from ..new_file import new_file
from .external_data import is_external, set_location
from .well_formed import all_tensors, check_well_formed

#: What becomes of the external data when the model goes to another folder.
ExternalData = Literal["copy", "link", "reference"]
PATCHED_SUFFIX = ".qsa.onnx"
_PROTOBUF_LIMIT = (1 << 31) - 1
_EXPORT_AGAIN = "give a complete ONNX file"
#: What stands in TensorRT engines after their first byte, which tells the flavour.
ENGINE_MAGIC = b"trt"
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

    @property
    def external_files(self) -> tuple[Path, ...]:
        """The files with weights."""
        return tuple(self.folder / location for location in self.external)


@dataclass(frozen=True)
class AddedData:
    """New weights beside a model.

    Attributes:
        location: the file's name, in the model's folder.
        write: writes its content.
    """

    location: str
    write: Callable[[BinaryIO], None]


def load_model(path: str | os.PathLike[str], what: str = "MODEL", expected: str = "an ONNX file") -> ModelFile:
    """Load a model without its external data.

    Args:
        path: the file.
        what: the argument it came by, for errors.
        expected: what that argument takes, for errors.

    Raises:
        InputError: no such file, empty, truncated, not ONNX, or malformed as `check_well_formed` says.
    """
    if not os.fspath(path):
        raise InputError(what, "an empty name", expected, "check the path")
    path = Path(path)
    try:
        if not path.is_file():
            state = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            raise InputError(what, f"{path} ({state})", expected, "check the path")
        str(path).encode()
        data = path.read_bytes()
    except UnicodeEncodeError as error:  # TensorRT and onnx open files by names in UTF-8
        raise InputError(what, ascii(str(path)), "a file name in UTF-8", "rename the file") from error
    except OSError as error:
        raise InputError(what, path, f"a readable file ({error.strerror})", "check its permissions") from error
    if data[1:4] == ENGINE_MAGIC:
        raise InputError(what, f"{path} (a TensorRT engine)", expected, "give the model it was built from")
    if not data:
        raise InputError(what, f"{path} (empty)", expected, _EXPORT_AGAIN)
    if other := _other_format(data):
        raise InputError(what, f"{path} ({other})", expected, _instead(path, other, "engine" in expected))
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise InputError(what, f"{path} (not ONNX, or truncated)", expected, _EXPORT_AGAIN) from error
    if not model.ir_version or not model.opset_import or not model.graph.node:
        raise InputError(what, f"{path} (no graph in it)", expected, _EXPORT_AGAIN)
    return ModelFile(path, model, check_well_formed(model, path.parent))


_JSON, _SAFETENSORS, _ARCHIVE = "JSON", "safetensors weights", "a zip archive, such as .npz"


def _other_format(data: bytes) -> str | None:
    """What a file is that people have beside a model and that is none."""
    if data.lstrip()[:1] in (b"{", b"["):
        return _JSON
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data):
        return _SAFETENSORS
    return _ARCHIVE if data[:4] == b"PK\x03\x04" else None


def _instead(path: Path, other: str, engines: bool) -> str:
    """What to give instead. engines: the argument takes engines too."""
    described = path.with_suffix("")
    if other == _JSON and described.is_file():
        return f"give {described}, which it describes" if engines else f"give the model of {described}"
    return "make the model from its checkpoint: qsa-trt export" if other == _SAFETENSORS else _EXPORT_AGAIN


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


def check_output(source: ModelFile, output: Path, external_data: ExternalData = "copy") -> None:
    """Make sure that `output` can be written, and that writing it destroys nothing.

    Raises:
        InputError: as `check_writable`; OUT is MODEL itself or a file of its external data, or another file there has
            the name of that data; `reference` is asked for, and the data does not lie below OUT's folder.
    """
    check_writable(output)
    if output.exists() and any(output.samefile(file) for file in (source.path, *source.external_files)):
        raise InputError("OUT", output, "another file than MODEL and its external data", _OTHER_NAME)
    folder = output.parent.resolve()
    for location in source.external if external_data == "reference" else ():
        if not (source.folder / location).resolve().is_relative_to(folder):
            raise InputError(
                "--external-data",
                f"reference, with OUT in {output.parent}",
                f"OUT in a folder above {location}, since a location may not leave the model's folder",
                "choose another folder, copy or link",
            )
    for file, target in _moves(source, output, external_data):
        if output in (target, *target.parents) or not target.resolve().is_relative_to(folder):
            raise InputError("OUT", output, f"a place where {target} can hold weights", _OTHER_NAME)
        if target.exists() and not (target.samefile(file) or filecmp.cmp(file, target, shallow=False)):
            raise InputError(
                "OUT",
                output,
                f"a folder without another file {target.relative_to(output.parent)}",
                "choose another folder: weights lie there",
            )


def save_model(
    model: onnx.ModelProto,
    source: ModelFile,
    output: Path,
    external_data: ExternalData = "copy",
    accept: Callable[[Path], None] = lambda _: None,
    added: AddedData | None = None,
) -> tuple[str, ...]:
    """Write the model and, when it goes to another folder, bring its external data along; all or nothing.

    Args:
        model: what to write; with `reference`, its locations are changed.
        source: the file that it was made from.
        output: passed `check_output`.
        external_data: what becomes of the data when `output` is in another folder than `source`.
        accept: looks at the complete file, under a temporary name in its folder, and raises to keep it out.
        added: weights that are new, in a file beside `output`.

    Returns:
        What a user should know about linked data.

    Raises:
        InputError: the model is too large for one file.
        FailedError: the disk refused.
    """
    if external_data == "reference":
        _refer(model, source, output)
    notes: list[str] = []
    made: list[Path] = []
    try:
        for file, target in _moves(source, output, external_data):
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                made.append(target)
                notes += _place(file, target, external_data)
        with new_file(output) as temporary:
            if added is None:
                temporary.write_bytes(_serialize(model, source.path))
                accept(temporary)
                temporary.replace(output)
            else:
                _write_with_data(model, source, output, temporary, accept, added)
    except BaseException as error:
        for target in made:
            target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FailedError(f"cannot write {output}: {error.strerror}; nothing was written") from error
        raise
    return tuple(notes)


def _write_with_data(
    model: onnx.ModelProto,
    source: ModelFile,
    output: Path,
    temporary: Path,
    accept: Callable[[Path], None],
    added: AddedData,
) -> None:
    """Write new weights and the model that reads them; no older file at `output` survives with other weights."""
    data = output.with_name(added.location)
    mine = [t for t in all_tensors(model) if is_external(t) and added.location in (e.value for e in t.external_data)]
    with new_file(data) as temporary_data:
        with temporary_data.open("wb") as file:
            added.write(file)
        for location in (temporary_data.name, added.location):
            for tensor in mine:
                set_location(tensor, location)
            temporary.write_bytes(_serialize(model, source.path))
            if location != added.location:
                accept(temporary)
        output.unlink(missing_ok=True)
        temporary_data.replace(data)
        temporary.replace(output)


def _serialize(model: onnx.ModelProto, path: Path) -> bytes:
    too_large = InputError("MODEL", path, "weights in external data", "save it with external data first (over 2 GB)")
    if model.ByteSize() > _PROTOBUF_LIMIT:
        raise too_large
    try:
        return bytes(model.SerializeToString())
    except EncodeError as error:  # a size close to the limit
        raise too_large from error


def _moves(source: ModelFile, output: Path, external_data: ExternalData) -> list[tuple[Path, Path]]:
    """(file, where it has to lie too) of each external file that moves with the model to another folder."""
    if external_data == "reference" or output.parent.resolve() == source.folder.resolve():
        return []
    return [(source.folder / location, output.parent / location) for location in source.external]


def _refer(model: onnx.ModelProto, source: ModelFile, output: Path) -> None:
    """Let every external tensor name its data from the folder of `output`."""
    folder = output.parent.resolve()
    locations = {location: (source.folder / location).resolve().relative_to(folder) for location in source.external}
    for tensor in filter(is_external, all_tensors(model)):
        location = next(entry.value for entry in tensor.external_data if entry.key == "location")
        if location in locations:  # else it is new
            set_location(tensor, locations[location].as_posix())


def _place(file: Path, target: Path, external_data: ExternalData) -> list[str]:
    """Link or copy one file of weights, through a temporary name when it is copied."""
    if external_data == "link":
        try:
            target.hardlink_to(file.resolve())
        except OSError as error:
            notes = [f"{target} is a copy of the weights: they cannot be linked there ({error.strerror})"]
        else:
            return [
                f"{target} and {file} are one file now: a change of one changes both, and the onnx package (not"
                " onnxruntime, not TensorRT) may refuse to load weights that hard links share"
            ]
    else:
        notes = []
    with new_file(target) as temporary:
        shutil.copyfile(file, temporary)
        temporary.replace(target)
    return notes
