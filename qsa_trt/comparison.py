"""Compares a model before and after patching in onnxruntime, in fp32: one ragged prefill, then decode steps.

The original runs over whole prompts. The patched model prefills their first part and decodes the rest token by token,
over a shuffled page table and pools that held NaN; every row must equal the original's row of the same token.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import EDGE_LLM_NAME, INPUTS, PLUGIN_NAME
from qsa_plugin.errors import InputError

from .columns import columns
from .fp32 import save_in_fp32
from .metrics import cosine, row_error
from .original import OriginalSession, empty_caches, grown_caches, onnxruntime_errors, split_caches
from .paging import empty_pool, page_table, pages_for
from .patching.config import Config, load_config
from .patching.external_data import read_tensor
from .patching.files import ModelFile, load_model
from .patching.patch import EditOptions, edit_model
from .patching.plain_form import to_plain_form
from .patching.reference_body import add_reference_function
from .progress import Progress
from .prompts import Prompts, Sizes, check_memory, choose_sizes, model_inputs
from .recording import NodeCall, PatchedSession, Step, qsa_nodes
from .reference import qsa_attention
from .rope import default_inv_freq, rope_table

Array = NDArray[Any]
#: fp32 on both sides, sums in another order: a few hundred roundings of 6e-8 of the row's largest value.
FP32_BOUND = 1e-5
#: Rope base for layers that take cosines and sines as inputs.
THETA = 1e4
_GAMMAS = tuple(t.name for t in INPUTS if t.name.endswith("_gamma"))


@dataclass(frozen=True)
class Comparison:
    """One output in one phase.

    Attributes:
        phase: `prefill` or `decode`.
        output: the graph output.
        rows: live rows, one a token.
        ignored: rows that differ and are left out: there an indexer had the choice between blocks of score zero.
        error: the largest error of a row over the row's largest value.
        cosine: the smallest of a sequence, its rows taken as one vector.
        bound: what the error may be.
    """

    phase: str
    output: str
    rows: int
    ignored: int
    error: float
    cosine: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound, and rows were left to compare."""
        return self.ignored < self.rows and self.error <= self.bound


