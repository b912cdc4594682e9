"""Exported files against Hugging Face's own modules, in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from qsa_trt.exporting import export_onnx
from qsa_trt.metrics import row_error
from qsa_trt.onnx_model import open_session
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession
from tests.support.requirements import needs_onnxruntime, needs_oracle

pytestmark = [*needs_oracle, needs_onnxruntime]

#: fp32: about 1e2 roundings of 6e-8 in a row, each relative to the row's largest value.
FP32_BOUND = 1e-5
#: The same operations on the same weights: nothing but the order of a few sums may differ.
SAME_BOUND = 1e-6
#: fp16: two or three roundings of 4.9e-4 fall differently where the patcher computes in another order.
FP16_BOUND = 2e-3
LENGTHS = [150, 1, 66]  # past the budget of 64 tokens, one token, one past the budget
STEPS = 6


def prompts(seed: int = 0) -> NDArray[np.int64]:
    """Ids [B, longest + steps]: what is decoded is known beforehand."""
    return np.random.default_rng(seed).integers(0, 128, (len(LENGTHS), max(LENGTHS) + STEPS))


def session(path: Path, rope: NDArray[np.float32] | None) -> PatchedSession:
    """Pools full of NaN and shuffled pages: reads of stale state show."""
    return PatchedSession(
        path, batch=len(LENGTHS), max_kv_len=256, rope=rope, rng=np.random.default_rng(1), fill=float("nan")
    )


def run(path: Path, ids: NDArray[np.int64], rope: NDArray[np.float32] | None) -> list[NDArray[Any]]:
    """Logits of the live tokens of each sequence, [length + steps, vocab]: one prefill, then decode steps."""
    paged = session(path, rope)
    longest = max(LENGTHS)
    logits = paged.prefill({"input_ids": ids[:, :longest]}, LENGTHS).outputs["logits"]
    rows = [[logits[b, :length]] for b, length in enumerate(LENGTHS)]
    for step in range(STEPS):
        token = np.stack([ids[b, length + step] for b, length in enumerate(LENGTHS)])[:, None]
        logits = paged.decode({"input_ids": token}).outputs["logits"]
        for b in range(len(LENGTHS)):
            rows[b].append(logits[b])
    return [np.concatenate(parts) for parts in rows]


def test_prefill_and_decode_equal_the_module(checkpoint: Any, exported: Path) -> None:
    from tests.support import checkpoints

    ids = prompts()
    expected = checkpoints.logits(checkpoint.lm, ids, [length + STEPS for length in LENGTHS])
    for b, actual in enumerate(run(exported, ids, checkpoints.rope(checkpoint.lm, 256))):
        assert actual.shape == (LENGTHS[b] + STEPS, 128)
        assert row_error(actual, expected[b, : len(actual)]).max() <= FP32_BOUND


def test_decode_equals_the_module_with_its_own_cache(checkpoint: Any, exported: Path) -> None:
    import torch
    from transformers import DynamicCache

    from tests.support import checkpoints
    from tests.support.hf import stable_topk

    ids = prompts()[:1]
    cache = DynamicCache(config=checkpoint.lm.config)
    expected = []
    with torch.no_grad(), stable_topk():
        for start, end in [(0, 150), *((t, t + 1) for t in range(150, 150 + STEPS))]:
            out = checkpoint.lm(input_ids=torch.from_numpy(ids[:, start:end]), cache=cache, use_cache=True)
            expected.append(out.logits[0].numpy())
    actual = run(exported, prompts(), checkpoints.rope(checkpoint.lm, 256))[0]
    assert row_error(actual, np.concatenate(expected)).max() <= FP32_BOUND


def test_plain_equals_the_module_and_patches_to_the_direct_export(
    checkpoint: Any, exported: Path, plain: Path, tmp_path: Path
) -> None:
    from tests.support import checkpoints

    ids = prompts()
    longest = max(LENGTHS)
    mask = (np.arange(longest) < np.array(LENGTHS)[:, None]).astype(np.int64)
    (actual,) = open_session(onnx.load(plain)).run(None, {"input_ids": ids[:, :longest], "attention_mask": mask})
    expected = checkpoints.logits(checkpoint.lm, ids[:, :longest], LENGTHS)
    for b, length in enumerate(LENGTHS):
        assert row_error(actual[b, :length], expected[b, :length]).max() <= FP32_BOUND

    report = patch_onnx(plain, tmp_path / "patched.onnx", dtype="fp32")
    assert [layer.name for layer in report.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    rope = checkpoints.rope(checkpoint.lm, 256)
    for a, b in zip(run(report.output, ids, rope), run(exported, ids, rope), strict=True):
        assert row_error(a, b).max() <= SAME_BOUND


def test_the_direct_export_has_the_form_of_a_patched_file(exported: Path, plain: Path, tmp_path: Path) -> None:
    patched = onnx.load(patch_onnx(plain, tmp_path / "patched.onnx", dtype="fp32").output)
    direct = onnx.load(exported)
    for a, b in zip(
        (*direct.graph.input, *direct.graph.output), (*patched.graph.input, *patched.graph.output), strict=True
    ):
        assert (a.name, a.type) == (b.name, b.type)
    nodes = [[n for n in m.graph.node if n.op_type == "QsaAttention"] for m in (direct, patched)]
    assert len(nodes[0]) == 2
    for a, b in zip(*nodes, strict=True):
        assert (a.name, a.domain) == (b.name, b.domain)
        attributes = [{x.name: onnx.helper.get_attribute_value(x) for x in n.attribute} for n in (a, b)]
        assert attributes[0] == attributes[1]
    assert [(f.domain, f.name) for f in direct.functions] == [("qsa", "QsaAttention")]
    assert {o.domain: o.version for o in direct.opset_import} == {"": 20, "qsa": 1}


def test_half_precision_equals_the_patched_plain_export(checkpoint: Any, tmp_path: Path) -> None:
    from tests.support import checkpoints

    export_onnx(checkpoint.folder, tmp_path / "plain.onnx", layers="1", only_attention=True, plain=True)
    report = patch_onnx(tmp_path / "plain.onnx", tmp_path / "patched.onnx")
    export_onnx(checkpoint.folder, tmp_path / "direct.onnx", layers="1", only_attention=True)
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((len(LENGTHS), max(LENGTHS), 32)).astype(np.float16)
    paged = [session(path, checkpoints.rope(checkpoint.lm, 256)) for path in (report.output, tmp_path / "direct.onnx")]
    patched, direct = (s.prefill({"hidden_states": hidden}, LENGTHS).outputs["hidden_states_out"] for s in paged)
    assert patched.dtype == direct.dtype == np.float16
    for b, length in enumerate(LENGTHS):
        assert row_error(patched[b, :length], direct[b, :length]).max() <= FP16_BOUND


def test_stages_in_a_row_equal_the_whole_and_bake_their_rope(checkpoint: Any, exported: Path, tmp_path: Path) -> None:
    from tests.support import checkpoints

    for layer in ("0", "1"):
        export_onnx(
            checkpoint.folder,
            tmp_path / f"{layer}.onnx",
            dtype="fp32",
            layers=layer,
            rope_table="initializer",
            max_positions=256,
        )
    ids = prompts()[:, : max(LENGTHS)]
    first, second = (session(tmp_path / f"{layer}.onnx", None) for layer in ("0", "1"))
    streams = first.prefill({"input_ids": ids}, LENGTHS).outputs["hidden_states_out"]
    assert streams.shape == (*ids.shape, 2 * 32)  # hc_count streams
    logits = second.prefill({"hidden_states": streams}, LENGTHS).outputs["logits"]
    whole = session(exported, checkpoints.rope(checkpoint.lm, 256)).prefill({"input_ids": ids}, LENGTHS)
    for b, length in enumerate(LENGTHS):
        assert row_error(logits[b, :length], whole.outputs["logits"][b, :length]).max() <= SAME_BOUND


@pytest.mark.parametrize("as_plain", [False, True], ids=["nodes", "plain"])
def test_attention_alone_equals_the_module(checkpoint: Any, tmp_path: Path, as_plain: bool) -> None:
    """Layer 1 of a hybrid-like range: no embedding, no experts, hidden states of one stream."""
    import torch

    from tests.support import checkpoints
    from tests.support.hf import stable_topk
    from tools import hf_export

    path = tmp_path / "attention.onnx"
    export_onnx(checkpoint.folder, path, dtype="fp32", layers="1", only_attention=True, plain=as_plain)
    feeds = hf_export.layer_inputs(checkpoint.lm.config, LENGTHS, seed=3)
    module = checkpoint.lm.model.layers[1].self_attn
    with torch.no_grad(), stable_topk():
        expected = module(feeds["hidden_states"], (feeds["cos"], feeds["sin"]), feeds["attention_mask"])[0].numpy()
    hidden = feeds["hidden_states"].numpy()
    if as_plain:
        mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int64)
        actual = open_session(onnx.load(path)).run(None, {"hidden_states": hidden, "attention_mask": mask})[0]
    else:
        paged = session(path, checkpoints.rope(checkpoint.lm, 256))
        actual = paged.prefill({"hidden_states": hidden}, LENGTHS).outputs["hidden_states_out"]
    for b, length in enumerate(LENGTHS):
        assert row_error(actual[b, :length], expected[b, :length]).max() <= FP32_BOUND


def test_biases_tied_embeddings_and_routed_experts(tmp_path: Path) -> None:
    """A model with everything that the first one lacks; only two of five experts run for a token."""
    from tests.support import checkpoints
    from tools import hf_export

    config = hf_export.text_config(hidden_size=32, layers=1, heads=4, kv_heads=1, rotary_dims=16, rope_theta=1e4)
    config.update({"attention_bias": True, "tie_word_embeddings": True, "num_experts": 5})
    lm = hf_export.causal_lm(config, seed=8).lm
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    export_onnx(checkpoints.save(lm, tmp_path / "checkpoint"), tmp_path / "model.onnx", dtype="fp32")
    ids = prompts(seed=2)
    expected = checkpoints.logits(lm, ids, [length + STEPS for length in LENGTHS])
    for b, actual in enumerate(run(tmp_path / "model.onnx", ids, checkpoints.rope(lm, 256))):
        assert row_error(actual, expected[b, : len(actual)]).max() <= FP32_BOUND
