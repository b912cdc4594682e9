"""Writes a model and its weights, one weight in memory at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from qsa_plugin.errors import FailedError, InputError

from ..new_file import new_file
from ..patching.files import check_writable
from .trace import Weight

#: Above this size weights go to a file of their own, unless an option says otherwise.
INLINE_BYTES = 64 << 20
#: protobuf ends at 2 GiB; the graph itself takes some of it.
_PROTOBUF_LIMIT = 2_000_000_000
#: Offsets of external tensors are multiples of a page, so that runtimes can map them.
_ALIGNMENT = 4096


def data_path(output: Path) -> Path:
    """The file that holds the weights of `output`."""
    return output.with_name(output.name + ".data")


def check_output(output: Path, sources: Iterable[Path]) -> None:
    """Make sure that the model and its weights can be written, and that nothing else is overwritten.

    Args:
        output: OUT.
        sources: files that are read.

    Raises:
        InputError: OUT cannot be written or is a source, or weights lie beside it that belong to no model.
    """
    check_writable(output)
    data = data_path(output)
    if output.exists() and any(output.samefile(source) for source in sources):
        raise InputError("OUT", output, "another file than the checkpoint's", "choose another name with -o")
    if data.exists() and not output.exists():
        raise InputError(
            "OUT", output, f"no {data.name} without its model (half of another export)", f"remove {data} first"
        )
    if data.exists():
        check_writable(data)


def is_external(size: int, wanted: bool | None) -> bool:
    """Whether weights of `size` bytes go to a file of their own.

    Args:
        size: bytes of all weights.
        wanted: what the user asks for; None leaves it to the size.

    Raises:
        InputError: they should stay in the model and do not fit it.
    """
    if wanted is False and size > _PROTOBUF_LIMIT:
        raise InputError("--no-external-data", f"{size:,} bytes of weights", "less than 2 GB", "leave the option out")
    return size > INLINE_BYTES if wanted is None else wanted


def write(
    model: onnx.ModelProto, weights: Sequence[Weight], read: Callable[[Weight], Tensor], output: Path, external: bool
) -> None:
    """Write the model, and its weights into it or beside it; all or nothing.

    Args:
        model: the model; initializers of the weights are added.
        weights: in the order in which they are stored.
        read: gives a weight as the graph wants it, contiguous.
        output: passed `check_output`.
        external: store the weights in `data_path(output)`.

    Raises:
        FailedError: the disk refused.
        QsaError: as `read`.
    """
    data = data_path(output)
    try:
        with contextlib.ExitStack() as stack:
            if external:
                temporary_data = stack.enter_context(new_file(data))
                _write_external(weights, read, temporary_data, data.name)
            else:
                for weight in weights:
                    weight.tensor.raw_data = bytes(_content(read(weight)))
            model.graph.initializer.extend(weight.tensor for weight in weights)
            temporary = stack.enter_context(new_file(output))
            temporary.write_bytes(model.SerializeToString())
            if external:
                temporary_data.replace(data)
            temporary.replace(output)
    except OSError as error:
        raise FailedError(f"cannot write {output}: {error.strerror}; nothing was written") from error


def _write_external(weights: Sequence[Weight], read: Callable[[Weight], Tensor], file: Path, location: str) -> None:
    with file.open("wb") as stream:
        for weight in weights:
            offset = math.ceil(stream.tell() / _ALIGNMENT) * _ALIGNMENT
            stream.seek(offset)
            length = stream.write(_content(read(weight)))
            weight.tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", offset), ("length", length)):
                weight.tensor.external_data.add(key=key, value=str(value))


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")