@dataclass(frozen=True)
class ValidationReport:
    """What `validate` found.

    Attributes:
        model: the file that was validated.
        original: what it was compared with.
        comparisons: one entry a phase and output.
        notes: what a reader should know.
    """

    model: Path
    original: Path
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison did."""
        return all(c.passed for c in self.comparisons)

    def json(self) -> str:
        """The report for programs."""
        entries = [{**asdict(c), "passed": c.passed} for c in self.comparisons]
        report = {"model": str(self.model), "original": str(self.original), "comparisons": entries}
        return json.dumps({**report, "notes": list(self.notes), "passed": self.passed}, indent=2)

    def summary(self) -> str:
        """The report for people; the last line is PASSED or FAILED."""
        head = ("phase", "output", "rows", "ignored", "error", "bound", "cosine", "")
        cells = [
            (c.phase, c.output, c.rows, c.ignored, f"{c.error:.1e}", f"{c.bound:.0e}", f"{c.cosine:.8f}", verdict)
            for c in self.comparisons
            for verdict in ["" if c.passed else "FAILED"]
        ]
        lines = columns([head, *cells])
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *notes, "PASSED" if self.passed else "FAILED"])


def validate(
    model: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    lengths: str | Sequence[int] | None = None,
    decode_steps: int | None = None,
    bound: float = FP32_BOUND,
    seed: int = 0,
    progress: Progress | None = None,
) -> ValidationReport:
    """Compare a model before and after patching in onnxruntime, in fp32, on random prompts.

    Half-precision files compute in fp32 here. The norm weights of a patched file, which its nodes take rounded, are
    given back what they were rounded from, if that is so: a wrong one stays wrong.

    Args:
        model: an unpatched file, which is patched into a temporary folder, or a patched one.
        original: the unpatched file, where `model` is a patched one.
        config: the model's `config.json`, for what the graph does not tell.
        lengths: prompt lengths, one a sequence, also as "160,97"; default 160, 97 and 33, or what static dims and a
            baked rope table leave.
        decode_steps: tokens decoded after each prompt; default 40, or what is left.
        bound: largest row error that passes.
        seed: of prompts and pages.
        progress: told the steps of the work.

    Raises:
        InputError: a wrong file, a graph of another form, or sizes that it has no room for.
        RefusedError: the model cannot be patched.
        FailedError: onnxruntime cannot run a file.
        MissingPackageError: onnxruntime is not installed.
    """
    progress = progress or Progress()
    source = load_model(model) if original is None else load_model(original, "--original")
    if qsa_nodes(source.model):
        what = "MODEL" if original is None else "--original"
        raise InputError(what, f"{source.path}, a patched file", "an unpatched one", "give it with --original FILE")
    inputs, caches = split_caches(model_inputs(source.model))
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patched = None if original is None else load_model(model)
        baked = None if patched is None else _baked_rope(patched)
        sizes, notes = choose_sizes(
            inputs, bool(caches), lengths, decode_steps, None if baked is None else baked.shape[1]
        )
        check_memory(sizes)
        progress.text = "patching"
        cos_sin = any(known.is_cos_sin for known in inputs)
        fresh = _patch(load_model(source.path), load_config(config), cos_sin, int(sizes.totals.max()))
        check_memory(sizes, max(node.geometry.num_q_heads for node in qsa_nodes(fresh.model)))
        rope = _rope(fresh, sizes) if baked is None else baked
        exact = {} if patched is None else _exact_gammas(patched, fresh)
        after = save_in_fp32(_with_body(patched or fresh), folder / "after.onnx", exact)
        before = save_in_fp32(source, folder / "before.onnx", {})
        prompts = Prompts(split_caches(model_inputs(before.model))[0], sizes.totals, rope, rng)
        progress.text = "the original in onnxruntime"
        expected = OriginalSession(before).run(prompts)
        progress.text = "the patched model in onnxruntime"
        run = _PatchedRun(after, prompts, rope, rng)
        if sizes.steps and sizes.prompt.max() > 1 and run.forgets():
            notes.append("decode was not compared: other layers carry tokens along, and have no cache in this graph")
            sizes = Sizes(sizes.totals, 0)
        comparisons = run.compare(sizes, expected, bound, progress)
    return ValidationReport(Path(model), source.path, comparisons, (*notes, *_density(after, sizes)))


def _density(file: ModelFile, sizes: Sizes) -> list[str]:
    """A note where no row is long enough for an indexer to leave a block out."""
    sparse = min(node.geometry.indexer_budget + node.geometry.indexer_compress_ratio for node in qsa_nodes(file.model))
    if sizes.totals.max() >= sparse:
        return []
    return [f"every row attends to all of its tokens: the indexer has a choice from {sparse} tokens on (--lengths)"]


def _patch(source: ModelFile, config: Config, own_rope: bool, positions: int) -> ModelFile:
    """The original patched in memory with an fp32 surface, its rope table baked in where the graph holds it."""
    options = EditOptions(dtype="fp32", max_positions=None if own_rope else positions)
    edit_model(source, to_plain_form(source.model, source.folder), source.path, config, options)
    return source


def _initializers(file: ModelFile) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in file.model.graph.initializer}


def _baked_rope(file: ModelFile) -> NDArray[np.float32] | None:
    """The rope table `[1, positions, rotary]` of a patched file; None where it is a graph input."""
    nodes = qsa_nodes(file.model)
    tensor = _initializers(file).get(nodes[0].inputs["rope_rotary_cos_sin"]) if nodes else None
    return None if tensor is None else read_tensor(tensor, file.folder)


def _rope(file: ModelFile, sizes: Sizes) -> NDArray[np.float32]:
    """The table of a patched file; where the original takes cosines and sines, any will do for both sides."""
    baked = _baked_rope(file)
    if baked is not None:
        return baked
    name = qsa_nodes(file.model)[0].inputs["rope_rotary_cos_sin"]
    kind = next(v.type.tensor_type for v in file.model.graph.input if v.name == name)
    return rope_table(int(sizes.totals.max()), default_inv_freq(kind.shape.dim[2].dim_value, THETA))


def _exact_gammas(patched: ModelFile, fresh: ModelFile) -> dict[str, Array]:
    """Norm weights of `patched` by name, as they were before rounding; those that are not a rounding are left out."""
    nodes, exact_nodes = qsa_nodes(patched.model), qsa_nodes(fresh.model)
    if len(nodes) != len(exact_nodes):
        expected = f"{len(exact_nodes)}, one for each attention of the original"
        raise InputError("MODEL", f"{len(nodes)} QsaAttention nodes", expected, "give the file it was made from")
    found: dict[str, Array] = {}
    stored, exact = _initializers(patched), _initializers(fresh)
    for node, exact_node in zip(nodes, exact_nodes, strict=True):
        for gamma in _GAMMAS:
            name, exact_name = node.inputs[gamma], exact_node.inputs[gamma]
            if name in stored and exact_name in exact:
                rounded = read_tensor(stored[name], patched.folder)
                value = read_tensor(exact[exact_name], fresh.folder)
                if np.array_equal(value.astype(rounded.dtype), rounded):
                    found[name] = value
    return found


def _with_body(file: ModelFile) -> ModelFile:
    """The file, its nodes defined in plain operators if they were not."""
    operators = {(n.op_type, n.domain) for n in file.model.graph.node if n.op_type in (PLUGIN_NAME, EDGE_LLM_NAME)}
    for name, domain in sorted(operators):
        add_reference_function(file.model, name=name, domain=domain)
    return file


class _PatchedRun:
    """The patched model over the same prompts."""

    def __init__(self, file: ModelFile, prompts: Prompts, rope: NDArray[np.float32], rng: np.random.Generator) -> None:
        self.prompts = prompts
        self.inputs, self.caches = split_caches(model_inputs(file.model))
        totals = prompts.lengths
        with onnxruntime_errors("the patched model"):
            self.session = PatchedSession(
                file, batch=totals.size, max_kv_len=int(totals.max()), rope=rope, record=True, rng=rng, fill=np.nan
            )

    def forgets(self) -> bool:
        """Whether tokens reach later ones on other ways than QSA, which has length 0 here, and without a cache."""
        if self.caches:
            return False
        batch, total = self.prompts.lengths.size, int(self.prompts.lengths.max())
        feeds = self.prompts.window(self.inputs, np.broadcast_to(np.arange(min(total, 8)), (batch, min(total, 8))))
        none = np.zeros(batch, np.int32)
        with onnxruntime_errors("the patched model"):
            first = self.session.prefill(feeds, none).outputs
            second = self.session.prefill(self.prompts.with_other_start(feeds), none).outputs
        self.session.reset()
        differ = [row_error(second[name][:, 1:], value[:, 1:]).max(initial=0) for name, value in first.items()]
        return bool(max(differ) > FP32_BOUND)

    def compare(
        self, sizes: Sizes, expected: Mapping[str, Array], bound: float, progress: Progress
    ) -> tuple[Comparison, ...]:
        """Run everything and compare every output that has a row a token."""
        progress.total = sizes.steps + 1
        batch, total = sizes.totals.size, int(sizes.totals.max())
        actual: dict[str, Array] = {}  # [B, total, ...]
        index_qk: dict[str, Array] = {}  # [B, total, (Ih+1)*Id]
        call: NodeCall
        for positions, step in self._steps(sizes):
            progress.step("decode of the patched model")
            rows = np.arange(batch)[:, None], positions
            for name in step.outputs.keys() & expected.keys():
                if expected[name].shape[:2] == (batch, total):
                    actual.setdefault(name, np.zeros_like(expected[name]))[rows] = step.outputs[name]
            for call in step.calls:
                value = call.inputs["index_qk"]
                index_qk.setdefault(call.node.name, np.zeros((batch, total, value.shape[2]), value.dtype))[rows] = value
        if not actual:
            names = ", ".join(expected)
            raise InputError("outputs", names, "one with a row a token that patching keeps", "export such an output")
        position = np.arange(total)
        prefill = position < sizes.prompt[:, None]
        phases = {"prefill": prefill, "decode": ~prefill & (position < sizes.totals[:, None])}
        errors = {name: _row_errors(actual[name], expected[name]) for name in actual}
        ties = np.zeros((batch, total), bool)
        if any((error[position < sizes.totals[:, None]] > bound).any() for error in errors.values()):
            ties = np.any([_zero_ties(call, index_qk[call.node.name]) for call in step.calls], axis=0)
        return tuple(
            _comparison(phase, name, rows, errors[name], ties, bound, _cosine(actual[name], expected[name], rows))
            for name in actual
            for phase, rows in phases.items()
            if rows.any()
        )

    def _steps(self, sizes: Sizes) -> Iterator[tuple[NDArray[np.int64], Step]]:
        """Every call with the position of each of its columns, `[B, S]`."""
        batch, longest = sizes.prompt.size, int(sizes.prompt.max())
        caches = empty_caches(self.caches, self.inputs, batch)
        cached = 0 if self.caches else None
        with onnxruntime_errors("the patched model"):
            if longest:
                positions = np.broadcast_to(np.arange(longest), (batch, longest))
                feeds = self.prompts.window(self.inputs, positions, cached)
                step = self.session.prefill({**feeds, **caches}, sizes.prompt)
                yield positions, step
                caches = grown_caches(self.caches, step.outputs)
            for number in range(sizes.steps):
                positions = (sizes.prompt + number)[:, None]
                cached = None if cached is None else longest + number
                feeds = self.prompts.window(self.inputs, positions, cached)
                step = self.session.decode({**feeds, **caches})
                yield positions, step
                caches = grown_caches(self.caches, step.outputs)


def _row_errors(actual: Array, expected: Array) -> NDArray[np.float64]:
    """`[B, total]`: one token at a time, whatever its dims; one sequence at a time, since logits are large."""
    flat = (*actual.shape[:2], -1)
    return np.stack([row_error(a, e) for a, e in zip(actual.reshape(flat), expected.reshape(flat), strict=True)])


def _cosine(actual: Array, expected: Array, rows: NDArray[np.bool_]) -> float:
    """The smallest cosine of a sequence's live rows."""
    return min(cosine(a[r], e[r]) for a, e, r in zip(actual, expected, rows, strict=True) if r.any())


