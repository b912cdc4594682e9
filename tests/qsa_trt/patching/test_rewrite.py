"""The new nodes: inputs in contract order, attributes, folded weights, casts, names and dims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import INPUTS, OUTPUTS, resolve_dims
from qsa_trt.patching import PatchReport, patch_onnx
from qsa_trt.recording import PatchedSession, qsa_nodes
from tests.support.graphs import add_constant, first_layer, insert, load, node, reroute, retype
from tests.support.originals import Original


def patch(model: onnx.ModelProto, folder: Path, **options: Any) -> tuple[onnx.ModelProto, PatchReport]:
    """Save, patch and load."""
    onnx.save(model, folder / "in.onnx")
    report = patch_onnx(folder / "in.onnx", folder / "out.onnx", **options)
    return onnx.load(folder / "out.onnx"), report


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == "QsaAttention"]


def constant(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def typed(model: onnx.ModelProto) -> dict[str, tuple[int, list[int | str]]]:
    """Element type and dims of graph inputs and outputs."""
    return {
        v.name: (v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in (*model.graph.input, *model.graph.output)
    }


def test_node_and_its_attributes(tmp_path: Path) -> None:
    model, report = patch(load(), tmp_path, pool_io="copy")
    assert len(nodes(model)) == 2
    for new, layer in zip(nodes(model), report.layers, strict=True):
        assert (new.domain, len(new.input), len(new.output)) == ("qsa", len(INPUTS), len(OUTPUTS))
        attributes = {a.name: helper.get_attribute_value(a) for a in new.attribute}
        expected = layer.geometry.to_attributes() | {"plugin_namespace": b"", "plugin_version": b"1"}
        assert attributes == expected and attributes["pool_io"] == 2


def test_shared_and_own_inputs(tmp_path: Path) -> None:
    model, _ = patch(load(), tmp_path)
    first, second = qsa_nodes(model)
    shared = {"context_lengths", "rope_rotary_cos_sin", "kvcache_start_index", "kv_page_table"}
    for tensor in INPUTS:
        assert (first.inputs[tensor.name] == second.inputs[tensor.name]) == (tensor.name in shared)
    assert all(first.inputs[name] == name for name in shared)
    assert [n.inputs["past_key_value"] for n in (first, second)] == ["past_key_values_0", "past_key_values_1"]
    assert [n.outputs["present_key_value"] for n in (first, second)] == ["present_key_values_0", "present_key_values_1"]


def test_types_and_dims(tmp_path: Path) -> None:
    model, report = patch(load(), tmp_path)
    pool = (TensorProto.FLOAT16, [2, "num_pages", 128, 2, 128])
    assert typed(model) == {
        "input_ids": (TensorProto.INT64, ["batch", "seq"]),
        "past_key_values_0": pool,
        "past_key_values_1": pool,
        "context_lengths": (TensorProto.INT32, ["batch"]),
        "rope_rotary_cos_sin": (TensorProto.FLOAT, [1, "max_positions", 32]),
        "kvcache_start_index": (TensorProto.INT32, ["kvcache_start_length"]),
        "kv_page_table": (TensorProto.INT32, ["batch", 2, "pages_per_seq"]),
        "logits": (TensorProto.FLOAT, ["batch", "seq", 128]),
        "present_key_values_0": pool,
        "present_key_values_1": pool,
    }
    assert str(report.new_inputs[0]) == "past_key_values_0 float16[2, num_pages, 128, 2, 128]"
    values = {v.name: v.type.tensor_type for v in model.graph.value_info}
    for new in qsa_nodes(model):
        dims = resolve_dims(OUTPUTS[0].dims, new.geometry)
        kind = values[new.outputs["attn_output"]]
        assert kind.elem_type == TensorProto.FLOAT16
        assert [d.dim_param or d.dim_value for d in kind.shape.dim] == ["batch", "seq", *dims[2:]]


@pytest.mark.parametrize(("name", "dtype"), [("qsa_lm", np.float16), ("real_layer_fp16", np.float16)])
def test_gammas_are_folded(name: str, dtype: type, tmp_path: Path) -> None:
    """Main norms hold 1+w as the graph does, indexer norms raw w; constants are fp32 even in fp16 exports."""
    original, layer = load(name), first_layer(name)
    model, _ = patch(original, tmp_path)
    inputs = qsa_nodes(model)[0].inputs
    for norm in ("q_norm", "k_norm", "indexer_q_norm", "indexer_k_norm"):
        stored = constant(original, layer.norms[norm].gamma)
        assert stored.dtype == np.float32
        folded = constant(model, inputs[f"{norm}_gamma"])
        assert folded.dtype == dtype
        wanted = stored - np.float32(1) if norm.startswith("indexer") else stored
        assert np.array_equal(folded, wanted.astype(dtype))


def test_raw_weight_from_an_fp16_constant(tmp_path: Path) -> None:
    """1 + w gives the stored fp16 constant back exactly."""
    original, layer = load("real_layer_fp16"), first_layer("real_layer_fp16")
    gamma = next(t for t in original.graph.initializer if t.name == layer.norms["indexer_q_norm"].gamma)
    half = numpy_helper.to_array(gamma).astype(np.float16)
    gamma.CopyFrom(numpy_helper.from_array(half, "half_gamma"))
    insert(original, helper.make_node("Cast", ["half_gamma"], ["half_cast"], to=1), after=layer.projections["k_proj"])
    original.graph.node.insert(
        0, original.graph.node.pop(next(i for i, n in enumerate(original.graph.node) if "half_cast" in n.output))
    )
    reroute(original, layer.norms["indexer_q_norm"].gamma, "half_cast")
    model, _ = patch(original, tmp_path)
    raw = constant(model, qsa_nodes(model)[0].inputs["indexer_q_norm_gamma"])
    assert np.array_equal((raw.astype(np.float32) + 1).astype(np.float16), half)


@pytest.mark.parametrize(
    ("name", "dtype", "casts"),
    [
        ("qsa_lm", None, 3),
        ("qsa_lm", "fp32", 0),
        ("real_layer_fp16", None, 0),
        ("real_layer_fp16", "fp32", 3),
        ("qsa_lm", "bf16", 3),
        ("real_layer_fp16", "bf16", 3),
    ],
)
def test_casts_stand_around_the_node_only(name: str, dtype: str | None, casts: int, tmp_path: Path) -> None:
    model, report = patch(load(name), tmp_path, dtype=dtype)
    added = [n for n in model.graph.node if n.op_type == "Cast" and n.output[0].startswith("qsa_0/")]
    assert len(added) == casts
    assert ("casts stand around the node" in report.summary()) == bool(casts)


def test_bf16_graph_keeps_its_surface(tmp_path: Path) -> None:
    """Every fp16 tensor of an fp16 graph made bf16: the node's surface follows."""
    model, report = patch(retype(load("real_layer_fp16"), TensorProto.FLOAT16, TensorProto.BFLOAT16), tmp_path)
    assert report.layers[0].surface == report.layers[0].graph_dtype == "bf16"
    assert typed(model)["past_key_values_0"][0] == TensorProto.BFLOAT16
    assert constant(model, qsa_nodes(model)[0].inputs["q_norm_gamma"]).dtype.name == "bfloat16"


