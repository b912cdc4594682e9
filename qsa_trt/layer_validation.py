"""Compares the plugin on the GPU with a patched model in onnxruntime, layer by layer, on recorded activations.

onnxruntime runs the model through the definition that the file carries, prefill and then decode steps. Every call of
every node is given to the plugin, driven as TensorRT drives it, with the inputs that the node saw.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from qsa_plugin.contract import Mode
from qsa_plugin.errors import FailedError, InputError

from . import device
from .data_loader import POOL, THETA, activation
from .metrics import BF16_TIE_BAND, FP16_TIE_BAND, cosine, row_error, tie_rows
from .patching import patch_onnx
from .patching.files import load_model
from .plugin_host import PluginContext, PluginHost, shapes_of
from .prompts import DEFAULT_LENGTHS, parse_lengths
from .recording import NodeCall, PatchedSession, qsa_nodes
from .reference import qsa_attention
from .rope import default_inv_freq, rope_table

Array = NDArray[Any]
#: Both sides are fp32 inside: one rounding of an output may flip, and one of a query or key, which moves a softmax a
#: little. In units of the dtype's epsilon times the row's largest value.
BOUND_ULPS = 2.0
#: Epsilon and tie band of a surface.
_SURFACES = {"float16": (2.0**-10, FP16_TIE_BAND), "bfloat16": (2.0**-7, BF16_TIE_BAND)}


@dataclass(frozen=True)
class LayerResult:
    """One node in one mode; the worst of all its calls.

    Attributes:
        layer: the node's name.
        mode: `prefill` or `decode`.
        rows: head rows compared, padding included (it must be zeros).
        tie_rows: head rows left out because they differ and scores around the k-th are too close to tell apart.
        error: largest error of an output row over the row's largest value.
        pool_error: the same of the pool; inf where something was written that must not be.
        cosine: smallest cosine of whole outputs.
        bound: what both errors may be.
    """

    layer: str
    mode: str
    rows: int
    tie_rows: int
    error: float
    pool_error: float
    cosine: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within the bound, and rows were left to compare."""
        return self.rows > self.tie_rows and max(self.error, self.pool_error) <= self.bound


