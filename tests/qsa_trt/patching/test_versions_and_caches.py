"""Opsets 17 to 24, IR versions, shared weights, names of dense caches, and layers of other kinds, which stay."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, version_converter

from qsa_plugin.errors import InputError
from qsa_trt.metrics import row_error
from qsa_trt.patching import patch_onnx
from qsa_trt.patching.reference_body import OPSETS
from qsa_trt.recording import PatchedSession, open_session
from qsa_trt.reference import qsa_attention
from tests.support.compare import BOUND, errors, feeds, patch
from tests.support.graphs import add_constant, first_layer, insert, load, node, reroute
from tests.support.originals import Original


def at_opset(version: int) -> onnx.ModelProto:
    """`qsa_lm`, an export at opset 20, at another one; below 18 some operators take attributes instead of inputs."""
    model = load()
    if version > 20:
        return version_converter.convert_version(model, version)
    model.opset_import[0].version = version
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for n in model.graph.node if version < 18 else ():
        if n.op_type == "ReduceMean":
            n.attribute.append(helper.make_attribute("axes", values[n.input.pop(1)].tolist()))
        if n.op_type in ("ReduceMean", "Split"):
            for attribute in [a for a in n.attribute if a.name in ("noop_with_empty_axes", "num_outputs")]:
                n.attribute.remove(attribute)
    return model


@pytest.mark.parametrize("version", OPSETS)
def test_opsets(version: int, tmp_path: Path) -> None:
    model = at_opset(version)
    onnx.checker.check_model(model)
    assert max(errors(model, tmp_path)) <= BOUND
    patched = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(patched)
    assert {o.domain: o.version for o in patched.opset_import} == {"": version, "qsa": 1}


def test_an_opset_that_the_reference_body_does_not_know(tmp_path: Path) -> None:
    model = version_converter.convert_version(load(), 25)
    with pytest.raises(InputError, match="opset of the default ONNX domain: got 25; expected 17 to 24"):
        patch(model, tmp_path)
    assert patch(model, tmp_path, reference_body=False).status == "patched"


@pytest.mark.parametrize("version", [8, 9, 10, 11, 12])
def test_ir_versions_stay(version: int, tmp_path: Path) -> None:
    model = load()
    model.ir_version = version
    patch(model, tmp_path)
    assert onnx.load(tmp_path / "out.onnx").ir_version == version


def test_layers_that_share_their_initialisers(tmp_path: Path) -> None:
    """Both layers have the same weights, stored once; each keeps its own node."""
    model, layers = load(), [first_layer(), first_layer()]
    scopes = {n.output[0]: n for n in model.graph.node}
    weights = {"q_proj": "linear_4", "k_proj": "linear_5", "v_proj": "linear_6", "index_qk_proj": "linear_3"}
    assert {name: layers[0].projections[name] for name in weights} == weights
    for n in model.graph.node:
        path = next((e.value for e in n.metadata_props if e.key == "pkg.torch.onnx.name_scopes"), "")
        if "layers.1.self_attn" in path and n.op_type == "MatMul":
            for name, output in weights.items():
                if f"{name}'" in path:
                    n.input[1] = scopes[output].input[1]
    assert max(errors(model, tmp_path)) <= BOUND
    patched = onnx.load(tmp_path / "out.onnx")
    read = [n.input[1] for n in patched.graph.node if n.op_type == "MatMul"]
    assert all(read.count(scopes[output].input[1]) == 2 for output in weights.values())


CACHE_NAMES = {
    "optimum": ("past_key_values.{}.{}", "present.{}.{}", {"keys": "key", "values": "value"}),
    "genai": ("past_key_values.{}.{}", "present.{}.{}", {"keys": "key", "values": "value", "indexer_keys": "indexer"}),
    "underscores": ("past_{1}_{0}", "present_{1}_{0}", {"keys": "key", "values": "value"}),
}


@pytest.mark.parametrize("style", CACHE_NAMES)
def test_names_of_dense_caches(style: str, tmp_path: Path) -> None:
    """A decode graph with caches by other names than transformers' own: all of them go, and the rest is equal."""
    past, present, kinds = CACHE_NAMES[style]
    model = load("qsa2_decode")
    new = {}
    for value in (*model.graph.input, *model.graph.output):
        match = re.fullmatch(r"(input|output)\.cache\.layers\.(\d+)\.(\w+)", value.name)
        if match:
            side, layer, kind = match.groups()
            template = past if side == "input" else present
            new[value.name] = template.format(layer, kinds.get(kind, kind))
            value.name = new[value.name]
    for n in model.graph.node:
        n.input[:] = [new.get(t, t) for t in n.input]
        n.output[:] = [new.get(t, t) for t in n.output]
    outputs = []
    for name, file in (("qsa2_decode", load("qsa2_decode")), (style, model)):
        (tmp_path / name).mkdir()
        report = patch(file, tmp_path / name, dtype="fp32")
        removed = {*report.removed_inputs, *report.removed_outputs}
        assert set(new.values()) <= removed or name == "qsa2_decode"
        session = PatchedSession(report.output, batch=1, max_kv_len=9, rope=Original("qsa2_decode").rope(9))
        steps = [session.decode({"input_ids": np.full((1, 1), t)}).outputs["logits"] for t in range(9)]
        outputs.append(np.concatenate(steps))
    assert np.array_equal(*outputs)


