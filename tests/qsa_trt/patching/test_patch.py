"""`patch_onnx` as a whole: every sample unchanged, options, dry runs, patched input, and what a user reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from qsa_plugin.errors import InputError, RefusedError
from qsa_trt.metrics import row_error
from qsa_trt.patching import PatchReport, patch_onnx
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.recording import PatchedSession
from tests.support.graphs import load, strip_names
from tests.support.originals import MODELS, Original
from tests.support.samples import sample

LM = MODELS / "qsa_lm.onnx"
SAMPLES = [
    "layer-dynamo-18-eager",
    "layer-dynamo-20-sdpa",
    "layer-dynamo-23-sdpa",
    "layer-script-18-eager",
    "real_layer_fp16",
    "qsa2_raw",
    "qsa2_decode",
]
#: The first needs its budget from a config; onnx.checker refuses the second before it is patched, and after it.
OTHER_SAMPLES = [("layer-script-static-eager", {"indexer_budget": 16}), ("qsa2_prefill-cpu", None)]


@pytest.mark.pitfall(37)
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
def test_samples_are_patched_unchanged(name: str, dtype: Any, tmp_path: Path) -> None:
    path = sample(name)
    onnx.checker.check_model(path)
    report = patch_onnx(path, tmp_path / "out.onnx", dtype=dtype)
    assert report.status == "patched" and report.output == tmp_path / "out.onnx"
    assert len(report.layers) == (2 if name.startswith("qsa2") else 1)
    onnx.checker.check_model(report.output, full_check=False)
    session = onnxruntime.InferenceSession(report.output, providers=["CPUExecutionProvider"])
    assert {t.name for t in report.new_inputs} <= {i.name for i in session.get_inputs()}


@pytest.mark.parametrize(("name", "config"), OTHER_SAMPLES)
def test_other_samples_are_patched_unchanged(name: str, config: Any, tmp_path: Path) -> None:
    report = patch_onnx(sample(name), tmp_path / "out.onnx", config=config)
    session = onnxruntime.InferenceSession(report.output, providers=["CPUExecutionProvider"])
    assert {t.name for t in report.new_inputs} <= {i.name for i in session.get_inputs()}


@pytest.mark.parametrize("name", ["qsa_lm", "real_layer_fp16"])
def test_own_models_are_patched(name: str, tmp_path: Path) -> None:
    report = patch_onnx(MODELS / f"{name}.onnx", tmp_path / "out.onnx", config=MODELS / f"{name}.config.json")
    onnx.checker.check_model(report.output)


def test_patching_is_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        patch_onnx(LM, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_model_is_never_modified(tmp_path: Path) -> None:
    before = LM.read_bytes()
    patch_onnx(LM, tmp_path / "out.onnx")
    assert LM.read_bytes() == before


@pytest.mark.parametrize("name", ["qsa_lm", "qsa2_decode", "layer-dynamo-18-eager"])
def test_file_without_names_is_patched_alike(name: str, tmp_path: Path) -> None:
    """No metadata, no node names: the structure alone leads to the same computation."""
    onnx.save(strip_names(load(name)), tmp_path / "bare.onnx")
    report = patch_onnx(tmp_path / "bare.onnx", tmp_path / "bare.qsa.onnx", dtype="fp32")
    assert {layer.strategy for layer in report.layers} == {"structure"}
    onnx.save(load(name), tmp_path / "named.onnx")
    patch_onnx(tmp_path / "named.onnx", tmp_path / "named.qsa.onnx", dtype="fp32")
    original = Original(name)
    tokens, outputs = original.tokens(np.random.default_rng(0), 1, 1), []
    for file in ("bare", "named"):
        session = PatchedSession(tmp_path / f"{file}.qsa.onnx", batch=1, max_kv_len=9, rope=original.rope(9))
        outputs.append([session.decode(tokens).outputs for _ in range(9)][-1])
    assert outputs[0].keys() == outputs[1].keys()
    assert all(np.array_equal(value, outputs[1][key]) for key, value in outputs[0].items())


def test_default_output(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(LM.read_bytes())
    assert patch_onnx(path).output == tmp_path / "model.qsa.onnx"
    assert (tmp_path / "model.qsa.onnx").is_file()


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    dry = patch_onnx(LM, tmp_path / "out.onnx", dry_run=True)
    assert dry.status == "dry-run" and not list(tmp_path.iterdir())
    real = patch_onnx(LM, tmp_path / "out.onnx")
    assert (dry.layers, dry.new_inputs, dry.removed_nodes) == (real.layers, real.new_inputs, real.removed_nodes)
    text = dry.summary()
    assert text.splitlines()[0] == f"{LM}: 2 QSA attention layers would be patched"
    assert text.splitlines()[-1] == f"would be written: {tmp_path / 'out.onnx'} (dry run: nothing was written)"


@pytest.mark.pitfall(36)
def test_patched_model_is_left_alone(tmp_path: Path) -> None:
    patch_onnx(LM, tmp_path / "once.onnx")
    report = patch_onnx(tmp_path / "once.onnx", tmp_path / "twice.onnx")
    assert report.status == "already-patched" and report.layers == ()
    assert report.summary() == f"{tmp_path / 'once.onnx'}: already patched; nothing was written"
    assert not (tmp_path / "twice.onnx").exists()


def test_edge_llm_nodes_count_as_patched(tmp_path: Path) -> None:
    patch_onnx(LM, tmp_path / "once.onnx", reference_body=False)
    model = onnx.load(tmp_path / "once.onnx")
    for node in model.graph.node:
        if node.op_type == "QsaAttention":
            node.op_type, node.domain = "QsaAttentionPlugin", "trt_edgellm"
    onnx.save(model, tmp_path / "edge.onnx")
    assert patch_onnx(tmp_path / "edge.onnx").status == "already-patched"


def test_half_patched_model_is_reported(tmp_path: Path) -> None:
    """A patched layer next to a plain one: left alone, and said."""
    model = load()
    node = onnx.helper.make_node("QsaAttention", ["input_ids"], ["other"], domain="qsa")
    model.graph.node.append(node)
    onnx.save(model, tmp_path / "half.onnx")
    report = patch_onnx(tmp_path / "half.onnx")
    assert report.status == "already-patched"
    assert [w.endswith("is still an indexer in plain operators") for w in report.warnings] == [True, True]


@pytest.mark.pitfall(36)
def test_model_without_qsa(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no QSA attention in this model; looked for") as error:
        patch_onnx(MODELS / "plain_qwen3.onnx", tmp_path / "out.onnx")
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_refusal_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="nothing was patched"):
        patch_onnx(sample("layer-script-static-eager"), tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "int8"}, "--dtype: got int8; expected one of fp16, bf16, fp32; choose one of these"),
        ({"pool_io": "both"}, "--pool-io: got both; expected one of in-place, alias, copy; choose one of these"),
        ({"rope_table": "no"}, "--rope-table: got no; expected one of input, initializer; choose one of these"),
        (
            {"max_positions": 5},
            "--max-positions: got 5; expected no value with --rope-table input; add --rope-table initializer",
        ),
        (
            {"rope_table": "initializer"},
            "--max-positions: got nothing; expected a positive number of positions with --rope-table initializer;"
            " give the longest sequence that will be run",
        ),
        (
            {"rope_table": "initializer", "max_positions": 0},
            "--max-positions: got 0; expected a positive number of positions with --rope-table initializer;"
            " give the longest sequence that will be run",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        patch_onnx(LM, tmp_path / "out.onnx", **options)
    assert (str(error.value), error.value.exit_code) == (text, 2)
    assert not list(tmp_path.iterdir())


def test_unrolled_graph_needs_its_budget(tmp_path: Path) -> None:
    """Right at its own shape, and said to be so; its TopK sizes are computed, so the config tells the budget."""
    path = sample("layer-script-static-eager")
    with pytest.raises(RefusedError, match="indexer_budget: the graph says nothing; give --config"):
        patch_onnx(path, tmp_path / "out.onnx")
    report = patch_onnx(path, tmp_path / "out.onnx", dtype="fp32", config={"indexer_budget": 16})
    assert "the indexer is unrolled: the original is right at its own shape only" in report.warnings
    twin = Original("layer-script-18-eager")
    tokens = twin.tokens(np.random.default_rng(0), 2, 12)
    feeds = tokens | twin.layer_feeds(2, 12, np.ones((2, 12), bool))
    original = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = original.run(["out"], feeds)[0]
    step = PatchedSession(report.output, batch=2, max_kv_len=12, rope=twin.rope(12)).prefill(tokens, [12, 12])
    assert row_error(step.outputs["out"], expected).max() <= 1e-5


class TestSummary:
    """What the command prints."""

    @staticmethod
    def report(tmp_path: Path, **options: Any) -> PatchReport:
        return patch_onnx(LM, tmp_path / "out.onnx", **options)

    def test_text(self, tmp_path: Path) -> None:
        lines = self.report(tmp_path).summary().splitlines()
        assert lines[0] == f"{LM}: 2 QSA attention layers patched"
        assert lines[1:4] == [
            "layer 0: lm.model.layers.0.self_attn (found by scopes)",
            "  heads 8/2 x 64, rotary 32, indexer 2 x 64, budget 64 tokens, ratio 4, scale 0.125, eps 1e-06,"
            " pool in-place",
            "  surface fp16: casts stand around the node, the graph is fp32",
        ]
        assert "removed inputs: attention_mask" in lines
        assert "rope table: graph input, rotary dims 32" in lines
        assert lines[-1] == f"written: {tmp_path / 'out.onnx'}"

    def test_says_what_padding_survives(self, tmp_path: Path) -> None:
        assert "Only causal attention with padding on the right survives patching" in self.report(tmp_path).summary()

    def test_says_when_there_are_no_casts(self, tmp_path: Path) -> None:
        assert "  surface fp32, as the graph" in self.report(tmp_path, dtype="fp32").summary().splitlines()

    def test_new_inputs_with_shapes(self, tmp_path: Path) -> None:
        text = self.report(tmp_path).summary()
        assert "kv_page_table int32[batch, 2, pages_per_seq]" in text
        assert "new outputs: present_key_values_0 float16[2, num_pages, 128, 2, 128]" in text


def test_an_element_type_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphIndex, "elem_type", lambda *_: TensorProto.DOUBLE)
    with pytest.raises(RefusedError, match="its element type is not known to be float, float16 or bfloat16"):
        patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())
