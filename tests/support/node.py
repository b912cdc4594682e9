"""One QsaAttention node on the GPU through the plugin: calls by specialisation, tokens one by one, the reference.

Everything here goes through `qsa_trt.plugin_host`, that is through the plugin's own callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import INPUT_INDEX, Call, Geometry, Mode, check_call
from qsa_plugin.specialisation import SPECIALISATIONS
from qsa_plugin.workspace import layout, sparse_rows
from qsa_trt import reference
from qsa_trt.metrics import BF16_TIE_BAND, FP16_TIE_BAND
from qsa_trt.plugin_host import SURFACES, NodeOutputs, PluginContext, PluginHost, shapes_of
from tests.support import decode, prefill
from tests.support.cases import random_inputs, start_index
from tests.support.plugin_host import needs_tensorrt
from tests.support.requirements import needs_gpu

Array = NDArray[Any]
Inputs = dict[str, Array]
needs_node = [*needs_gpu, needs_tensorrt]
BANDS = {"float16": FP16_TIE_BAND, "bfloat16": BF16_TIE_BAND}
#: fp32 inside on both sides: one rounding of the output may flip, and one of q or k, which moves a softmax a little.
OUTPUT_ULPS = 2.0
#: A key is rounded twice before RoPE and once after it: two of the three may flip in one element.
POOL_ULPS = 2.0


def geometry_of(name: str, **change: Any) -> Geometry:
    """The geometry of a row of `SPECIALISATIONS`, with other values where `change` says so."""
    return replace(SPECIALISATIONS[name].geometry, **change)


def dtype_of(name: str) -> np.dtype[Any]:
    """The surface dtype of a row of `SPECIALISATIONS`."""
    return SURFACES[SPECIALISATIONS[name].surface][0]


def epsilon(dtype: np.dtype[Any]) -> float:
    """An ulp of a row whose largest value is 1, in a surface dtype."""
    return 2.0**-10 if dtype == np.float16 else 2.0**-7


def call_inputs(name: str, lengths: Sequence[int], mode: Mode, *, seed: int = 7, **more: Any) -> Inputs:
    """Random inputs of one call, with NaN in all that is not live (`tests.support.cases.random_inputs`)."""
    spec = SPECIALISATIONS[name]
    more = {"poison": True, "quick": True, "rotary_dims": spec.rotary_dims} | more
    rng = np.random.default_rng(seed)
    return random_inputs(spec.geometry, lengths, mode, dtype=dtype_of(name), rng=rng, **more)


def open_node(name: str, *calls: Mapping[str, Array], geometry: Geometry | None = None) -> PluginContext:
    """A context whose profile holds every one of `calls`; `geometry` replaces the specialisation's."""
    geometry = geometry or geometry_of(name)
    first, *others = (shapes_of(call, geometry) for call in calls)
    largest = {key: tuple(map(max, zip(shape, *(o[key] for o in others), strict=True))) for key, shape in first.items()}
    return PluginHost(geometry, SPECIALISATIONS[name].surface, largest).context()


def prompt(whole: Inputs, lengths: Sequence[int]) -> Inputs:
    """The prefill call of the first `lengths` tokens of a call `whole` that holds more."""
    tokens = {key: whole[key][:, : max(lengths)] for key in ("qkv", "index_qk")}
    return whole | tokens | {"context_lengths": np.array(lengths, np.int32)}


def token(whole: Inputs, positions: Sequence[int]) -> Inputs:
    """What a decode call of one token a sequence binds anew; pool, tables and gammas stay."""
    rows, at = np.arange(len(positions)), np.array(positions)
    tokens = {key: whole[key][rows, at][:, None] for key in ("qkv", "index_qk")}
    lengths = [position + 1 for position in positions]
    start = start_index(Mode.DECODE, lengths)
    return tokens | {"context_lengths": np.array(lengths, np.int32), "kvcache_start_index": start}


def launch(context: PluginContext, inputs: Mapping[str, Array] | None = None) -> Array:
    """One call on poisoned output and workspace: `attn_output` alone, for pools are large."""
    if inputs is not None:
        context.bind(inputs)
    context.poison()
    context.enqueue()
    return output_of(context)


