"""The comparison of a model with its patched form: it passes, it can fail, and it says what it cannot do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import Geometry
from qsa_plugin.errors import FailedError, InputError, RefusedError
from qsa_trt import cli, comparison
from qsa_trt.comparison import ValidationReport, validate
from qsa_trt.patching import patch_onnx
from qsa_trt.patching.files import ModelFile
from tests.support.graphs import add_constant, insert, load, node, reroute, retype
from tests.support.originals import model_path
from tests.support.requirements import needs_onnxruntime

pytestmark = needs_onnxruntime
MODELS = Path(__file__).parents[2] / "models"
LM = MODELS / "qsa_lm.onnx"
SMALL: dict[str, Any] = {"lengths": (50, 21), "decode_steps": 6}


def phases(report: ValidationReport) -> dict[str, tuple[str, int]]:
    return {c.phase: (c.output, c.rows) for c in report.comparisons}


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def initializer(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def change(tensor: TensorProto, how: Callable[[np.ndarray], np.ndarray]) -> None:
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(how(value).astype(value.dtype), tensor.name))


def test_a_causal_lm_over_prefill_and_decode() -> None:
    report = validate(LM, lengths="90,41,3", decode_steps=20)
    assert phases(report) == {"prefill": ("logits", 134), "decode": ("logits", 60)}
    assert report.passed
    assert sum(c.ignored for c in report.comparisons) == 0
    assert max(c.error for c in report.comparisons) > 0  # two computations, not one array twice
    assert min(c.cosine for c in report.comparisons) > 0.999999


@pytest.mark.parametrize(
    "name", ["layer-dynamo-18-eager", "layer-dynamo-20-sdpa", "layer-dynamo-23-sdpa", "layer-script-18-eager"]
)
def test_one_layer(name: str) -> None:
    """Hidden states, cosines and sines in; masks are additive or bool."""
    report = validate(model_path(name), **SMALL)
    assert phases(report) == {"prefill": ("out", 71), "decode": ("out", 12)}
    assert report.passed


@pytest.mark.parametrize("name", ["real_layer_fp16", "sample/real_layer_fp16"])
def test_half_precision_is_compared_in_fp32(name: str) -> None:
    """The bound is that of fp32, which fp16 arithmetic on either side would miss by a factor of 50."""
    report = validate(model_path(name), **SMALL)
    assert report.passed
    assert {c.bound for c in report.comparisons} == {comparison.FP32_BOUND}


def test_bf16_graphs(tmp_path: Path) -> None:
    path = save(retype(load("layer-dynamo-20-sdpa"), TensorProto.FLOAT, TensorProto.BFLOAT16), tmp_path / "bf16.onnx")
    assert validate(path, **SMALL).passed


def test_a_decode_graph_runs_through_its_dense_caches() -> None:
    report = validate(model_path("qsa2_decode"), lengths=(30, 9), decode_steps=10)
    assert phases(report) == {"decode": ("logits", 80)}  # dense caches hold sequences of one length
    assert report.passed
    assert report.notes == ("the graph takes one token a call: nothing is prefilled",)


def test_caches_of_other_layers_grow_on_both_sides(tmp_path: Path) -> None:
    """A mean over all tokens so far, through a cache of its own, stands for a dense layer of a hybrid decode graph."""
    model = load("qsa2_decode")
    embedding = next(n.output[0] for n in model.graph.node if n.op_type == "Gather" and "embed" in n.input[0])
    add_constant(model, "token_axis", np.array([1], np.int64))
    mean = helper.make_node("ReduceMean", ["present_key_values.9.key", "token_axis"], ["mean_so_far"])
    whole = helper.make_node("Concat", ["past_key_values.9.key", embedding], ["present_key_values.9.key"], axis=1)
    insert(model, helper.make_node("Add", [embedding, "mean_so_far"], ["mixed"]), after=embedding)
    insert(model, mean, after=embedding)
    insert(model, whole, after=embedding)
    for n in model.graph.node:
        if n is not whole and n.output[0] not in ("mixed", "present_key_values.9.key"):
            n.input[:] = ["mixed" if t == embedding else t for t in n.input]
    width = numpy_helper.to_array(next(t for t in model.graph.initializer if "embed" in t.name)).shape[1]
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for values, name, length in ((model.graph.input, "past", "p9"), (model.graph.output, "present", "n9")):
        values.append(
            helper.make_tensor_value_info(f"{name}_key_values.9.key", TensorProto.FLOAT, [batch, length, width])
        )
    path = save(model, tmp_path / "hybrid.onnx")
    report = validate(path, lengths=(30,), decode_steps=10)
    assert phases(report) == {"decode": ("logits", 40)}
    assert report.passed, report.summary()


def test_a_static_graph_is_compared_at_its_own_shape() -> None:
    report = validate(model_path("layer-script-static-eager"), config={"indexer_budget": 16})
    assert phases(report) == {"prefill": ("out", 24)}
    assert report.passed
    assert report.notes[0] == "the graph takes 12 tokens a call: nothing is decoded"


def test_prompts_that_leave_the_indexer_no_choice_are_noted() -> None:
    """Up to 67 tokens the sample's 16 blocks of 4 hold everything but an incomplete block."""
    expected = "every row attends to all of its tokens: the indexer has a choice from 68 tokens on (--lengths)"
    assert validate(LM, lengths=(66,), decode_steps=1).notes == (expected,)
    assert validate(LM, lengths=(66,), decode_steps=2).notes == ()


