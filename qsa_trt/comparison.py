"""Compares a causal LM with its patched form in onnxruntime: one ragged prefill, then decode steps."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.errors import InputError

from .data_loader import VOCABULARY
from .metrics import row_error
from .patching import patch_onnx
from .patching.files import load_model
from .recording import PatchedSession, open_session

#: fp32 on both sides, sums in another order: a few hundred roundings of 6e-8 of the row's largest value.
FP32_BOUND = 1e-5


@dataclass(frozen=True)
class Comparison:
    """The worst row of one phase: largest error over the row's largest value.

    Attributes:
        phase: `prefill` or `decode`.
        rows: live rows compared.
        error: the largest row error.
        bound: what it may be.
    """

    phase: str
    rows: int
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound


def compare_causal_lm(
    model: str | os.PathLike[str],
    *,
    lengths: Sequence[int] = (160, 97, 33),
    decode_steps: int = 40,
    bound: float = FP32_BOUND,
    seed: int = 0,
) -> tuple[Comparison, Comparison]:
    """Patch an unpatched causal LM with an fp32 surface and compare logits over prefill and decode.

    The original runs once over whole right-padded prompts of `lengths[b] + decode_steps` tokens. The patched model
    prefills the first `lengths[b]` tokens and decodes the others one by one, over a shuffled page table and pools
    that held NaN; every row must equal the original's row of the same token.

    Args:
        model: the unpatched fp32 ONNX file: `input_ids` and optionally a two-dimensional `attention_mask` in,
            `logits` out.
        lengths: prompt lengths, one a sequence.
        decode_steps: tokens decoded a sequence.
        bound: largest row error that passes.
        seed: of the random prompts.

    Returns:
        The comparisons of prefill and of decode.

    Raises:
        InputError: a graph with other inputs or outputs, or a wrong file.
        RefusedError: the model cannot be patched.
        MissingPackageError: onnxruntime is not installed.
    """
    prompt, total = np.asarray(lengths), np.asarray(lengths) + decode_steps  # [B]
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (total.size, int(total.max())))
    expected = _original_logits(Path(model), tokens, total)  # [B, S, vocabulary]
    with tempfile.TemporaryDirectory() as folder:
        patched = patch_onnx(
            model,
            Path(folder) / "patched.onnx",
            dtype="fp32",
            rope_table="initializer",
            max_positions=int(total.max()),
        ).output
        session = PatchedSession(
            patched,
            batch=total.size,
            max_kv_len=int(total.max()),
            rng=np.random.default_rng(seed),
            fill=np.nan,
        )
    first = session.prefill({"input_ids": tokens[:, : prompt.max()]}, prompt).outputs["logits"]
    prefill = [row_error(first[b, :n], expected[b, :n]) for b, n in enumerate(prompt)]
    rows = np.arange(total.size)
    decode = []
    for step in range(decode_steps):
        position = prompt + step  # [B]
        logits = session.decode({"input_ids": tokens[rows, position][:, None]}).outputs["logits"]
        decode.append(row_error(logits[:, 0], expected[rows, position]))
    return _worst("prefill", prefill, bound), _worst("decode", decode, bound)


def _original_logits(model: Path, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Logits `[B, S, vocabulary]` of the unpatched model over right-padded prompts."""
    source = load_model(model)
    session = open_session(source.model, source.folder)
    inputs = {value.name for value in session.get_inputs()}
    if not {"input_ids"} <= inputs <= {"input_ids", "attention_mask"}:
        raise InputError(
            f"model {model}",
            f"inputs {', '.join(sorted(inputs))}",
            "a prefill graph that takes input_ids and optionally attention_mask",
            "compare an export of that form",
        )
    feeds: dict[str, NDArray[Any]] = {"input_ids": tokens}
    if "attention_mask" in inputs:
        feeds["attention_mask"] = (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int64)
    return np.asarray(session.run(["logits"], feeds)[0])


def _worst(phase: str, errors: Sequence[NDArray[np.float64]], bound: float) -> Comparison:
    rows = np.concatenate(errors)
    return Comparison(phase, rows.size, float(rows.max()), bound)


@dataclass(frozen=True)
class ValidationReport:
    """What `validate` found.

    Attributes:
        model: the file that was validated.
        comparisons: one entry a phase and output.
    """

    model: Path
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison is within its bound."""
        return all(c.passed for c in self.comparisons)

    def json(self) -> str:
        """The report for programs."""
        return json.dumps({**asdict(self), "model": str(self.model), "passed": self.passed}, indent=2)

    def summary(self) -> str:
        """The report for people; the last line is PASSED or FAILED."""
        lines = [f"{c.phase}: {c.rows} rows, error {c.error:.1e}, bound {c.bound:.0e}" for c in self.comparisons]
        return "\n".join([*lines, "PASSED" if self.passed else "FAILED"])


def validate(
    model: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    lengths: str | Sequence[int] | None = None,
    decode_steps: int | None = None,
    seed: int = 0,
) -> ValidationReport:
    """Compare a model with its patched form in onnxruntime."""
    if isinstance(lengths, str):
        lengths = [int(part) for part in lengths.split(",")]
    return ValidationReport(
        Path(model),
        compare_causal_lm(model, lengths=lengths or (160, 97, 33), decode_steps=decode_steps or 40, seed=seed),
    )
