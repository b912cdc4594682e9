"""Reads and writes ONNX files: everything that can be wrong with a path is found before any work starts."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper

from qsa_plugin.errors import InputError

from .graph_index import subgraphs

PATCHED_SUFFIX = ".qsa.onnx"
_PROTOBUF_LIMIT = (1 << 31) - 1
_EXPORT_AGAIN = "give a complete ONNX file"


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
        InputError: no such file, empty, truncated, not ONNX, or external data missing or outside the model's folder.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("MODEL", path, "an ONNX file", "check the path")
    try:
        data = path.read_bytes()
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
    external = tuple(dict.fromkeys(info.location for info in _external_infos(model)))
    for location in external:
        _check_external(path, location)
    return ModelFile(path, model, external)


def _check_external(path: Path, location: str) -> None:
    folder = path.parent.resolve()
    target = (folder / location).resolve()
    if not target.is_relative_to(folder):
        raise InputError("external data", location, f"a path inside {path.parent}", "move the data next to the model")
    if not target.is_file():
        raise InputError("external data", location, f"a file in {path.parent}", "copy it next to the model")


def _external_infos(model: onnx.ModelProto) -> Iterator[external_data_helper.ExternalDataInfo]:
    for tensor in all_tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield external_data_helper.ExternalDataInfo(tensor)


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in a graph and its bodies: initializers and attributes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
        for body in subgraphs(node):
            yield from all_tensors(body)


def default_output(model: Path) -> Path:
    """MODEL with `.qsa.onnx` in place of `.onnx`."""
    return model.with_name(model.name.removesuffix(".onnx") + PATCHED_SUFFIX)


def check_output(source: ModelFile, output: Path) -> None:
    """Make sure that `output` can be written, and that writing it destroys nothing.

    Raises:
        InputError: OUT is MODEL itself, a folder, or in a folder that is missing or not writable, or another file
            there has the name of the model's external data.
    """
    if output.exists() and output.samefile(source.path):
        raise InputError("OUT", output, "another file than MODEL", "choose another name with -o")
    if output.is_dir():
        raise InputError("OUT", output, "a file", "name the file to write")
    if not output.parent.is_dir():
        raise InputError("OUT", output, "a file in an existing folder", f"create {output.parent} first")
    if not os.access(output.parent, os.W_OK) or (output.exists() and not os.access(output, os.W_OK)):
        raise InputError("OUT", output, "a writable file", "check the permissions, or choose another name with -o")
    for location, target in _copies(source, output):
        if target.exists() and not filecmp.cmp(source.folder / location, target, shallow=False):
            raise InputError(
                "OUT", output, f"a folder without another file {location}", "choose another folder: weights lie there"
            )


def save_model(model: onnx.ModelProto, source: ModelFile, output: Path) -> None:
    """Write the model and, when it goes to another folder, copies of its external data; all or nothing.

    Raises:
        InputError: the disk refused.
    """
    if model.ByteSize() > _PROTOBUF_LIMIT:
        raise InputError(
            "MODEL", source.path, "weights in external data", "save it with external data first (over 2 GB)"
        )
    try:
        for location, target in _copies(source, output):
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _write(target, source.folder / location)
        _write(output, model.SerializeToString())
    except OSError as error:
        raise InputError(
            "OUT", output, f"a writable file ({error.strerror})", "free space or choose another"
        ) from error


def _copies(source: ModelFile, output: Path) -> list[tuple[str, Path]]:
    """(location, where it has to lie too) of each external file, when the model moves to another folder."""
    if output.parent.resolve() == source.folder.resolve():
        return []
    return [(location, output.parent / location) for location in source.external]


def _write(target: Path, content: bytes | Path) -> None:
    """Write bytes, or copy a file, through a temporary name in the same folder."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, Path):
                with content.open("rb") as origin:
                    shutil.copyfileobj(origin, file)
            else:
                file.write(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
