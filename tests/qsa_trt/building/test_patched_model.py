"""What the builder reads from a patched file, and every refusal before TensorRT is started."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.errors import InputError
from qsa_trt.building.patched_model import PatchedModel, load_patched_model
from tests.support.qsa_graphs import HIDDEN, ROTARY, SMALL, qsa_model


def load(folder: Path, model: onnx.ModelProto) -> PatchedModel:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return load_patched_model(path)


def refusal(folder: Path, model: onnx.ModelProto) -> str:
    with pytest.raises(InputError) as error:
        load(folder, model)
    assert error.value.exit_code == 2
    return str(error.value)


def test_nodes_inputs_and_dims_are_read(tmp_path: Path) -> None:
    model = load(tmp_path, qsa_model(2))
    assert [node.name for node in model.nodes] == ["qsa_0", "qsa_1"]
    assert model.nodes[1].geometry.to_attributes() == pytest.approx(SMALL.to_attributes())  # eps is stored as fp32
    assert model.nodes[1].input("past_key_value") == "past_key_values_1"
    assert model.surface == "float16"
    assert (model.rope.baked, model.rope.positions, model.rope.rotary_dims) == (False, None, ROTARY)
    assert model.symbols["hidden_states"] == ("B", "S", None)
    assert model.symbols["past_key_values_1"] == (None, "N", None, None, None)
    assert model.symbols["kvcache_start_index"] == ("start",)
    assert model.symbols["kv_page_table"] == ("B", None, "M")
    assert model.symbols["rope_rotary_cos_sin"] == (None, "maxPos", "rotary")
    assert model.fixed == {"rotary": ROTARY}


def test_dims_that_the_graph_fixes_are_kept(tmp_path: Path) -> None:
    model = load(tmp_path, qsa_model(batch=3, seq=1, baked_positions=300))
    assert model.fixed == {"B": 3, "S": 1, "maxPos": 300, "rotary": ROTARY}
    assert (model.rope.baked, model.rope.positions) == (True, 300)
    assert "rope_rotary_cos_sin" not in model.inputs


def test_unnamed_dims_of_the_nodes_own_inputs_are_known(tmp_path: Path) -> None:
    proto = qsa_model()
    for value in proto.graph.input[1:]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    model = load(tmp_path, proto)
    assert model.inputs["kv_page_table"].dims == (None, 2, None)
    assert model.symbols["kv_page_table"] == ("B", None, "M")


def test_usual_names_help_where_shapes_cannot_be_inferred(tmp_path: Path) -> None:
    proto = qsa_model(seq="sequence_length")
    proto.opset_import.append(helper.make_opsetid("elsewhere", 1))
    proto.graph.node.insert(0, helper.make_node("Opaque", ["hidden_states"], ["opaque"], domain="elsewhere"))
    for node in proto.graph.node[1:]:
        node.input[:] = ["opaque" if name == "hidden_states" else name for name in node.input]
    assert load(tmp_path, proto).symbols["hidden_states"] == ("B", "S", None)


def test_bf16_is_a_surface(tmp_path: Path) -> None:
    assert load(tmp_path, qsa_model(surface=TensorProto.BFLOAT16)).surface == "bfloat16"


def test_edge_llm_spelling_is_read(tmp_path: Path) -> None:
    proto = qsa_model(domain="trt_edgellm", op_type="QsaAttentionPlugin", plugin_attributes=False)
    (node,) = load(tmp_path, proto).nodes
    assert (node.op_type, node.names_plugin) == ("QsaAttentionPlugin", False)


def test_external_data_files_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(qsa_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert load_patched_model(path).external_files == (tmp_path / "weights.bin",)


def test_unpatched_model_is_sent_to_the_patcher(tmp_path: Path) -> None:
    proto = qsa_model()
    nodes = [helper.make_node("Identity", ["hidden_states"], ["out"])]
    plain = helper.make_model(
        helper.make_graph(nodes, "plain", proto.graph.input[:1], proto.graph.output[:1]), ir_version=10
    )
    path = tmp_path / "model.onnx"
    assert refusal(tmp_path, plain) == (
        f"file {path}: got a model without a QsaAttention node; expected a patched model; "
        f"run: qsa-trt patch-onnx {path}"
    )


def test_fp32_surface_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert refusal(tmp_path, qsa_model(surface=TensorProto.FLOAT)) == (
        "node qsa_0, input qkv: got float32; expected float16 or bfloat16, which are what the CUDA kernels compute in; "
        "patch the original model without --dtype fp32, which is for comparisons in onnxruntime"
    )


def test_other_surfaces_are_refused(tmp_path: Path) -> None:
    proto = qsa_model()
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert refusal(tmp_path, proto) == (
        "node qsa_0, input past_key_value: got double; expected float16 or bfloat16; patch the original model again"
    )


def test_mixed_surfaces_are_refused(tmp_path: Path) -> None:
    proto = qsa_model()
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.BFLOAT16
    assert refusal(tmp_path, proto) == (
        "surface dtype: got float16 (node qsa_0, input qkv) and bfloat16 (node qsa_0, input past_key_value); "
        "expected one dtype for all QsaAttention nodes; patch the original model again"
    )


def test_lengths_of_another_dtype_are_refused(tmp_path: Path) -> None:
    proto = qsa_model()
    lengths = next(v for v in proto.graph.input if v.name == "context_lengths")
    lengths.type.tensor_type.elem_type = TensorProto.INT64
    assert refusal(tmp_path, proto) == (
        "node qsa_0, input context_lengths: got int64; expected int32; patch the original model again"
    )


def test_kernel_limits_are_checked(tmp_path: Path) -> None:
    geometry = dataclasses.replace(SMALL, head_size=96)
    message = refusal(tmp_path, qsa_model(geometry=geometry))
    assert message.startswith("node qsa_0: got a geometry outside the CUDA kernels (head_size: got 96;")
    assert message.endswith(
        "expected a geometry that they run; run the patched model in onnxruntime, or choose another model"
    )


def test_impossible_attributes_name_the_node(tmp_path: Path) -> None:
    proto = qsa_model()
    node = next(n for n in proto.graph.node if n.op_type == "QsaAttention")
    next(a for a in node.attribute if a.name == "num_kv_heads").i = 3
    assert refusal(tmp_path, proto) == (
        "node qsa_0, attribute num_q_heads: got 4; expected a multiple of num_kv_heads (3); correct the head counts"
    )


def test_missing_inputs_are_counted(tmp_path: Path) -> None:
    proto = qsa_model()
    node = next(n for n in proto.graph.node if n.op_type == "QsaAttention")
    node.input.pop()
    assert refusal(tmp_path, proto).startswith("node qsa_0: got 10 inputs; expected 11 inputs (qkv, index_qk,")


def test_a_pool_of_another_geometry_is_refused(tmp_path: Path) -> None:
    proto = qsa_model()
    proto.graph.input[1].type.tensor_type.shape.dim[4].dim_value = 64
    assert refusal(tmp_path, proto) == (
        "node qsa_0, input past_key_value: got [2, num_pages, 128, 2, 64]; expected shape [2, N, 128, 2, 128]; "
        "patch the original model again"
    )


def test_a_tensor_of_another_rank_is_refused(tmp_path: Path) -> None:
    proto = qsa_model()
    del proto.graph.input[1].type.tensor_type.shape.dim[4]
    assert refusal(tmp_path, proto) == (
        "node qsa_0, input past_key_value: got [2, num_pages, 128, 2]; expected shape [2, N, 128, 2, 128]; "
        "patch the original model again"
    )


def test_one_dim_name_for_two_sizes_is_refused(tmp_path: Path) -> None:
    proto = qsa_model()
    start = next(v for v in proto.graph.input if v.name == "kvcache_start_index")
    start.type.tensor_type.shape.dim[0].dim_param = "batch"
    assert refusal(tmp_path, proto) == (
        "node qsa_0, input kvcache_start_index, axis 0: got dim name 'batch', which also stands for B; "
        "expected a dim name that stands for start alone; rename the dim: TensorRT makes equal names equal sizes"
    )


def test_contradicting_static_dims_are_refused(tmp_path: Path) -> None:
    proto = qsa_model(batch=2)
    lengths = next(v for v in proto.graph.input if v.name == "context_lengths")
    lengths.type.tensor_type.shape.dim[0].dim_value = 3
    assert refusal(tmp_path, proto) == (
        "node qsa_0, input context_lengths, axis 0: got 3; expected 2, as elsewhere; export with equal sizes"
    )


def test_weights_are_not_needed_for_the_dims(tmp_path: Path) -> None:
    """Weights are dropped before shape inference; the declared hidden size must survive."""
    model = load(tmp_path, qsa_model())
    assert model.inputs["hidden_states"].dims == ("batch", "seq", HIDDEN)


@pytest.mark.parametrize("content", [b"", b"not an onnx file at all", None])
def test_files_that_are_not_models_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.onnx"
    if content is None:
        content = qsa_model().SerializeToString()[:-1000]
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_patched_model(path)