def test_gate_on_four_dims(tmp_path: Path) -> None:
    """The gate multiplies [B, S, Hq, D] before the heads are joined: no Reshape between node and gate."""
    model, layer = load("layer-dynamo-20-sdpa"), first_layer("layer-dynamo-20-sdpa")
    multiply, flat = node(model, layer.gate.multiply.output), node(model, layer.gate.attention)
    sigmoid = next(n for n in model.graph.node if n.op_type == "Sigmoid")
    sigmoid.input[0] = layer.gate.gate
    multiply.input[:] = [flat.input[0], sigmoid.output[0]]
    joined = multiply.output[0]
    multiply.output[0] = "gated_heads"
    insert(model, helper.make_node("Reshape", ["gated_heads", flat.input[1]], [joined]), after="gated_heads")
    model.graph.node.remove(flat)
    del model.graph.value_info[:]
    patched, _ = patch(model, tmp_path, dtype="fp32")
    gate = node(patched, "gated_heads")
    assert gate.input[0] == qsa_nodes(patched)[0].outputs["attn_output"]
    original = Original("layer-dynamo-20-sdpa")
    tokens = original.tokens(np.random.default_rng(0), 1, 30)
    session = PatchedSession(patched, batch=1, max_kv_len=30, rope=original.rope(30))
    expected = original.prefill(tokens, np.array([30])).outputs["out"]
    assert np.allclose(session.prefill(tokens, [30]).outputs["out"], expected, atol=1e-5)


