"""transformers' own OnnxExporter, batched experts: whole models, prefill and decode graphs, fused for onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qsa_trt.metrics import row_error
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession, open_session, run_session
from qsa_trt.rope import default_inv_freq, rope_table
from tests.support.requirements import needs_oracle

pytestmark = [*needs_oracle, pytest.mark.slow]
#: fp32 on both sides, sums in another order: a few hundred roundings of 6e-8 of the row's largest value.
BOUND = 1e-5
STEPS = 30  # past the budget of 16 tokens
ROPE = rope_table(128, default_inv_freq(16, 1e7))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A one-layer model: `whole`, and `prefill` and `decode` with onnxruntime's fusions for CPUs."""
    import onnx_ir
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    from qsa_trt.exporting.vectorised_indexer import vectorised_indexer
    from tools.hf_export import causal_lm, text_config

    torch.set_num_threads(1)
    config = text_config(hidden_size=32, heads=4, head_dim=32, rotary_dims=16, indexer_head_dim=32, budget=16)
    model, ids = causal_lm(config).lm, torch.arange(24).reshape(2, 12)
    folder = tmp_path_factory.mktemp("exports")
    with vectorised_indexer():
        exporter = OnnxExporter()
        whole = exporter.export(model, {"input_ids": ids, "use_cache": False}, config=OnnxConfig(dynamic=True))
        fused = OnnxConfig(dynamic=True, ort_fusions="cpu")
        parts = exporter.export_for_generation(model, {"input_ids": ids}, config=fused).components
    paths = {}
    for name, part in {"whole": whole, **parts}.items():
        paths[name] = folder / f"{name}.onnx"
        onnx.save(onnx_ir.to_proto(part.program), paths[name])
    yield paths


def session(path: Path, batch: int) -> PatchedSession:
    report = patch_onnx(path, path.with_suffix(".qsa.onnx"), dtype="fp32")
    assert not any(".cache." in v.name or v.name == "position_ids" for v in onnx.load(report.output).graph.input)
    return PatchedSession(report.output, batch=batch, max_kv_len=64, rope=ROPE, fill=np.nan)


def operators(path: Path) -> set[str]:
    return {n.op_type for n in onnx.load(path).graph.node if n.domain}


def test_whole_model(exports: dict[str, Path]) -> None:
    tokens = np.random.default_rng(0).integers(0, 128, (2, 50))
    expected = open_session(onnx.load(exports["whole"])).run(["logits"], {"input_ids": tokens})[0]
    run = session(exports["whole"], 2)
    prefill = run.prefill({"input_ids": tokens[:, :40]}, [40, 40]).outputs["logits"]
    assert row_error(prefill, expected[:, :40]).max() <= BOUND
    for t in range(40, 50):
        decode = run.decode({"input_ids": tokens[:, t : t + 1]}).outputs["logits"]
        assert row_error(decode[:, 0], expected[:, t]).max() <= BOUND


def test_prefill_and_decode_graphs(exports: dict[str, Path]) -> None:
    """The originals run one after the other over dense caches; the patched decode graph fills its pool by itself."""
    assert "FusedMatMul" in operators(exports["prefill"]) and "GroupQueryAttention" in operators(exports["decode"])
    tokens = np.random.default_rng(1).integers(0, 128, (2, 12 + STEPS))
    prefill = open_session(onnx.load(exports["prefill"]))
    feeds: dict[str, Any] = {"input_ids": tokens[:, :12], "position_ids": np.arange(12)[None].repeat(2, axis=0)}
    wanted = run_session(prefill, {i.name: feeds[i.name] for i in prefill.get_inputs()})
    step = session(exports["prefill"], 2).prefill({"input_ids": tokens[:, :12]}, [12, 12])
    last = wanted["logits"].shape[1]  # the graph keeps the last position, or all
    assert row_error(step.outputs["logits"][:, -last:], wanted["logits"]).max() <= BOUND

    decode, patched = open_session(onnx.load(exports["decode"])), session(exports["decode"], 2)
    for t in range(12):
        patched.decode({"input_ids": tokens[:, t : t + 1]})
    caches = {f"input.{name}": value for name, value in wanted.items() if name != "logits"}
    for t in range(12, 12 + STEPS):
        feeds = {"input_ids": tokens[:, t : t + 1], "position_ids": np.full((2, 1), t), **caches}
        wanted = run_session(decode, {i.name: feeds[i.name] for i in decode.get_inputs()})
        caches = {n.replace("output.", "input."): v for n, v in wanted.items() if n != "logits"}
        actual = patched.decode({"input_ids": tokens[:, t : t + 1]}).outputs["logits"]
        assert row_error(actual[:, 0], wanted["logits"][:, 0]).max() <= BOUND, f"token {t}"