def linear_attention(model: onnx.ModelProto, hidden: str) -> list[str]:
    """A causal linear attention with an output gate and a norm of its own, between layer 0 and layer 1."""
    width = 32
    rng = np.random.default_rng(3)
    for name in "qkvgo":
        add_constant(model, f"la_{name}", rng.standard_normal((width, width), np.float32) / width**0.5)
    add_constant(model, "la_axis", np.array(1))
    add_constant(model, "la_last", np.array([-1]))
    add_constant(model, "la_eps", np.float32(1e-6))
    add_constant(model, "la_gamma", rng.standard_normal(width, np.float32))
    nodes = [helper.make_node("MatMul", [hidden, f"la_{n}"], [f"la_{n}_out"], name=f"la_{n}_proj") for n in "qkvg"]
    for op, inputs, output in (
        ("Mul", ["la_k_out", "la_v_out"], "la_kv"),
        ("CumSum", ["la_kv", "la_axis"], "la_state"),
        ("Mul", ["la_state", "la_q_out"], "la_mixed"),
        ("Mul", ["la_mixed", "la_mixed"], "la_square"),
        ("ReduceMean", ["la_square", "la_last"], "la_mean"),
        ("Add", ["la_mean", "la_eps"], "la_var"),
        ("Sqrt", ["la_var"], "la_rms"),
        ("Div", ["la_mixed", "la_rms"], "la_normed"),
        ("Mul", ["la_normed", "la_gamma"], "la_scaled"),
        ("Sigmoid", ["la_g_out"], "la_gate"),
        ("Mul", ["la_scaled", "la_gate"], "la_gated"),
        ("MatMul", ["la_gated", "la_o"], "la_out"),
        ("Add", [hidden, "la_out"], "la_residual"),
    ):
        nodes.append(helper.make_node(op, inputs, [output], name=output))
    previous = hidden
    for new in nodes:
        insert(model, new, after=previous)
        previous = new.output[0]
    reroute(model, hidden, "la_residual")
    for new in nodes:
        new_node = node(model, new.output[0])
        new_node.input[:] = [hidden if t == "la_residual" else t for t in new_node.input]
    return [n.output[0] for n in nodes]


def test_linear_attention_layers_are_left_alone(tmp_path: Path) -> None:
    """A hybrid model: what is not QSA keeps every node; compared in prefill, since it has no cache here."""
    model = load()
    hidden = node(model, first_layer().projections["k_proj"]).input[0]
    added = linear_attention(model, hidden)
    tokens = np.random.default_rng(0).integers(0, 128, (1, 90))
    expected = open_session(model).run(["logits"], feeds(model, tokens, np.array([90])))[0]
    report = patch(model, tmp_path, dtype="fp32")
    patched = {n.output[0]: n for n in onnx.load(report.output).graph.node}
    assert len(report.layers) == 2 and all(patched[t] == node(model, t) for t in added)
    session = PatchedSession(report.output, batch=1, max_kv_len=90, rope=Original("qsa_lm").rope(90), fill=np.nan)
    assert row_error(session.prefill({"input_ids": tokens}, [90]).outputs["logits"], expected).max() <= BOUND


def test_edge_llm_form_runs_as_it_is(tmp_path: Path) -> None:
    """Nodes as TensorRT Edge-LLM writes them: recorded by their own name, equal to the contract, and left alone."""
    report = patch(load(), tmp_path, dtype="fp32")
    model = onnx.load(report.output)
    for n in (*model.graph.node, *model.functions):
        if "QsaAttention" in (getattr(n, "op_type", ""), n.name):
            n.domain = "trt_edgellm"
            setattr(n, "op_type" if isinstance(n, onnx.NodeProto) else "name", "QsaAttentionPlugin")
    for n in model.graph.node:
        for attribute in [a for a in n.attribute if a.name.startswith("plugin_")]:
            n.attribute.remove(attribute)
    next(o for o in model.opset_import if o.domain == "qsa").domain = "trt_edgellm"
    onnx.save(model, tmp_path / "edge.onnx")
    assert patch_onnx(tmp_path / "edge.onnx").status == "already-patched"
    tokens = {"input_ids": np.random.default_rng(0).integers(0, 128, (2, 80))}
    rope = Original("qsa_lm").rope(128)
    edge, own = (
        PatchedSession(tmp_path / name, batch=2, max_kv_len=128, rope=rope, record=True)
        for name in ("edge.onnx", "out.onnx")
    )
    steps = [session.prefill(tokens, [80, 41]) for session in (edge, own)]
    assert np.array_equal(steps[0].outputs["logits"], steps[1].outputs["logits"])
    for call in steps[0].calls:
        expected = qsa_attention(call.inputs, call.node.geometry)
        assert np.allclose(call.attn_output, expected.attn_output, atol=1e-5)


def test_element_types_of_the_graph(tmp_path: Path) -> None:
    """A double graph is refused by the type of its activations (float, float16 and bfloat16 are tested elsewhere)."""
    model = load()
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for n in model.graph.node:
        for attribute in n.attribute:
            if n.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
    with pytest.raises(Exception, match="its element type is not known to be float, float16 or bfloat16"):
        patch(model, tmp_path)