class TestPatchedFile:
    """MODEL is patched already, and its original is given."""

    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
    def test_passes_whatever_its_surface(self, dtype: Any, tmp_path: Path) -> None:
        patched = patch_onnx(LM, tmp_path / "p.onnx", dtype=dtype, pool_io="copy").output
        assert validate(patched, original=LM, **SMALL).passed

    def test_under_the_name_of_edge_llm(self, tmp_path: Path) -> None:
        model = onnx.load(patch_onnx(LM, tmp_path / "p.onnx", reference_body=False).output)
        for call in (n for n in model.graph.node if n.op_type == "QsaAttention"):
            call.op_type, call.domain = "QsaAttentionPlugin", "trt_edgellm"
        assert validate(save(model, tmp_path / "edge.onnx"), original=LM, **SMALL).passed

    def test_without_its_definition(self, tmp_path: Path) -> None:
        patched = patch_onnx(LM, tmp_path / "p.onnx", reference_body=False).output
        assert validate(patched, original=LM, **SMALL).passed

    def test_default_sizes_keep_within_a_baked_rope_table(self, tmp_path: Path) -> None:
        patched = patch_onnx(LM, tmp_path / "p.onnx", rope_table="initializer", max_positions=50).output
        report = validate(patched, original=LM)
        assert report.passed
        assert phases(report) == {"prefill": ("logits", 75), "decode": ("logits", 75)}
        with pytest.raises(InputError, match="got 56 tokens; expected at most 50, as the baked rope table has"):
            validate(patched, original=LM, **SMALL)

    @pytest.mark.parametrize("name", ["qsa_0/q_norm_gamma", "qsa_1/indexer_k_norm_gamma"])
    def test_a_wrong_norm_weight_fails(self, name: str, tmp_path: Path) -> None:
        """One element, off by a hundredth: no rounding of what the original holds."""
        model = onnx.load(patch_onnx(LM, tmp_path / "p.onnx").output)
        change(initializer(model, name), lambda gamma: gamma + 0.01 * (np.arange(gamma.size) == 3))
        assert not validate(save(model, tmp_path / "wrong.onnx"), original=LM, lengths=(160,), decode_steps=2).passed

    def test_a_wrong_rope_fails(self, tmp_path: Path) -> None:
        model = onnx.load(patch_onnx(LM, tmp_path / "p.onnx", rope_table="initializer", max_positions=60).output)
        table = initializer(model, "rope_rotary_cos_sin")
        change(table, lambda value: np.roll(value, value.shape[2] // 2, axis=2))
        report = validate(save(model, tmp_path / "wrong.onnx"), original=LM, **SMALL)
        assert [c.passed for c in report.comparisons] == [False, False]
        assert min(c.cosine for c in report.comparisons) < 1

    def test_another_number_of_layers(self, tmp_path: Path) -> None:
        patched = patch_onnx(LM, tmp_path / "p.onnx").output
        with pytest.raises(InputError, match="got 2 QsaAttention nodes; expected 1, one for each attention of the ori"):
            validate(patched, original=MODELS / "real_layer_fp16.onnx", **SMALL)

    def test_needs_its_original(self, tmp_path: Path) -> None:
        patched = patch_onnx(LM, tmp_path / "p.onnx").output
        with pytest.raises(InputError, match=r"MODEL: got .*, a patched file; expected an unpatched one; give it with"):
            validate(patched)
        with pytest.raises(InputError, match=r"--original: got .*, a patched file"):
            validate(patched, original=patched)


def test_a_wrong_patch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = comparison.edit_model

    def wrong(source: ModelFile, *arguments: Any) -> Any:
        done = edit(source, *arguments)
        call = next(n for n in source.model.graph.node if n.op_type == "QsaAttention")
        next(a for a in call.attribute if a.name == "indexer_budget").i -= 4
        return done

    monkeypatch.setattr(comparison, "edit_model", wrong)
    assert not validate(LM, lengths=(160,), decode_steps=3).passed


def test_decode_is_left_out_where_other_layers_forget(tmp_path: Path) -> None:
    """A running sum over the tokens stands for a layer of linear attention: one token alone tells it nothing."""
    model = load()
    embedding = next(n.output[0] for n in model.graph.node if n.op_type == "Gather" and "embed_tokens" in n.input[0])
    add_constant(model, "token_axis", np.array(1, np.int64))
    insert(model, helper.make_node("CumSum", [embedding, "token_axis"], ["running"]), after=embedding)
    reroute(model, embedding, "running")
    report = validate(save(model, tmp_path / "hybrid.onnx"), **SMALL)
    assert phases(report) == {"prefill": ("logits", 50 + 21 + 2 * 6)}
    assert report.passed
    assert report.notes[0] == (
        "decode was not compared: other layers carry tokens along, and have no cache in this graph"
    )


GEOMETRY = Geometry(
    num_q_heads=2,
    num_kv_heads=1,
    head_size=8,
    indexer_n_heads=1,
    indexer_head_dim=8,
    indexer_budget=8,
    indexer_compress_ratio=4,
)


def test_zero_ties() -> None:
    """Two blocks are kept. Rows with a third complete block tie where at most one block scores above zero."""
    queries = np.zeros((1, 16, 8), np.float32)
    queries[0, :, 7] = 1  # dim 7 is not rotated
    queries[0, 13:, 7] = -1
    weights = {f"{name}_gamma": np.zeros(8, np.float32) for name in ("q_norm", "k_norm")}
    weights |= {f"indexer_{name}_gamma": np.zeros(8, np.float32) for name in ("q_norm", "k_norm")}
    rope = np.concatenate([np.ones((1, 16, 2)), np.zeros((1, 16, 2))], axis=-1).astype(np.float32)

    def ties(blocks: np.ndarray) -> list[int]:
        call: Any = type("Call", (), {"inputs": {**weights, "rope_rotary_cos_sin": rope}})()
        call.node = type("Node", (), {"geometry": GEOMETRY})()
        index_qk = np.concatenate([queries, np.repeat(blocks, 4, axis=1)], axis=-1)
        return np.flatnonzero(comparison._zero_ties(call, index_qk)[0]).tolist()

    def blocks(*signs: int) -> np.ndarray:
        value = np.zeros((1, 4, 8), np.float32)
        value[0, :, 7] = signs
        return value

    # Scores of the rows with three complete blocks, 11 to 14, and of row 15 with four; + is above zero.
    assert ties(blocks(1, 1, -1, -1)) == [13, 14]  # ++0 ++0 00+ 00+ 00++
    assert ties(blocks(1, -1, -1, -1)) == [11, 12]  # +00 +00 0++ 0++ 0+++
    assert ties(blocks(-1, -1, -1, -1)) == [11, 12]  # 000 000 +++ +++ ++++


def test_only_differing_rows_with_ties_are_ignored() -> None:
    rows = np.array([[True, True, True, True, False]])
    errors = np.array([[1.0, 1e-7, 1e-6, 2e-6, 9.0]])
    ties = np.array([[True, True, False, False, True]])
    found = comparison._comparison("decode", "out", rows, errors, ties, 1e-5, 1.0)
    assert (found.rows, found.ignored, found.error, found.passed) == (4, 1, 2e-6, True)
    assert not comparison._comparison("decode", "out", rows, errors, ~ties, 1e-5, 1.0).passed
    everywhere = comparison._comparison("decode", "out", rows, np.full((1, 5), 1.0), np.ones((1, 5), bool), 1e-5, 1.0)
    assert not everywhere.passed  # nothing was compared


def test_weights_beside_the_model_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lm.onnx"
    onnx.save(load(), path, save_as_external_data=True, location="lm.data", size_threshold=128)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    used: list[int] = []
    run = comparison._PatchedRun.compare

    def spy(*arguments: Any) -> Any:
        used.append(sum(p.stat().st_size for p in temporary.rglob("*") if p.is_file()))
        return run(*arguments)

    monkeypatch.setattr(comparison._PatchedRun, "compare", spy)
    assert validate(path, **SMALL).passed
    assert used == [0]
    assert {p.name for p in tmp_path.iterdir()} == {"lm.onnx", "lm.data", "tmp"}
    assert (tmp_path / "lm.data").stat().st_nlink == 1


def test_a_model_without_qsa_is_refused() -> None:
    with pytest.raises(RefusedError):
        validate(MODELS / "plain_qwen3.onnx", lengths=(5,), decode_steps=1)


def test_an_input_of_unknown_meaning(tmp_path: Path) -> None:
    model = load()
    model.graph.input.append(helper.make_tensor_value_info("temperature", TensorProto.FLOAT, []))
    with pytest.raises(InputError, match="input temperature: got float32"):
        validate(save(model, tmp_path / "m.onnx"), **SMALL)


def test_what_onnxruntime_cannot_run(tmp_path: Path) -> None:
    model = load()
    node(model, "logits").op_type, node(model, "logits").domain = "Unheard", "of"
    model.opset_import.append(helper.make_opsetid("of", 1))
    with pytest.raises(FailedError, match=r"onnxruntime cannot run the original m\.onnx: .*Unheard") as error:
        validate(save(model, tmp_path / "m.onnx"), **SMALL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"lengths": "5,x"}, {"lengths": (0,)}, {"decode_steps": -1}])