def test_biases_stay_in_the_graph(tmp_path: Path) -> None:
    model, layer = load(), first_layer()
    key = layer.projections["k_proj"]
    bias = add_constant(model, "key_bias", np.linspace(-1, 1, 128, dtype=np.float32))
    insert(model, helper.make_node("Add", [key, bias], ["biased"], name="node_bias"), after=key)
    node(model, "biased").metadata_props.extend(node(model, key).metadata_props)
    reroute(model, key, "biased")
    patched, report = patch(model, tmp_path, dtype="fp32")
    assert report.layers[0].biases == ("k_proj",) and "biases stay in the graph: k_proj" in report.summary()
    packed = node(patched, qsa_nodes(patched)[0].inputs["qkv"])
    assert packed.input[1] == "biased"


@pytest.mark.pitfall(34)
def test_shared_gamma_leaves_the_other_layer_alone(tmp_path: Path) -> None:
    """Two layers that share an initializer get weights of their own."""
    model = load()
    layers = [first_layer(), None]
    from tests.support.graphs import anchors_of

    layers = anchors_of(model)[1]
    for norm in ("q_norm", "indexer_k_norm"):
        reroute(model, layers[1].norms[norm].gamma, layers[0].norms[norm].gamma)
    patched, _ = patch(model, tmp_path)
    first, second = (n.inputs for n in qsa_nodes(patched))
    for norm in ("q_norm", "indexer_k_norm"):
        name = f"{norm}_gamma"
        assert first[name] != second[name]
        assert np.array_equal(constant(patched, first[name]), constant(patched, second[name]))


@pytest.mark.pitfall(34)
def test_names_that_are_taken(tmp_path: Path) -> None:
    """The model's own tensors, inputs and dims keep their names; the new ones step aside, and that is said."""
    model, layer = load(), first_layer()
    value = layer.projections["v_proj"]
    reroute(model, value, "context_lengths")
    node(model, value).output[0] = "context_lengths"
    model.graph.input.append(helper.make_tensor_value_info("past_key_values_1", TensorProto.FLOAT, ["num_pages"]))
    insert(
        model,
        helper.make_node("Neg", ["past_key_values_1"], ["used"], name="qsa_0/QsaAttention"),
        after="context_lengths",
    )
    model.graph.output.append(helper.make_tensor_value_info("used", TensorProto.FLOAT, ["num_pages"]))
    patched, report = patch(model, tmp_path)
    onnx.checker.check_model(patched)
    first, second = qsa_nodes(patched)
    assert first.inputs["context_lengths"] == "context_lengths_1"
    assert second.inputs["past_key_value"] == "past_key_values_1_1"
    assert first.name == "qsa_0/QsaAttention_1"
    assert typed(patched)["past_key_values_0"][1][1] == "num_pages_1"
    assert report.warnings == tuple(
        f"the model uses the usual name already: the new tensor is called {name}"
        for name in ("past_key_values_1_1", "context_lengths_1")
    )


def test_static_batch_and_sequence(tmp_path: Path) -> None:
    model = load()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"batch": 3, "seq": 40}[dim.dim_param]
    del model.graph.value_info[:]
    patched, report = patch(model, tmp_path, dtype="fp32")
    assert typed(patched)["kv_page_table"][1] == [3, 2, "pages_per_seq"]
    assert report.warnings == (
        "the batch is fixed to 3 in this graph",
        "the graph takes 40 tokens a call: the file prefills, and cannot decode",
    )
    original = Original("qsa_lm")
    tokens = original.tokens(np.random.default_rng(0), 3, 40)
    lengths = np.array([40, 22, 7])
    expected = original.prefill(tokens, lengths).outputs["logits"]
    got = PatchedSession(patched, batch=3, max_kv_len=40, rope=original.rope(40)).prefill(tokens, lengths)
    for b, length in enumerate(lengths):
        assert np.allclose(got.outputs["logits"][b, :length], expected[b, :length], atol=1e-4)


@pytest.mark.parametrize("body", [True, False])
def test_reference_body(body: bool, tmp_path: Path) -> None:
    model, report = patch(load(), tmp_path, reference_body=body)
    assert [(f.domain, f.name) for f in model.functions] == ([("qsa", "QsaAttention")] if body else [])
    assert ("qsa", 1) in [(o.domain, o.version) for o in model.opset_import]
    assert f"reference body: {'in the file' if body else 'left out'}" in report.summary()
