"""Half-precision models are raised to fp32: types, values, bodies and weights beside the file."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_trt import fp32
from qsa_trt.fp32 import save_in_fp32
from qsa_trt.patching.files import load_model
from qsa_trt.patching.well_formed import all_tensors
from qsa_trt.recording import open_session, run_session
from tests.support.requirements import needs_onnxruntime

pytestmark = needs_onnxruntime
MODELS = Path(__file__).parents[2] / "models"


def half_model(half: int) -> onnx.ModelProto:
    """y = (x + w) * c, if `on`; w an initializer, c in a Constant, the product in an If body, a Cast in a function."""
    dtype = helper.tensor_dtype_to_np_dtype(half)
    weight = np.full((64, 1024), 1.5, dtype)
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(2, dtype), "w"))
    info = helper.make_tensor_value_info("z", half, [64, 1024])
    branches = [
        helper.make_graph([helper.make_node("Mul", ["s", "c"], ["z"])], "then", [], [info]),
        helper.make_graph([helper.make_node("Identity", ["s"], ["z"])], "else", [], [info]),
    ]
    cast = helper.make_function(
        "f", "Half", ["a"], ["b"], [helper.make_node("Cast", ["a"], ["b"], to=half)], [helper.make_opsetid("", 18)]
    )
    nodes = [
        constant,
        helper.make_node("Half", ["x"], ["h"], domain="f"),
        helper.make_node("Add", ["h", "w"], ["s"]),
        helper.make_node("If", ["on"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    inputs = [helper.make_tensor_value_info("x", half, [64, 1024]), helper.make_tensor_value_info("on", 9, [])]
    outputs = [helper.make_tensor_value_info("y", half, [64, 1024])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(weight, "w")])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, functions=[cast], opset_imports=imports, ir_version=9)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("half", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_everything_is_fp32(half: int, external: bool, tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(half_model(half), path, save_as_external_data=external, location="half.data")
    raised = save_in_fp32(load_model(path), tmp_path / "full.onnx", {})
    assert {t.data_type for t in all_tensors(raised.model)} == {TensorProto.FLOAT}
    assert raised.external == ("full.onnx.data",)  # 256 KiB are no longer inline
    x = np.full((64, 1024), 1 / 3, np.float32)  # no half type holds it
    for on, expected in ((True, (x + 1.5) * 2), (False, x + 1.5)):
        values = run_session(open_session(raised.model, raised.folder), {"x": x, "on": np.array(on)})
        assert values["y"].dtype == np.float32
        np.testing.assert_allclose(values["y"], expected, rtol=1e-6)  # one rounding of a sum, one of a product


def test_exact_values_take_the_place_of_rounded_ones(tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(half_model(TensorProto.FLOAT16), path)
    exact = np.full((64, 1024), 1.50001, np.float32)
    raised = save_in_fp32(load_model(path), tmp_path / "full.onnx", {"w": exact})
    assert np.array_equal(np.fromfile(tmp_path / "full.onnx.data", np.float32).reshape(exact.shape), exact)
    assert {t.name for t in raised.model.graph.initializer} == {"w"}


def test_fp32_models_stay_where_they_are(tmp_path: Path) -> None:
    source = load_model(MODELS / "qsa_lm.onnx")
    assert save_in_fp32(source, tmp_path / "full.onnx", {}) is source
    assert not list(tmp_path.iterdir())


def test_other_types_are_copied_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers in external data end up in the new file, unchanged."""
    monkeypatch.setattr(fp32, "_INLINE_BYTES", 0)
    ids = numpy_helper.from_array(np.arange(512), "ids")
    weight = numpy_helper.from_array(np.ones(512, ml_dtypes.bfloat16), "w")
    nodes = [helper.make_node("Gather", ["w", "ids"], ["y"])]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("y", 16, [512])], [ids, weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    raised = save_in_fp32(load_model(tmp_path / "m.onnx"), tmp_path / "full.onnx", {})
    stored = onnx.load(raised.path)
    assert np.array_equal(numpy_helper.to_array(stored.graph.initializer[0]), np.arange(512))
    assert numpy_helper.to_array(stored.graph.initializer[1]).tolist() == [1.0] * 512