def _comparison(
    phase: str,
    output: str,
    rows: NDArray[np.bool_],
    errors: NDArray[np.float64],
    ties: NDArray[np.bool_],
    bound: float,
    angle: float,
) -> Comparison:
    """One output in one phase, from masks and errors `[B, total]`."""
    ignored = rows & ties & (errors > bound)
    worst = float(errors[rows & ~ignored].max(initial=0.0))
    return Comparison(phase, output, int(rows.sum()), int(ignored.sum()), worst, angle, bound)


def _zero_ties(call: NodeCall, index_qk: Array) -> NDArray[np.bool_]:
    """Rows `[B, total]` whose indexer had to choose among blocks of score 0: any choice is right.

    Args:
        call: any call of the node, for its weights and rope table.
        index_qk: `[B, total, (Ih+1)*Id]` of whole sequences.
    """
    batch, total, _ = index_qk.shape
    # One head of attention beside the indexer, whose scores do not depend on it.
    geometry = replace(call.node.geometry, num_q_heads=1, num_kv_heads=1)
    pages = pages_for(total)
    inputs = {
        **call.inputs,
        "qkv": np.zeros((batch, total, geometry.qkv_width), np.float32),
        "index_qk": index_qk,
        "past_key_value": empty_pool(geometry, batch * pages, np.float32, 0.0),
        "context_lengths": np.full(batch, total, np.int32),
        "kvcache_start_index": np.zeros(0, np.int32),
        "kv_page_table": page_table(batch, pages, batch * pages),
    }
    scores = np.stack(qsa_attention(inputs, geometry).scores)  # [B, total, G]
    if scores.shape[2] <= geometry.budget_blocks:
        return np.zeros((batch, total), bool)
    ranked = -np.sort(-scores, axis=-1)
    return np.asarray((ranked[..., geometry.budget_blocks - 1] == 0) & (ranked[..., geometry.budget_blocks] == 0))
