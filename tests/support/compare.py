"""Runs causal LMs unpatched and patched in onnxruntime, and tells how far their answers are apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from qsa_trt.metrics import row_error
from qsa_trt.patching import PatchReport, patch_onnx
from qsa_trt.recording import PatchedSession, open_session
from qsa_trt.rope import rope_table

from .graphs import load

LENGTHS = np.array([89, 33])  # the first passes the budget of 64 tokens
STEPS = 3
#: fp32 on both sides, sums in another order: a few hundred roundings of 6e-8 of the row's largest value.
BOUND = 1e-5


def feeds(model: onnx.ModelProto, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[str, Any]:
    """Feeds for whatever of the known inputs the model has; unused ones are zeros."""
    values: dict[str, Any] = {"input_ids": tokens}
    values["attention_mask"] = (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int64)
    names = [v.name for v in model.graph.input if v.name not in {t.name for t in model.graph.initializer}]
    return {n: values.get(n, np.zeros(tokens.shape, np.int64)) for n in names}


def patch(model: onnx.ModelProto, folder: Path, **options: Any) -> PatchReport:
    """Save a model as `in.onnx` and patch it to `out.onnx`."""
    onnx.save(model, folder / "in.onnx")
    return patch_onnx(folder / "in.onnx", folder / "out.onnx", **options)


def errors(model: onnx.ModelProto, folder: Path, **options: Any) -> Iterator[float]:
    """Row errors of the patched form of a variant of `qsa_lm` in prefill and decode; the original runs first."""
    total = LENGTHS + STEPS
    tokens = np.random.default_rng(1).integers(0, 128, (total.size, int(total.max())))
    expected = open_session(model).run(["logits"], feeds(model, tokens, total))[0]
    patched = onnx.load(patch(model, folder, dtype="fp32", **options).output)
    inv_freq = next(numpy_helper.to_array(t) for t in load().graph.initializer if t.name.endswith("inv_freq"))
    session = PatchedSession(
        patched, batch=total.size, max_kv_len=128, rope=rope_table(128, inv_freq.ravel()), fill=np.nan
    )
    known = {v.name for v in load().graph.input} | {"position_ids", "context_lengths", "past_key_values_0"}
    new = {t for n in session.nodes for t in n.inputs.values()}

    def own(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[str, Any]:
        inputs = {v.name for v in patched.graph.input}
        return {n: v for n, v in feeds(model, ids, lengths).items() if n in inputs & known - new}

    logits = session.prefill(own(tokens[:, : LENGTHS.max()], LENGTHS), LENGTHS).outputs["logits"]
    for b, n in enumerate(LENGTHS):
        yield row_error(logits[b, :n], expected[b, :n]).max()
    for step in range(STEPS):
        position = LENGTHS + step
        ids = tokens[np.arange(total.size), position][:, None]
        logits = session.decode(own(ids, np.ones(total.size, np.int64))).outputs["logits"]
        yield row_error(logits[:, 0], expected[np.arange(total.size), position]).max()