def output_of(context: PluginContext) -> Array:
    """Wait for the context's stream and copy `attn_output` `[B, S, Hq, D]` back."""
    context.stream.synchronize()
    dtype = SURFACES[context.host.surface][0]
    return context.buffers["attn_output"].read(context.shapes["attn_output"], dtype)


def call_of(context: PluginContext) -> Call:
    """The sizes that are bound."""
    return check_call(context.host.geometry, {name: context.shapes[name] for name in INPUT_INDEX})


def queries_of(context: PluginContext, inputs: Inputs) -> Array:
    """Normed and roped queries `[B, Hq, D]` of a decode call, by the reference; zeros where a row is inactive."""
    geometry, dtype = context.host.geometry, inputs["qkv"].dtype
    layer = reference._layer(inputs, geometry, reference.Arithmetic(np.dtype(np.float32), dtype))
    lengths = inputs["context_lengths"]
    queries = np.zeros((len(lengths), geometry.num_q_heads, geometry.head_size), np.float32)
    for row in np.flatnonzero(lengths > 0):
        at = np.array([lengths[row] - 1])
        queries[row] = reference.prepare(layer, inputs["qkv"][row], inputs["index_qk"][row], at).q[0]
    return queries


def listed_blocks(context: PluginContext) -> NDArray[np.int32]:
    """Block ids that the last call listed: prefill `[B, S - W, K]`, decode `[B, K + 1]`, the open block included."""
    geometry, call = context.host.geometry, call_of(context)
    name, shape = "blocks", (call.batch, geometry.budget_blocks + 1)
    if call.mode is Mode.PREFILL:
        name, shape = "block_ids", (call.batch, sparse_rows(geometry, call), geometry.budget_blocks)
    return context.buffers["workspace"].read(shape, np.int32, layout(geometry, call).offsets[name])


def selected_blocks(context: PluginContext, row: int, length: int) -> NDArray[np.int64]:
    """Complete blocks that a decode row of `length` tokens attended to in the last call, ascending."""
    geometry = context.host.geometry
    chosen = min(length // geometry.indexer_compress_ratio, geometry.budget_blocks)
    return listed_blocks(context)[row, :chosen].astype(np.int64)


def result_of(context: PluginContext, outputs: NodeOutputs) -> decode.DecodeResult | prefill.PrefillResult:
    """The last call in the form that `decode.compare` and `prefill.compare` take."""
    lists = listed_blocks(context)
    if call_of(context).mode is Mode.DECODE:
        return decode.DecodeResult(outputs.attn_output[:, 0], outputs.present_key_value, lists)
    return prefill.PrefillResult(outputs.attn_output, outputs.present_key_value, lists)


def deviation(context: PluginContext, inputs: Inputs) -> decode.Deviation | prefill.Deviation:
    """Run one call and compare it with the reference; asserts what must hold exactly."""
    result = result_of(context, context.run(inputs))
    geometry, band = context.host.geometry, BANDS[context.host.surface]
    if isinstance(result, decode.DecodeResult):
        return decode.compare(geometry, inputs, result, band)
    return prefill.compare(geometry, inputs, result, band)


def ulps(actual: Array, expected: Array) -> float:
    """Largest difference in ulps of the largest value of its row, the last dim."""
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(a).all() and np.isfinite(e).all()
    largest = np.abs(e).max(-1)
    worst = np.abs(a - e).max(-1)
    return float((worst / np.where(largest == 0, 1, largest)).max()) / epsilon(actual.dtype)


def same_bits(one: Array, other: Array) -> bool:
    """Equal bit for bit, NaN and signs of zero included."""
    return one.shape == other.shape and np.array_equal(bits(one), bits(other))


def same_outputs(one: NodeOutputs, other: NodeOutputs) -> bool:
    """Both outputs equal bit for bit."""
    return same_bits(one.attn_output, other.attn_output) and same_bits(one.present_key_value, other.present_key_value)


def bits(array: Array) -> NDArray[np.uint16]:
    """A surface array as integers."""
    return np.ascontiguousarray(array).view(np.uint16)
