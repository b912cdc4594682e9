"""Compares an engine with the patched file it was built from: prefill and decode steps over one paged pool.

onnxruntime runs the file through the definition that it carries, TensorRT runs the engine, both with the same prompts.
Prompts are short by default, so that every row attends to all of its tokens: no rounding can flip a selection then.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.errors import InputError

from .building.manifest import manifest_path
from .comparison import Comparison, ValidationReport
from .data_loader import THETA
from .metrics import cosine, row_error
from .paging import pages_for
from .patching.files import load_model
from .prompts import Prompts, Sizes, model_inputs, parse_lengths
from .rope import default_inv_freq, rope_table
from .runtime import EngineSession, OnnxSession, PoolLayout, Session
from .runtime.engine_file import check_model
from .runtime.layout import load_manifest

#: A layer rounds tensors to the surface dtype, or products to TF32, on each side in another order; the errors of layers
#: are independent and add up as the root of their number. In units of the surface's epsilon. In the sample model
#: rounding moves a row of logits by a sixth of a unit, an attention that is missing or scaled wrongly by over 200.
BOUND_ULPS = 4.0
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_LENGTHS, _STEPS = (160, 97, 33), 8

Outputs = dict[str, NDArray[Any]]


def validate_engine(
    engine: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    lengths: str | Sequence[int] | None = None,
    decode_steps: int | None = None,
    seed: int = 0,
    cuda_graph: bool = False,
) -> ValidationReport:
    """Run an engine and the file it was built from.

    Args:
        engine: the file that build-engine wrote, ENGINE.json beside it. Engines hold code: only one that you trust.
        original: the patched file; None is the one of ENGINE.json's name beside the engine.
        lengths: prompt lengths, one a sequence, also as "60,20"; default 160, 97 and 33, as far as the engine and the
            indexer's budget go.
        decode_steps: tokens decoded after each prompt; default 8.
        seed: of prompts and pages.
        cuda_graph: decode by replaying a CUDA graph from the second step on.

    Raises:
        InputError: the engine does not fit its description, its file or this machine, or the sizes do not fit it.
        MissingPackageError: onnxruntime or TensorRT is not installed.
        FailedError: the engine cannot be loaded or run.
    """
    path = Path(engine)
    manifest = load_manifest(manifest_path(path))
    source = Path(original) if original is not None else path.parent / manifest["onnx"]["file"]
    check_model(source, manifest)
    layout = PoolLayout.of_manifest(manifest)
    sizes = _sizes(manifest, layout, lengths, decode_steps)
    file = load_model(source)
    described = manifest["rope"]
    table = rope_table(described["max_positions"], default_inv_freq(described["rotary_dims"], THETA))
    rope = table if described["source"] == "input" else None
    inputs = model_inputs(file.model)
    prompts = Prompts(inputs, sizes.totals, table, np.random.default_rng(seed))
    expected_session = OnnxSession(
        file,
        num_pages=sum(pages_for(int(total)) for total in sizes.totals),
        max_kv_len=int(sizes.totals.max()),
        rope=rope,
    )
    actual_session = EngineSession(path, rope=rope, rng=np.random.default_rng(seed), cuda_graphs=cuda_graph)
    actual, expected = (_run(session, prompts, inputs, sizes) for session in (actual_session, expected_session))
    bound = BOUND_ULPS * _EPSILON[layout.dtype.name] * math.sqrt(len(layout.layers))
    notes = ["decode replays a CUDA graph from the second step on"] if cuda_graph else []
    return ValidationReport(path, source, _compare(actual, expected, sizes, bound), tuple(notes))


def _sizes(
    manifest: dict[str, Any], layout: PoolLayout, lengths: str | Sequence[int] | None, decode_steps: int | None
) -> Sizes:
    """Prompts and steps that the engine has room for."""
    engine = manifest["sizes"]
    steps = _STEPS if decode_steps is None else decode_steps
    most = min(engine["max_seq_len"], layout.max_kv_len - steps)
    if lengths is None:
        seen_whole = min(layer.geometry.list_width for layer in layout.layers) - steps
        prompt = [max(1, min(length, most, seen_whole)) for length in _LENGTHS][: engine["max_batch"]]
    else:
        prompt = parse_lengths(lengths)
    pages = sum(pages_for(length + steps) for length in prompt)
    if steps < 0 or max(prompt) > most or len(prompt) > engine["max_batch"] or pages > layout.num_pages:
        raise InputError(
            "lengths and decode steps",
            f"{', '.join(map(str, prompt))} and {steps}",
            f"at most {engine['max_batch']} prompts of {most} tokens, in {layout.num_pages} pages of 128",
            "lower them, or build a larger engine",
        )
    return Sizes(np.array(prompt, np.int64), steps)


def _run(session: Session, prompts: Prompts, inputs: Sequence[Any], sizes: Sizes) -> list[Outputs]:
    """Outputs of the prefill and of every decode step."""
    rows = [session.pages.allocate() for _ in sizes.prompt]
    longest = int(sizes.prompt.max())
    positions = np.broadcast_to(np.arange(longest), (len(rows), longest))  # [B, S]
    outputs = [session.prefill(rows, prompts.window(inputs, positions), sizes.prompt)]
    for step in range(sizes.steps):
        outputs.append(session.decode(rows, prompts.window(inputs, (sizes.prompt + step)[:, None])))
    return outputs


def _compare(actual: list[Outputs], expected: list[Outputs], sizes: Sizes, bound: float) -> tuple[Comparison, ...]:
    """One entry an output and phase, over live rows alone."""
    longest = int(sizes.prompt.max())
    live = np.arange(longest) < sizes.prompt[:, None]  # [B, S]
    found = []
    for name in expected[0]:
        if expected[0][name].shape[:2] != live.shape:
            continue
        phases = {"prefill": (actual[0][name][live], expected[0][name][live])}  # [rows, ...]
        if sizes.steps:
            pair = (np.concatenate([step[name][:, 0] for step in side[1:]]) for side in (actual, expected))
            phases["decode"] = (next(pair), next(pair))
        for phase, (a, e) in phases.items():
            error = row_error(a.reshape(len(a), -1), e.reshape(len(e), -1)).max(initial=0.0)
            found.append(Comparison(phase, name, len(a), 0, float(error), cosine(a, e), bound))
    if not found:
        raise InputError("outputs", ", ".join(expected[0]), "one with a row a token", "export such an output")
    return tuple(found)