def test_sizes_are_judged(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"from [01] on"):
        validate(LM, **options)


@pytest.mark.parametrize(
    ("memory", "options"),
    [(None, {"lengths": "2000000000"}), (None, {"decode_steps": 99999999999}), (8 << 20, {"lengths": (600,)})],
)
def test_sizes_beyond_the_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, options: dict[str, Any]
) -> None:
    """600 tokens and 40 steps: 1.6 MiB a head, 12.5 MiB for the 8 heads of the model."""
    if memory is not None:
        monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}.__getitem__)
    with pytest.raises(InputError, match="GiB of this machine's memory; lower --lengths"):
        validate(LM, **options)


class TestCommand:
    """`qsa-trt validate`."""

    ARGUMENTS = ("validate", str(LM), "--lengths", "30,5", "--decode-steps", "2")

    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(self.ARGUMENTS) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["phase", "output", "rows", "ignored", "error", "bound", "cosine"]
        assert lines[1].split()[:4] == ["prefill", "logits", "35", "0"]
        assert lines[2].split()[:4] == ["decode", "logits", "4", "0"]
        assert lines[-1] == "PASSED"

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.ARGUMENTS, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["passed"] is True
        assert [c["phase"] for c in report["comparisons"]] == ["prefill", "decode"]
        assert set(report) == {"model", "original", "comparisons", "notes", "passed"}

    def test_failure(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(comparison, "row_error", lambda a, e: np.full(a.shape[:-1], 1e-3))
        assert cli.main(self.ARGUMENTS) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].endswith("FAILED")
        assert lines[-1] == "FAILED"
