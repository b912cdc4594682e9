"""`LayerSession` on the GPU: pages, forks and copies of pages through the plugin, against onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession
from qsa_trt.runtime import LayerSession
from tests.support.originals import MODELS, Original
from tests.support.plugin_host import needs_tensorrt
from tests.support.requirements import needs_gpu, needs_onnxruntime

pytestmark = [*needs_gpu, needs_onnxruntime, needs_tensorrt]
LENGTHS = (130, 7)


def test_a_layer_over_forked_pages_computes_what_it_saw_in_the_model(tmp_path: Path) -> None:
    patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "lm.onnx")
    rope = Original("qsa_lm").rope(300)
    recorded = PatchedSession(tmp_path / "lm.onnx", batch=2, max_kv_len=300, rope=rope, record=True)
    prompts = np.random.default_rng(0).integers(0, 128, (2, max(LENGTHS)))
    calls = [recorded.prefill({"input_ids": prompts}, LENGTHS).calls[0]]
    calls += [recorded.decode({"input_ids": np.full((2, 1), 3 * step)}).calls[0] for step in range(8)]
    session = LayerSession(
        calls[0].node.geometry,
        "float16",
        {name: array for name, array in calls[0].inputs.items() if name.endswith("gamma")},
        rope,
        num_pages=9,
        max_kv_len=300,
        max_batch=2,
        max_seq_len=max(LENGTHS),
        rng=np.random.default_rng(1),
    )
    rows: list[int | None] = [session.pages.allocate(), session.pages.allocate()]
    for call in calls:
        feeds = {name: call.inputs[name] for name in ("qkv", "index_qk")}
        done = session.prefill(rows, feeds, LENGTHS) if call is calls[0] else session.decode(rows, feeds)
        # as in layer validation: one float16 rounding of an output may flip, and one of a query or key
        scale = np.abs(call.attn_output.astype(np.float32)).max(-1, keepdims=True)
        error = np.abs(done["attn_output"].astype(np.float32) - call.attn_output.astype(np.float32))
        assert (error <= 2 * 2.0**-10 * scale).all()
        assert rows[0] is not None
        fork = session.pages.fork(rows[0])  # with a sibling, the next step copies the open page
        stray = session.pages.fork(rows[0])
        session.decode([stray], {name: array[:1, -1:] for name, array in feeds.items()})
        session.pages.free(stray)
        session.pages.free(rows[0])
        rows[0] = fork
