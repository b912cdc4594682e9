"""`qsa-trt inspect` on ONNX files: every attention layer, and what stands in the way of each."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from qsa_plugin.errors import ContractError, InputError
from qsa_trt import cli
from qsa_trt.inspecting import OnnxInspection, inspect
from qsa_trt.patching import patch_onnx
from tests.support.forms import as_sparse_ops
from tests.support.graphs import load
from tests.support.originals import MODELS, model_path

LM = MODELS / "qsa_lm.onnx"
FIRST, SECOND = "lm.model.layers.0.self_attn", "lm.model.layers.1.self_attn"


def look(path: Path, **options: object) -> OnnxInspection:
    found = inspect(path, **options)  # type: ignore[arg-type]
    assert isinstance(found, OnnxInspection)
    return found


def without_gate(layer: str) -> onnx.ModelProto:
    """The sample, one of its layers without an output gate."""
    model = load()
    sigmoids = [
        n for n in model.graph.node if n.op_type == "Sigmoid" and any(layer in p.value for p in n.metadata_props)
    ]
    assert len(sigmoids) == 1
    sigmoids[0].op_type = "Tanh"
    return model


def test_what_patch_onnx_would_find(tmp_path: Path) -> None:
    found = look(LM)
    report = patch_onnx(LM, tmp_path / "out.onnx", dry_run=True)
    assert [(layer.name, layer.found_by, layer.geometry, layer.rotary_dims) for layer in found.layers] == [
        (layer.name, layer.strategy, layer.geometry, layer.rotary_dims) for layer in report.layers
    ]
    assert {layer.dtype for layer in found.layers} == {"float32"}
    assert (found.patched, found.blocked, found.others, found.notes) == (False, "", (), ())
    assert found.inputs == ("input_ids int64[batch, seq]", "attention_mask int64[batch, seq]")
    assert found.summary().endswith("\nnothing is in the way of qsa-trt patch-onnx")


def test_one_layer_blocks_the_model_and_the_other_is_still_described(tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(without_gate(SECOND), path)
    found = look(path)
    whole, broken = found.layers
    assert (whole.name, whole.blocked, whole.geometry) == (FIRST, "", look(LM).layers[0].geometry)
    assert (broken.name, broken.geometry) == (SECOND, None)
    assert "neither half of q_proj reaches a Sigmoid" in broken.blocked
    assert f"{SECOND}: cannot be patched: " in found.summary()
    assert "nothing is in the way" not in found.summary()


def test_an_attribute_that_the_graph_does_not_tell() -> None:
    path = model_path("layer-script-static-eager")
    [layer] = look(path).layers
    assert layer.blocked == "indexer_budget: the graph says nothing; give --config with the model's config.json"
    [layer] = look(path, config={"indexer_budget": 16}).layers
    assert layer.geometry is not None
    assert (layer.blocked, layer.geometry.indexer_budget) == ("", 16)


@pytest.mark.parametrize("revision", ["new", "old"])
def test_operators_of_onnxruntime(revision: str, tmp_path: Path) -> None:
    onnx.save(as_sparse_ops(revision), tmp_path / "sparse.onnx")
    found = look(tmp_path / "sparse.onnx")
    assert [layer.found_by for layer in found.layers] == ["com.microsoft operators"] * 2
    assert [layer.geometry for layer in found.layers] == [layer.geometry for layer in look(LM).layers]
    assert found.others == ()


def test_their_token_packed_form(tmp_path: Path) -> None:
    model = as_sparse_ops()
    next(n for n in model.graph.node if n.op_type == "SparseAttentionIndexer").op_type = "PackedSparseAttentionIndexer"
    onnx.save(model, tmp_path / "packed.onnx")
    found = look(tmp_path / "packed.onnx")
    assert found.layers == ()
    assert "token-packed" in found.blocked


def test_siblings_packed_by_fusions() -> None:
    assert [layer.blocked for layer in look(model_path("qsa2_prefill-cpu")).layers] == ["", ""]


def test_a_model_without_qsa() -> None:
    found = look(MODELS / "plain_qwen3.onnx")
    assert found.layers == ()
    assert found.blocked.startswith("no QSA attention in this model; looked for ")
    assert len(found.others) == 1
    assert "(Softmax)" in found.others[0]


def test_a_patched_file(tmp_path: Path) -> None:
    found = look(patch_onnx(LM, tmp_path / "p.onnx", pool_io="copy").output)
    assert found.patched
    assert [layer.pool for layer in found.layers] == ["past_key_values_0", "past_key_values_1"]
    assert {layer.dtype for layer in found.layers} == {"float16"}
    assert {layer.blocked for layer in found.layers} == {""}
    assert {layer.rotary_dims for layer in found.layers} == {32}
    assert {layer.page_bytes for layer in found.layers} == {2 * 128 * 2 * (64 + 64) * 2}  # planes, tokens, heads, fp16
    assert found.others == ()
    assert found.notes == (
        "the rope table is graph input rope_rotary_cos_sin",
        "the definition for onnxruntime is in the file",
    )
    assert "pools: 262144 bytes a page of 128 tokens in all layers, 2048 a token" in found.summary()
    assert "past_key_values_1  copy" in found.summary()


def test_a_patched_file_that_the_kernels_do_not_run(tmp_path: Path) -> None:
    output = tmp_path / "p.onnx"
    patch_onnx(LM, output, dtype="fp32", reference_body=False, rope_table="initializer", max_positions=9)
    found = look(output)
    assert found.layers[0].blocked == "surface dtype: got float32; the CUDA kernels support float16 or bfloat16"
    assert "the CUDA kernels do not run it: surface dtype" in found.summary()
    assert found.notes == ("the rope table is baked in", "the definition for onnxruntime is not in the file")


def test_a_node_that_lost_an_input(tmp_path: Path) -> None:
    model = onnx.load(patch_onnx(LM, tmp_path / "p.onnx").output)
    del next(n for n in model.graph.node if n.op_type == "QsaAttention").input[-1]
    onnx.save(model, tmp_path / "cut.onnx")
    expected = r"node qsa_0/QsaAttention: got 10 inputs and 2 outputs; expected 11 inputs and 2 outputs; patch the orig"
    with pytest.raises(ContractError, match=expected):
        look(tmp_path / "cut.onnx")


def test_weights_beside_the_model(tmp_path: Path) -> None:
    path = tmp_path / "lm.onnx"
    onnx.save(load(), path, save_as_external_data=True, location="lm.data")
    size = (tmp_path / "lm.data").stat().st_size
    assert look(path).external_bytes == {"lm.data": size}
    assert f"\nexternal data: lm.data, {size} bytes\n" in look(path).summary()


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(LM)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{LM}: ONNX model, not patched; IR 10, opsets ai.onnx 20"
    assert cli.main(["inspect", str(LM), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["patched"], len(found["layers"])) == ("onnx", False, 2)
    assert found["layers"][0]["geometry"]["indexer_budget"] == 64


def test_neither_model_nor_engine(tmp_path: Path) -> None:
    path = tmp_path / "notes.onnx"
    path.write_text("these are notes, and no model\n" * 9)
    with pytest.raises(InputError, match="not ONNX, or truncated"):
        inspect(path)
    with pytest.raises(InputError, match="check the path"):
        inspect(tmp_path / "absent")
