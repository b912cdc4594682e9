"""Clean-up: what the cut left without a reader goes, everything else stays as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qsa_trt.patching import PatchReport, patch_onnx
from qsa_trt.recording import PatchedSession
from tests.support.graphs import add_constant, first_layer, insert, load, node
from tests.support.originals import Original

TRACE = "pkg.torch.onnx.stack_trace"


def patch(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, PatchReport]:
    onnx.save(model, folder / "in.onnx")
    report = patch_onnx(folder / "in.onnx", folder / "out.onnx", dtype="fp32")
    return onnx.load(folder / "out.onnx"), report


def names(values: object) -> list[str]:
    return [v.name for v in values]  # type: ignore[attr-defined]


def test_layer_inputs_go_although_shapes_are_read_of_them(tmp_path: Path) -> None:
    """The gate's path reads the batch from sin and the length from cos: both move to hidden_states."""
    model, report = patch(load("layer-dynamo-18-eager"), tmp_path)
    assert report.removed_inputs == ("cos", "sin", "attention_mask")
    assert names(model.graph.input)[0] == "hidden_states"
    shapes = [n for n in model.graph.node if n.op_type == "Shape"]
    assert [n.input[0] for n in shapes] == ["hidden_states", "hidden_states"]
    assert {helper.get_node_attr_value(n, "start") for n in shapes} == {0, 1}


def test_whole_shape_of_a_removed_input(tmp_path: Path) -> None:
    """TorchScript reads whole shapes: the fixed dim becomes a constant, the others move."""
    model = load("layer-dynamo-18-eager")
    first = next(n for n in model.graph.node if n.op_type == "Shape" and n.input[0] == "sin")
    wanted = first.output[0]
    first.output[0] = "whole"
    del first.attribute[:]
    picks = add_constant(model, "picks", np.array([0]))
    insert(model, helper.make_node("Gather", ["whole", picks], [wanted]), after="whole")
    patched, report = patch(model, tmp_path)
    assert "sin" in report.removed_inputs
    whole = node(patched, "whole")
    assert whole.op_type == "Concat" and whole.name == first.name
    original = Original("layer-dynamo-18-eager")
    tokens = original.tokens(np.random.default_rng(0), 2, 9)
    step = PatchedSession(patched, batch=2, max_kv_len=9, rope=original.rope(9)).prefill(tokens, [9, 9])
    expected = original.prefill(tokens, np.array([9, 9])).outputs["out"]
    assert np.allclose(step.outputs["out"], expected, atol=1e-5)


def test_input_stays_when_its_dims_stand_nowhere_else(tmp_path: Path) -> None:
    model = load("layer-dynamo-18-eager")
    sin = next(v for v in model.graph.input if v.name == "sin")
    sin.type.tensor_type.shape.dim[0].dim_param = "another_batch"
    patched, report = patch(model, tmp_path)
    assert report.removed_inputs == ("cos", "attention_mask")
    assert report.warnings == ("input sin stays: its shape is read, and no other input has the same dims",)
    assert names(patched.graph.input)[:2] == ["hidden_states", "sin"]


def test_decode_graph_keeps_tokens_only(tmp_path: Path) -> None:
    model, report = patch(load("qsa2_decode"), tmp_path)
    assert not [n for n in names(model.graph.input) if ".cache." in n or "position" in n]
    assert names(model.graph.output) == ["logits", "present_key_values_0", "present_key_values_1"]
    assert "output.cache.layers.0.indexer_position_ids" in report.removed_outputs
    assert "the file decodes, and cannot prefill longer prompts" in report.warnings[0]


def test_appending_outputs_of_others_stay(tmp_path: Path) -> None:
    """An output that appends to an input, but that no attention read, is none of our caches."""
    model = load("qsa2_decode")
    model.graph.input.append(helper.make_tensor_value_info("past_ids", TensorProto.INT64, ["s17", "t"]))
    axis = helper.make_node("Concat", ["past_ids", "input_ids"], ["cache_of_ids"], axis=1)
    model.graph.node.insert(0, axis)
    model.graph.output.append(helper.make_tensor_value_info("cache_of_ids", TensorProto.INT64, None))
    patched, report = patch(model, tmp_path)
    assert "cache_of_ids" in names(patched.graph.output) and "past_ids" in names(patched.graph.input)
    assert "cache_of_ids" not in report.removed_outputs


