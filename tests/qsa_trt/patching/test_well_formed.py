"""Files that parse as ONNX and still cannot be right are refused before work, in one line that names the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.errors import InputError
from qsa_trt.patching.files import load_model

AGAIN = "; export the model again"


def small_model() -> onnx.ModelProto:
    """y = x + w, with w fp32 [4]."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    weight = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"], name="add")
    graph = helper.make_graph([node], "g", info[:1], info[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def refusal(model: onnx.ModelProto, folder: Path) -> str:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError) as error:
        load_model(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_sound_model_loads(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "m.onnx")
    assert load_model(tmp_path / "m.onnx").external == ()


def _no_inputs(model: onnx.ModelProto) -> None:
    del model.graph.node[0].input[:]


def _no_outputs(model: onnx.ModelProto) -> None:
    del model.graph.node[0].output[:]


def _unknown_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def _wrong_dims(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 5


def _wrong_count(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].float_data[:] = [1.0, 2.0]


def _too_many(model: onnx.ModelProto) -> None:
    model.graph.node[0].input.append("w")


def _contrib_node(model: onnx.ModelProto) -> None:
    """onnx has no schema of onnxruntime's operators."""
    node = helper.make_node("FusedMatMul", ["w"], ["fused"], name="product", domain="com.microsoft")
    model.graph.node.append(node)


def _uneven_split(model: onnx.ModelProto) -> None:
    """onnx's shape inference ends the process on this one."""
    split = helper.make_node("Split", ["w"], ["left", "right"], name="halves", num_outputs=1)
    model.graph.node.append(split)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_inputs, "node add (Add): got 0 inputs; expected at least 2"),
        (_no_outputs, "node add (Add): got 0 outputs; expected at least 1"),
        (_unknown_type, "tensor w: got element type 99; expected a type of this onnx package"),
        (_wrong_dims, "tensor w: got 16 bytes; expected 20 bytes for dims [5]"),
        (_too_many, "node add (Add): got 3 inputs; expected at most 2"),
        (_contrib_node, "node product (FusedMatMul): got 1 inputs; expected at least 2"),
        (_uneven_split, "node halves (Split): got num_outputs 1; expected 2, its outputs"),
        (_wrong_count, "tensor w: got 2 elements; expected 4 for dims [4]"),
    ],
)
def test_malformed_models(spoil: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path) -> None:
    model = small_model()
    spoil(model)
    assert refusal(model, tmp_path) == message + AGAIN


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    data = small_model().SerializeToString()
    path.write_bytes(data.replace(b"\x03add", b"\x03\xffdd"))
    with pytest.raises(InputError, match="got a name that is no UTF-8 text; expected names in UTF-8; export"):
        load_model(path)


def external_model(**entries: str) -> onnx.ModelProto:
    model = small_model()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return model


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "w.data", "length": "16"}, None),
        ({"location": "w.data", "offset": "4"}, None),
        (
            {"location": "w.data", "offset": "8"},
            "external data w.data: got 20 bytes; expected at least 24 bytes, where w ends; copy the whole file next",
        ),
        ({"location": "w.data", "length": "12"}, "external data of w: got length 12; expected 16 for dims [4]"),
        ({"location": "w.data", "offset": "-4"}, "external data of w: got location 'w.data', offset '-4'; expected"),
        ({"location": "w.data", "length": "x"}, "; expected offset and length as numbers from 0; export the model"),
        ({"location": "w" * 300}, "; expected a file in "),
        ({"location": "w\0"}, "external data: got w\\x00; expected a file in "),
        ({"location": ""}, "external data: got nothing; expected a file in "),
        ({}, "external data: got nothing; expected a file in "),
    ],
)
def test_external_data(entries: dict[str, str], message: str | None, tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(bytes(20))
    model = external_model(**entries)
    if message is None:
        onnx.save(model, tmp_path / "m.onnx")
        assert load_model(tmp_path / "m.onnx").external == ("w.data",)
    else:
        assert re.search(re.escape(message), refusal(model, tmp_path))
