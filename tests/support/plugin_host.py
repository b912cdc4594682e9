"""What TensorRT hands to a plugin, made by hand: descriptors, addresses and field collections.

It works with any of the three TensorRT flavours, the lean runtime included, and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from qsa_plugin import Geometry, register, tensorrt
from qsa_plugin.contract import INPUTS, OUTPUTS, PAGE_SIZE, PLUGIN_NAME, PLUGIN_VERSION
from qsa_trt import plugin_host
from qsa_trt.plugin_host import field_collection, tensor_type
from tests.support.requirements import has

needs_tensorrt = pytest.mark.skipif(
    not any(has(name) for name in ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "tensorrt_lean_bindings")),
    reason="none of tensorrt, tensorrt_rtx, tensorrt_lean is installed (pip install 'qsa-trt[rtx]')",
)
#: A geometry that the CUDA kernels support.
GEOMETRY = Geometry(
    num_q_heads=4,
    num_kv_heads=2,
    head_size=64,
    indexer_n_heads=2,
    indexer_head_dim=32,
    indexer_budget=64,
    indexer_compress_ratio=4,
)
Shapes = dict[str, tuple[int, ...]]
_SURFACE_OF = {"HALF": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Sizes:
    """Run-time sizes of one call; `start` is the length of `kvcache_start_index`."""

    batch: int = 2
    seq_len: int = 1
    start: int = 2
    num_pages: int = 16
    pages_per_seq: int = 4
    max_positions: int = 512
    rotary: int = 16


PREFILL = Sizes(seq_len=200, start=0)
DECODE = Sizes()


def call_shapes(sizes: Sizes, geometry: Geometry = GEOMETRY) -> Shapes:
    """Shapes of all inputs and outputs, written out by hand so that they check the contract's table too."""
    g, s = geometry, sizes
    pool = (2, s.num_pages, PAGE_SIZE, g.num_kv_heads, g.head_size + g.indexer_head_dim)
    return {
        "qkv": (s.batch, s.seq_len, (g.num_q_heads + 2 * g.num_kv_heads) * g.head_size),
        "index_qk": (s.batch, s.seq_len, (g.indexer_n_heads + 1) * g.indexer_head_dim),
        "past_key_value": pool,
        "context_lengths": (s.batch,),
        "rope_rotary_cos_sin": (1, s.max_positions, s.rotary),
        "kvcache_start_index": (s.start,),
        "kv_page_table": (s.batch, 2, s.pages_per_seq),
        "q_norm_gamma": (g.head_size,),
        "k_norm_gamma": (g.head_size,),
        "indexer_q_norm_gamma": (g.indexer_head_dim,),
        "indexer_k_norm_gamma": (g.indexer_head_dim,),
        "attn_output": (s.batch, s.seq_len, g.num_q_heads, g.head_size),
        "present_key_value": pool,
    }


def type_of(trt: Any, name: str, surface: str = "HALF") -> Any:
    """TensorRT's type of the contract tensor `name`."""
    return tensor_type(trt, name, _SURFACE_OF[surface])


def runtime_descs(
    trt: Any, shapes: Mapping[str, Sequence[int]], surface: str = "HALF", types: Mapping[str, str] | None = None
) -> tuple[list[Any], list[Any]]:
    """(input, output) `PluginTensorDesc`s as enqueue gets them; `types` forces the type of some tensors."""
    inputs, outputs = plugin_host.runtime_descs(trt, shapes, _SURFACE_OF[surface])
    for tensor, desc in zip(INPUTS + OUTPUTS, [*inputs, *outputs], strict=True):
        if tensor.name in (types or {}):
            desc.type = getattr(trt.DataType, types[tensor.name])
    return inputs, outputs


def profile_descs(
    trt: Any, largest: Mapping[str, Sequence[int]], smallest: Mapping[str, Sequence[int]] | None = None
) -> tuple[list[Any], list[Any]]:
    """(input, output) `DynamicPluginTensorDesc`s of an fp16 profile, as configure and get_workspace_size get them."""
    return plugin_host.profile_descs(trt, smallest or largest, largest, "float16")


@cache
def error_logger() -> Any:
    """One logger for the process: TensorRT keeps the first it sees, and its registry logs through it for good."""
    trt = tensorrt()
    return trt.Logger(trt.Logger.ERROR)


def addresses() -> tuple[list[int], list[int]]:
    """(input, output) device addresses as of an in-place call; nothing is ever read there."""
    inputs = [0x10000 * (i + 1) for i in range(len(INPUTS))]
    return inputs, [0x900000, inputs[2]]


def creator(name: str = PLUGIN_NAME) -> Any:
    """The registered creator, as TensorRT finds it."""
    register()
    return tensorrt().get_plugin_registry().get_creator(name, PLUGIN_VERSION, "")


def build_plugin(geometry: Geometry = GEOMETRY, name: str = PLUGIN_NAME) -> Any:
    """A plugin as the ONNX parser creates it."""
    trt = tensorrt()
    fields = field_collection(trt, geometry.to_attributes())
    return creator(name).create_plugin("layer_0", fields[0], trt.TensorRTPhase.BUILD)


def runtime_plugin(geometry: Geometry = GEOMETRY, name: str = PLUGIN_NAME) -> Any:
    """A plugin as an engine's execution context holds it: serialised, created anew and attached."""
    trt = tensorrt()
    fields = build_plugin(geometry, name).get_fields_to_serialize()
    plugin = creator(name).create_plugin("layer_0", fields, trt.TensorRTPhase.RUNTIME)
    return plugin.attach_to_context(None)