@dataclass(frozen=True)
class LayerReport:
    """All nodes of a model in both modes."""

    model: Path
    layers: tuple[LayerResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every layer did."""
        return all(layer.passed for layer in self.layers)

    def json(self) -> str:
        """The report for programs."""
        return json.dumps({"model": str(self.model), **asdict(self), "passed": self.passed}, indent=2, default=str)

    def summary(self) -> str:
        """The report for people; the last line is PASSED or FAILED."""
        head = f"{'layer':<32} {'mode':<8} {'rows':>7} {'ties':>5} {'error':>9} {'pool':>9} {'bound':>9}  cosine"
        lines = [
            f"{r.layer:<32} {r.mode:<8} {r.rows:>7} {r.tie_rows:>5} {r.error:>9.1e} {r.pool_error:>9.1e} "
            f"{r.bound:>9.1e}  {r.cosine:.6f}{'' if r.passed else '  FAILED'}"
            for r in self.layers
        ]
        return "\n".join([head, *lines, "PASSED" if self.passed else "FAILED"])


def validate_layers(
    model: str | os.PathLike[str],
    *,
    lengths: str | Sequence[int] | None = None,
    decode_steps: int | None = None,
    seed: int = 0,
) -> LayerReport:
    """Run a patched model in onnxruntime and every node of it on the GPU.

    Args:
        model: a patched file with its reference body and an fp16 or bf16 surface, or an unpatched one, which is then
            patched into a temporary folder.
        lengths: prompt lengths, one a sequence, also as "160,97"; default 160, 97 and 33.
        decode_steps: tokens decoded after each prompt; default 8.
        seed: of prompts, pages and activations.

    Raises:
        InputError: a wrong file, no reference body or an fp32 surface, or no GPU is here.
        MissingPackageError: onnxruntime or TensorRT is not installed.
        RefusedError: the kernels support neither a node nor this device.
    """
    if device.compute_capability() is None:
        raise InputError("GPU", "none", "an NVIDIA GPU with its driver", "run this on a machine that has one")
    prompts = np.array(parse_lengths(DEFAULT_LENGTHS if lengths is None else lengths))
    with tempfile.TemporaryDirectory() as folder:
        patched = Path(model)
        if not qsa_nodes(load_model(model).model):
            patched = patch_onnx(model, Path(folder) / "patched.onnx").output
        checks: dict[tuple[str, Mode], list[_CallCheck]] = {}
        contexts: dict[str, PluginContext] = {}
        for mode, calls in _recorded(patched, prompts, 8 if decode_steps is None else decode_steps, seed):
            for call in calls:
                check = _check_call(call, mode, contexts)
                checks.setdefault((call.node.name, mode), []).append(check)
    return LayerReport(Path(model), tuple(_worst(*key, found) for key, found in checks.items()))


@dataclass(frozen=True)
class _CallCheck:
    """One call of one node, as in `LayerResult`."""

    rows: int
    tie_rows: int
    error: float
    pool_error: float
    cosine: float
    bound: float


def _recorded(model: Path, lengths: NDArray[Any], steps: int, seed: int) -> Iterator[tuple[Mode, tuple[NodeCall, ...]]]:
    """What the nodes see in one ragged prefill and the decode steps after it."""
    proto = load_model(model).model
    rng = np.random.default_rng(seed)
    longest = int(lengths.max()) + steps
    session = PatchedSession(
        model, batch=lengths.size, max_kv_len=longest, rope=_rope(proto, longest), record=True, rng=rng, fill=np.nan
    )
    prompt = np.broadcast_to(np.arange(int(lengths.max())), (lengths.size, int(lengths.max())))  # [B, S]
    yield Mode.PREFILL, session.prefill(_feeds(proto, prompt, rng), lengths).calls
    for step in range(steps):
        yield Mode.DECODE, session.decode(_feeds(proto, lengths[:, None] + step, rng)).calls


def _feeds(proto: onnx.ModelProto, positions: NDArray[Any], rng: np.random.Generator) -> dict[str, Array]:
    """The model's own inputs."""
    feeds = {}
    for name, dtype, shape in _inputs(proto):
        if name not in _FED_BY_SESSION and not POOL.fullmatch(name):
            feeds[name] = activation(name, dtype, shape, positions, rng)
    return feeds


_FED_BY_SESSION = ("context_lengths", "kvcache_start_index", "kv_page_table", "rope_rotary_cos_sin")


def _inputs(proto: onnx.ModelProto) -> Iterator[tuple[str, np.dtype[Any], list[int | None]]]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name not in weights:
            tensor = value.type.tensor_type
            shape = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
            yield value.name, helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape


def _rope(proto: onnx.ModelProto, positions: int) -> NDArray[np.float32] | None:
    """A table of the width that the model's input has; None where the model bakes its own in."""
    for name, _, shape in _inputs(proto):
        if name == "rope_rotary_cos_sin" and shape[-1] is not None:
            return rope_table(positions, default_inv_freq(shape[-1], THETA))
    return None


def _check_call(call: NodeCall, mode: Mode, contexts: dict[str, PluginContext]) -> _CallCheck:
    surface = call.inputs["qkv"].dtype.name
    if surface not in _SURFACES:
        raise InputError(f"node {call.node.name}", f"a {surface} surface", "fp16 or bf16", "patch with --dtype fp16")
    geometry = call.node.geometry
    if call.node.name not in contexts:  # the first call is the prefill, whose sizes bound those of the decode steps
        largest = shapes_of(call.inputs, geometry) | {"kvcache_start_index": call.inputs["context_lengths"].shape}
        contexts[call.node.name] = PluginHost(geometry, surface, largest).context()
    try:
        result = contexts[call.node.name].run(call.inputs)
    except RuntimeError as error:
        raise FailedError(f"node {call.node.name}, {mode.value}: {error}") from error
    eps, band = _SURFACES[surface]
    bound = BOUND_ULPS * eps
    errors = row_error(result.attn_output, call.attn_output)  # [B, S, Hq]
    ties = _ties(call, errors > bound, band)
    return _CallCheck(
        rows=errors.size,
        tie_rows=int(ties.sum()),
        error=float(errors[~ties].max(initial=0.0)),
        pool_error=_pool_error(result.present_key_value, call.present_key_value),
        cosine=cosine(result.attn_output, call.attn_output),
        bound=bound,
    )


def _ties(call: NodeCall, differing: NDArray[np.bool_], band: float) -> NDArray[np.bool_]:
    """The differing head rows `[B, S, Hq]` whose selection rounding may flip."""
    ties = np.zeros_like(differing)
    if differing.any():
        geometry = call.node.geometry
        with np.errstate(all="ignore"):  # padding may hold anything
            scores = qsa_attention(call.inputs, geometry).scores
        for b, of_sequence in enumerate(scores):  # [S, G]
            ties[b] = differing[b] & tie_rows(of_sequence, geometry.budget_blocks, band)[:, None]
    return ties


def _pool_error(actual: Array, expected: Array) -> float:
    """Largest row error of the pool; what no call has written is NaN on both sides."""
    blank = np.isnan(expected)
    if not np.array_equal(np.isnan(actual), blank):
        return float("inf")
    zero = actual.dtype.type(0)
    return float(row_error(np.where(blank, zero, actual), np.where(blank, zero, expected)).max(initial=0.0))


def _worst(layer: str, mode: Mode, checks: Sequence[_CallCheck]) -> LayerResult:
    return LayerResult(
        layer,
        mode.value,
        rows=sum(check.rows for check in checks),
        tie_rows=sum(check.tie_rows for check in checks),
        error=max(check.error for check in checks),
        pool_error=max(check.pool_error for check in checks),
        cosine=min(check.cosine for check in checks),
        bound=checks[0].bound,
    )


__all__ = ["LayerReport", "LayerResult", "validate_layers"]