def test_mask_that_others_read_stays(tmp_path: Path) -> None:
    model = load()
    model.graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["mask_out"], to=1))
    model.graph.output.append(helper.make_tensor_value_info("mask_out", TensorProto.FLOAT, None))
    _, report = patch(model, tmp_path)
    assert report.removed_inputs == ()


def test_what_was_unread_before_stays(tmp_path: Path) -> None:
    """Only what the cut killed goes: an unused input, a dead node and an unused weight are not ours to remove."""
    model = load()
    model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [1]))
    model.graph.node.insert(0, helper.make_node("Neg", ["unused"], ["dead"], name="dead"))
    model.graph.node.insert(0, helper.make_node("Neg", ["attention_mask"], ["dead_too"], name="dead_too"))
    add_constant(model, "unused_weight", np.zeros(3, np.float32))
    patched, report = patch(model, tmp_path)
    assert "unused" in names(patched.graph.input) and "unused_weight" in names(patched.graph.initializer)
    assert "dead" in names(patched.graph.node)
    assert report.removed_inputs == ("attention_mask",) and "dead_too" not in names(patched.graph.node)


def test_nothing_dangles(tmp_path: Path) -> None:
    """Every initializer is read, every value_info names a tensor that exists, no cut tensor is left."""
    for name in ("qsa_lm", "qsa2_decode", "layer-script-18-eager"):
        model, _ = patch(load(name), tmp_path)
        read = {t for n in model.graph.node for t in n.input}
        made = {t for n in model.graph.node for t in n.output} | set(names(model.graph.input))
        made |= set(names(model.graph.initializer))
        assert {t for t in read if t} <= made
        assert set(names(model.graph.initializer)) <= read
        assert set(names(model.graph.value_info)) <= made
        assert not [n for n in model.graph.node if n.op_type in ("TopK", "Softmax") and "self_attn" in str(n)]


@pytest.mark.pitfall(37)
def test_untouched_nodes_keep_everything(tmp_path: Path) -> None:
    """Name, attributes, metadata and doc strings; only the exporter's stack traces go, everywhere."""
    model = load()
    for holder in (*model.graph.node, *model.graph.value_info, *model.graph.initializer, *model.graph.input):
        holder.metadata_props.add(key=TRACE, value="File /somewhere/on/the/machine.py")
        holder.metadata_props.add(key="mine", value="kept")
    for n in model.graph.node:
        n.doc_string = "doc"
    model.metadata_props.add(key="model key", value="model value")
    model.doc_string = "model doc"
    before = {n.output[0]: n for n in model.graph.node}
    patched, _ = patch(model, tmp_path)
    assert TRACE not in str(patched)
    compared = 0
    gates = {first_layer().gate.multiply.output}
    for n in patched.graph.node:
        if n.output[0] in before and n.op_type != "Shape" and not any(t.startswith("qsa_") for t in n.input):
            expected = before[n.output[0]]
            kept = [p for p in expected.metadata_props if p.key != TRACE]
            del expected.metadata_props[:]
            expected.metadata_props.extend(kept)
            assert n == expected
            compared += 1
    assert compared > 200 and gates <= {n.output[0] for n in patched.graph.node}
    assert [(p.key, p.value) for p in patched.metadata_props] == [("model key", "model value")]
    assert (patched.doc_string, patched.ir_version, patched.producer_name) == ("model doc", 10, "pytorch")


@pytest.mark.pitfall(37)
@pytest.mark.parametrize("name", ["layer-script-18-eager", "qsa_lm", "layer-dynamo-23-sdpa"])
def test_versions_stay(name: str, tmp_path: Path) -> None:
    before = load(name)
    patched, _ = patch(load(name), tmp_path)
    assert patched.ir_version == before.ir_version
    imports = [(o.domain, o.version) for o in before.opset_import]
    assert [(o.domain, o.version) for o in patched.opset_import] == [*imports, ("qsa", 1)]
