"""The polygraphy commands that compare the plugin in TensorRT with onnxruntime, on the data loader that comes along."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from qsa_plugin import flavour_name
from qsa_plugin.contract import Mode, PoolIO
from qsa_plugin.errors import MissingPackageError

from .data_loader import POOL, QsaData
from .onnx_model import qsa_nodes
from .patching import patch_onnx
from .patching.files import load_model

#: As in the README: two computations at the surface dtype, through every layer of the model.
_ATOL = "5e-2"


def polygraphy_command(model: str | os.PathLike[str]) -> str:
    """One command a line: patching with copied pools, where the file is not like that yet, and the comparison.

    Polygraphy gives every output a buffer of its own, so pools have to be copied (`pool_io` 2).

    Args:
        model: an ONNX file, unpatched or patched.

    Raises:
        InputError: a wrong file, or a patched one whose pools are not copied; RefusedError: it cannot be patched.
    """
    path = Path(model)
    nodes = qsa_nodes(load_model(path).model)
    if nodes and all(node.geometry.pool_io == PoolIO.COPY for node in nodes):
        return _run(path, load_model(path).model)
    copied = path.with_name(path.name.removesuffix(".onnx") + ".copy.onnx")
    if nodes:
        first = "# MODEL as it was before patching, with its weights beside it:\nqsa-trt patch-onnx MODEL"
        return f"{first} -o {_quoted(copied)} --pool-io copy\n{_run(copied, load_model(path).model)}"
    with tempfile.TemporaryDirectory() as folder:
        report = patch_onnx(path, Path(folder) / "copy.onnx", pool_io="copy", external_data="link")
        patched = load_model(report.output).model
    first = f"qsa-trt patch-onnx {_quoted(path)} -o {_quoted(copied)} --pool-io copy"
    return f"{first}\n{_run(copied, patched)}"


def _run(path: Path, model: onnx.ModelProto) -> str:
    """The comparison, with the shapes of the data loader's prefill."""
    data = QsaData(modes=(Mode.PREFILL,))
    data.input_metadata = {name: (dtype, dims) for name, dtype, dims in _inputs(model)}
    (feed,) = data
    shapes: dict[str, Sequence[int]] = {}
    for name, array in feed.items():
        shapes["past_key_values_*" if POOL.fullmatch(name) and name[-1].isdigit() else name] = array.shape
    spelled = [_quoted(f"{name}:[{','.join(map(str, shape))}]") for name, shape in shapes.items()]
    return " \\\n  ".join(
        [
            f"{_environment()}polygraphy run {_quoted(path)} --trt --onnxrt --strongly-typed",
            f"--input-shapes {' '.join(spelled)}",
            f'--data-loader-script "$(python -m qsa_trt.data_loader):prefill" --atol {_ATOL}',
        ]
    )


def _inputs(model: onnx.ModelProto) -> list[tuple[str, np.dtype[np.generic], list[int | None]]]:
    weights = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name not in weights:
            kind = value.type.tensor_type
            dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
            found.append((value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims))
    return found


def _environment() -> str:
    try:
        return "POLYGRAPHY_USE_TENSORRT_RTX=1 " if flavour_name() == "tensorrt_rtx" else ""
    except MissingPackageError:
        return ""


def _quoted(text: str | Path) -> str:
    """For a shell; a name that starts with a dash is no option."""
    word = str(text)
    return shlex.quote(f"./{word}" if word.startswith("-") else word)
