"""onnxruntime's own sparse-attention operators: both revisions give the answer of the plain model they stand for.

onnxruntime has no CPU kernel for them, so the plain model is what the patched file is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from qsa_plugin.errors import InputError, RefusedError
from qsa_trt.metrics import row_error
from qsa_trt.patching import PatchReport, patch_onnx
from qsa_trt.recording import PatchedSession
from tests.support.forms import as_sparse_ops
from tests.support.graphs import add_constant, insert, load, node
from tests.support.originals import Original

#: fp32 on both sides, sums in another order: a few hundred roundings of 6e-8 of the row's largest value.
BOUND = 1e-5
INDEXER = "/model/layers.0/attn/SparseAttentionIndexer/output_0"
ATTENTION = "/model/layers.0/attn/DynamicSparseAttention/output_0"
FORMS = {
    "1.32": {"revision": "new"},
    "1.32, query and key apart": {"revision": "split"},
    "1.32, packed qkv": {"revision": "new", "packed": True},
    "older": {"revision": "old"},
}


def patch(model: onnx.ModelProto, folder: Path, **options: Any) -> PatchReport:
    onnx.save(model, folder / "in.onnx")
    return patch_onnx(folder / "in.onnx", folder / "out.onnx", **options)


@pytest.mark.parametrize("name", FORMS)
def test_same_answer_as_the_plain_model(name: str, tmp_path: Path) -> None:
    original = Original("qsa_lm")
    report = patch(as_sparse_ops(**FORMS[name]), tmp_path, dtype="fp32", rope_table="initializer", max_positions=128)
    assert [(layer.name, layer.strategy) for layer in report.layers] == [
        (f"model.layers.{i}.attn", "com.microsoft operators") for i in range(2)
    ]
    assert [layer.geometry for layer in report.layers] == original.geometries
    assert report.rope.endswith("from the model's cos_cache and sin_cache")
    patched = onnx.load(report.output)
    assert {n.domain for n in patched.graph.node} == {"", "qsa"}
    assert {"attention_mask", "position_ids", "past_key_values.0.key", "past_key_values.1.indexer_key"} <= set(
        report.removed_inputs
    )
    assert {v.name for v in patched.graph.output} == {"logits", "present_key_values_0", "present_key_values_1"}
    onnx.checker.check_model(patched)

    lengths = np.array([100, 37])
    tokens = original.tokens(np.random.default_rng(0), 2, 103)["input_ids"]
    expected = original.prefill({"input_ids": tokens}, np.array([103, 40])).outputs["logits"]
    session = PatchedSession(report.output, batch=2, max_kv_len=128, rng=np.random.default_rng(1), fill=np.nan)
    logits = session.prefill({"input_ids": tokens[:, :100]}, lengths).outputs["logits"]
    for b, length in enumerate(lengths):
        assert row_error(logits[b, :length], expected[b, :length]).max() <= BOUND
    for step in range(3):
        ids = tokens[np.arange(2), lengths + step][:, None]
        logits = session.decode({"input_ids": ids}).outputs["logits"]
        assert row_error(logits[:, 0], expected[np.arange(2), lengths + step]).max() <= BOUND


def test_the_fixture_meets_the_schema_of_onnxruntime() -> None:
    """Shape inference of onnxruntime runs on it; only the kernel is missing on a CPU."""
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented, match="SparseAttentionIndexer"):
        onnxruntime.InferenceSession(as_sparse_ops().SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_table_is_an_input_unless_it_is_baked(tmp_path: Path) -> None:
    report = patch(as_sparse_ops(), tmp_path)
    assert "rope_rotary_cos_sin" in [t.name for t in report.new_inputs]
    assert not any(t.name == "cos_cache" for t in onnx.load(report.output).graph.initializer)


def test_a_stored_table_can_be_too_short(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--max-positions: got 257; expected at most 256, the rows of cos_cache"):
        patch(as_sparse_ops(), tmp_path, rope_table="initializer", max_positions=257)


def attribute(output: str, name: str, value: Any) -> Callable[[onnx.ModelProto], None]:
    def mutate(model: onnx.ModelProto) -> None:
        changed = node(model, output)
        for old in [a for a in changed.attribute if a.name == name]:
            changed.attribute.remove(old)
        if value is not None:
            changed.attribute.append(helper.make_attribute(name, value))

    return mutate


def operand(output: str, position: int, value: str) -> Callable[[onnx.ModelProto], None]:
    def mutate(model: onnx.ModelProto) -> None:
        changed = node(model, output)
        changed.input.extend([""] * (position + 1 - len(changed.input)))
        changed.input[position] = value

    return mutate


def another_choice(model: onnx.ModelProto) -> None:
    """Entries are moved by one token on their way to the attention."""
    choice = "/model/layers.0/attn/Flatten"
    insert(model, helper.make_node("Add", [choice, "one_i"], ["moved"], name="moved"), after=choice)
    operand(ATTENTION, 7, "moved")(model)


def another_reader(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info(INDEXER, onnx.TensorProto.INT32, None))


def own_tables(model: onnx.ModelProto) -> None:
    add_constant(model, "other_cos", np.ones((256, 16), np.float32))
    operand(INDEXER, 4, "other_cos")(model)


def other_index_heads(model: onnx.ModelProto) -> None:
    add_constant(model, "gamma_50", np.ones(50, np.float32))
    node(model, INDEXER).input[2:4] = ["gamma_50", "gamma_50"]


def plain_layer(model: onnx.ModelProto) -> None:
    """A plain QSA layer next to the pair."""
    other = load()
    renamed = {t: f"other/{t}" for n in other.graph.node for t in n.output}
    for n in other.graph.node:
        n.input[:] = [renamed.get(t, t) for t in n.input]
        n.output[:] = [renamed[t] for t in n.output]
    model.graph.node.extend(other.graph.node)
    known = {t.name for t in model.graph.initializer}
    model.graph.initializer.extend(t for t in other.graph.initializer if t.name not in known)
    model.graph.output.append(helper.make_tensor_value_info("other/logits", onnx.TensorProto.FLOAT, None))


REFUSED: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "blocks of another policy": (attribute(INDEXER, "policy_mode", "csa"), "its policy_mode is not qsa"),
    "order reversed": (attribute(INDEXER, "scale", -1.0), "its scale is not positive"),
    "no budget": (attribute(INDEXER, "token_budget", None), "indexer_budget: the graph says nothing"),
    "two epsilons": (attribute(INDEXER, "epsilon", 1e-5), "rms_norm_eps: the graph says 1e-06"),
    "window": (
        attribute(ATTENTION, "attention_mode", "local_plus_selected"),
        "its attention_mode is local_plus_selected; QSA needs selected_only",
    ),
    "auxiliary source": (
        attribute(ATTENTION, "selected_kv_source", "auxiliary"),
        "its selected_kv_source is auxiliary",
    ),
    "pairs interleaved": (attribute(ATTENTION, "rotary_interleaved", 1), "its rotary_interleaved is 1; QSA needs 0"),
    "not rotated": (attribute(ATTENTION, "do_rotary", None), "its do_rotary is 0; QSA needs 1"),
    "rotated elsewhere": (attribute(ATTENTION, "rotary_offset", 8), "its rotary_offset is 8; QSA needs 0"),
    "sink of zero": (attribute(ATTENTION, "smooth_softmax", 1), "its smooth_softmax is 1; QSA needs 0"),
    "sink": (operand(ATTENTION, 16, "cos_cache"), "it has the input head_sink, which QSA does not have"),
    "quantised cache": (operand(ATTENTION, 18, "cos_cache"), "it has the input key_scale"),
    "no norm": (operand(ATTENTION, 14, ""), "it lacks the input q_norm_weight"),
    "other heads": (attribute(ATTENTION, "num_heads", 4), "query, key and value have 768 elements a token; 512 were"),
    "other index heads": (other_index_heads, "index queries and key have 192 elements a token; 150 were expected"),
    "moved choice": (another_choice, "it changes the indexer's choice on its way to DynamicSparseAttention"),
    "read choice": (another_reader, "is a tensor that the cut would remove"),
    "other tables": (own_tables, "its cos_cache is not the one that"),
    "key without value": (operand(ATTENTION, 2, ""), "it has a key without a value, or a value without a key"),
    "plain layer beside it": (plain_layer, "this indexer belongs to no layer that could be found"),
    "indexer alone": (operand(ATTENTION, 7, "position_ids"), "its choice comes from position_ids, which no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    model = as_sparse_ops()
    mutate, reason = REFUSED[name]
    mutate(model)
    with pytest.raises(RefusedError) as error:
        patch(model, tmp_path)
    assert reason in str(error.value) and str(error.value).endswith("; nothing was patched")
    assert not (tmp_path / "out.onnx").exists()


def test_token_packed_form(tmp_path: Path) -> None:
    model = as_sparse_ops()
    node(model, ATTENTION).op_type = "SparsePagedAttention"
    with pytest.raises(RefusedError, match=r"the token-packed form .* export the model without paged attention"):
        patch(model, tmp_path)
