"""Tensors whose data lies in files beside the model: each is read alone, without the rest of the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper

#: Bits of the element types that share bytes, so that an item size says nothing.
PACKED_BITS = {
    getattr(TensorProto, name): bits
    for name, bits in {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}.items()
    if hasattr(TensorProto, name)
}


def is_external(tensor: TensorProto) -> bool:
    """Whether the tensor's data lies in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def stored_bytes(tensor: TensorProto) -> int | None:
    """Bytes of a tensor's raw form; None for strings, which have none.

    Raises:
        KeyError: an element type that the onnx package does not know.
    """
    if tensor.data_type == TensorProto.STRING:
        return None
    count: int = math.prod(tensor.dims)
    if tensor.data_type in PACKED_BITS:
        return math.ceil(count * PACKED_BITS[tensor.data_type] / 8)
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def read_tensor(tensor: TensorProto, folder: Path | None) -> NDArray[Any]:
    """A tensor's value; the model stays as it is.

    onnx's own reader refuses files that hard links share, and reads to the end of the file where no length is stated.

    Args:
        tensor: of a file that `load_model` accepted.
        folder: where the model lies; None for a model without external data.
    """
    if not is_external(tensor):
        return numpy_helper.to_array(tensor)
    info = external_data_helper.ExternalDataInfo(tensor)
    with ((folder or Path()) / info.location).open("rb") as file:
        file.seek(info.offset or 0)
        data = file.read(stored_bytes(tensor) or 0)
    return numpy_helper.to_array(TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data))


def set_location(tensor: TensorProto, location: str) -> None:
    """Let an external tensor refer to another file, at the same offset."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location
