"""Files as optimisers save them: onnxruntime at two levels, onnx-graphsurgeon, onnxslim, onnxsim; packed siblings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from qsa_trt.metrics import row_error
from qsa_trt.patching import patch_onnx
from qsa_trt.recording import PatchedSession, open_session
from qsa_trt.rope import rope_table
from tests.support.originals import Original, model_path
from tests.support.samples import sample

NAMES = (
    "layer-dynamo-18-eager",
    "layer-dynamo-20-sdpa",
    "layer-dynamo-23-sdpa",
    "layer-script-18-eager",
    "real_layer_fp16",
    "qsa_lm",
)
#: fp32 on both sides, sums in another order; an fp16 graph rounds about ten times between its input and its output.
BOUND = {"real_layer_fp16": 5e-3}
FP32_BOUND = 1e-5


def by_onnxruntime(level: str) -> Callable[[Path, Path], None]:
    def save(source: Path, target: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 4  # it warns that such a file fits this machine alone
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    return save


def by_graphsurgeon(source: Path, target: Path) -> None:
    import onnx_graphsurgeon as gs

    onnx.save(gs.export_onnx(gs.import_onnx(onnx.load(source)).fold_constants().cleanup().toposort()), target)


def by_onnxslim(source: Path, target: Path) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(source)), target)


def by_onnxsim(source: Path, target: Path) -> None:
    import onnxsim

    onnx.save(onnxsim.simplify(onnx.load(source))[0], target)


OPTIMISERS: dict[str, Callable[[Path, Path], None]] = {
    "onnxruntime basic": by_onnxruntime("BASIC"),
    "onnxruntime extended": by_onnxruntime("EXTENDED"),
    "onnx-graphsurgeon": by_graphsurgeon,
    "onnxslim": by_onnxslim,
    "onnxsim": by_onnxsim,
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", NAMES)
def test_same_answer_as_the_file_it_came_from(name: str, optimiser: str, tmp_path: Path) -> None:
    original, lengths = Original(name), [90, 33]
    OPTIMISERS[optimiser](original.path, tmp_path / "saved.onnx")
    saved = onnx.load(tmp_path / "saved.onnx")
    assert not any(node.metadata_props for node in saved.graph.node)  # all of them drop the exporter's names
    dtype = None if name == "real_layer_fp16" else "fp32"
    patched = patch_onnx(tmp_path / "saved.onnx", tmp_path / "patched.onnx", dtype=dtype).output
    tokens = original.tokens(np.random.default_rng(3), 2, 90)
    run = original.prefill(tokens, np.array(lengths))
    session = PatchedSession(patched, batch=2, max_kv_len=128, rope=original.rope(128), fill=np.nan)
    step = session.prefill(tokens, lengths)
    for output, expected in run.outputs.items():
        for b, length in enumerate(lengths):
            error = row_error(step.outputs[output][b, :length], expected[b, :length]).max()
            assert error <= BOUND.get(name, FP32_BOUND), f"{output} of sequence {b}"


def test_what_is_not_cut_keeps_its_form(tmp_path: Path) -> None:
    """Fused operators outside of the attention come back as they were, with everything around them."""
    by_onnxruntime("EXTENDED")(model_path("qsa_lm"), tmp_path / "saved.onnx")
    before = onnx.load(tmp_path / "saved.onnx")
    after = onnx.load(patch_onnx(tmp_path / "saved.onnx", tmp_path / "patched.onnx").output)
    weights = {t.name for t in before.graph.initializer}
    fused = {n.output[0]: n for n in before.graph.node if n.op_type == "FusedMatMul"}
    kept = {n.output[0]: n for n in after.graph.node if n.op_type == "FusedMatMul"}
    outside = {name: node for name, node in fused.items() if node.input[1] in weights}
    assert kept == outside and len(fused) > len(kept) > 0
    assert not any(n.name.endswith(("/MatMul", "/Mul")) and n.output[0] in fused for n in after.graph.node)
    assert {t.name for t in after.graph.initializer} - {t.name for t in before.graph.initializer} == {
        t.name for t in after.graph.initializer if t.name.startswith("qsa_")
    }


def test_sample_with_packed_siblings(tmp_path: Path) -> None:
    """Projections and norms are fused, no metadata is left, and `onnx.checker` refuses the original too."""
    path = sample("qsa2_prefill-cpu")
    with pytest.raises(onnx.checker.ValidationError, match="SimplifiedLayerNormalization"):
        onnx.checker.check_model(path)
    report = patch_onnx(path, tmp_path / "out.onnx", dtype="fp32")
    assert [layer.strategy for layer in report.layers] == ["structure"] * 2
    model = onnx.load(path)
    inv_freq = next(t for t in model.graph.initializer if t.name.endswith("inv_freq"))
    rope = rope_table(128, onnx.numpy_helper.to_array(inv_freq).ravel())
    tokens = np.random.default_rng(5).integers(0, 128, (2, 99))
    expected = open_session(model).run(["logits"], {"input_ids": tokens})[0]
    session = PatchedSession(
        report.output, batch=2, max_kv_len=128, rope=rope, rng=np.random.default_rng(0), fill=np.nan
    )
    logits = session.prefill({"input_ids": tokens[:, :80]}, [80, 80]).outputs["logits"]
    assert row_error(logits, expected[:, :80]).max() <= FP32_BOUND
    for t in range(80, 99):
        logits = session.decode({"input_ids": tokens[:, t : t + 1]}).outputs["logits"]
        assert row_error(logits[:, 0], expected[:, t]).max() <= FP32_BOUND
