"""The export itself, step by step; everything that can be wrong is found before the first byte is written."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor

from qsa_plugin.contract import INPUT_INDEX, INPUTS, PLUGIN_NAME, DType, Geometry, resolve_dims

from ..patching.reference_body import add_reference_function
from ..rope import rope_table
from .attention import qsa_nodes
from .config import Source, check_layers, geometry, hugging_face_config, parse_layers, rotary_embedding
from .export import Options
from .report import ExportReport
from .stage import PagedStage, Parameter, PlainStage, Stage, build
from .store import check_output, data_path, is_external, write
from .trace import Example, Weight, trace
from .vectorised_indexer import vectorised_indexer
from .weights import Checkpoint, RandomWeights, Weights

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ROPE = "rope_rotary_cos_sin"
Traced = tuple[onnx.ModelProto, list[Weight]]
_SHARED = ("context_lengths", _ROPE, "kvcache_start_index", "kv_page_table")
#: Names of the run-time dims, as in patched files.
_AXES = {
    "B": "batch",
    "S": "seq",
    "N": "num_pages",
    "M": "pages_per_seq",
    "maxPos": "max_positions",
    "start": "kvcache_start_length",
}
#: The sizes that are traced: all different, and neither 0 nor 1, which would stay fixed.
_TRACED = {"B": 2, "S": 13, "N": 3, "M": 5, "maxPos": 17, "start": 7}


def run(source: Source, output: Path, options: Options) -> ExportReport:
    """See `export_onnx`."""
    config = hugging_face_config(source)
    layers = parse_layers(options.layers, config.num_hidden_layers)
    check_layers(config, layers, options.only_attention)
    attributes, rotary = geometry(config, options.pool_io), rotary_embedding(config)
    rotary_dims = 2 * rotary.inv_freq.numel()
    weights = _weights(source, options)
    check_output(output, [source.file, *weights.files])

    def make() -> Stage:
        ends = {"only_attention": options.only_attention, "tied": source.tied}
        if options.plain:
            return PlainStage(rotary, config, layers, **ends)
        return PagedStage(attributes, config, layers, **ends)

    stage, matrices = build(make, weights, _DTYPES[options.dtype])
    table = _rope_table(config, rotary, options)
    reader = _Reader(weights, matrices, _DTYPES[options.dtype], table)
    external = is_external(reader.size, options.external_data)

    if isinstance(stage, PagedStage):
        model, pending = _trace_paged(stage, rotary_dims, matrices)
        if table is not None:
            pending.append(_bake(model, table.shape))
        if options.reference_body:
            add_reference_function(model)
    else:
        model, pending = _trace_plain(stage, matrices)
    write(model, pending, reader, output, external)
    return ExportReport(
        source=source.path,
        output=output,
        data=data_path(output) if external else None,
        weight_bytes=reader.size,
        weights=str(weights),
        layers=layers,
        layer_count=config.num_hidden_layers,
        geometry=attributes,
        rotary_dims=rotary_dims,
        dtype=options.dtype,
        plain=options.plain,
        inputs=tuple(v.name for v in model.graph.input),
        outputs=tuple(v.name for v in model.graph.output),
        rope=_rope_text(config, options, table),
        reference_body=options.reference_body,
    )


@dataclass(frozen=True)
class _Reader:
    """Reads one weight as the graph wants it."""

    weights: Weights
    matrices: Mapping[str, Parameter]
    dtype: torch.dtype
    table: NDArray[np.float32] | None  # the rope table that is baked in

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        elements = sum(math.prod(parameter.shape) for parameter in self.matrices.values())
        return int(elements * self.dtype.itemsize) + (0 if self.table is None else self.table.nbytes)

    def __call__(self, weight: Weight) -> Tensor:
        if weight.parameter == _ROPE:
            return torch.from_numpy(self.table)
        parameter = self.matrices[weight.parameter]
        return self.weights.read(parameter.stored, parameter.shape, self.dtype).permute(weight.perm).contiguous()


def _weights(source: Source, options: Options) -> Weights:
    if options.random_init is not None:
        return RandomWeights(options.random_init)
    assert source.folder is not None  # export.py made sure
    return Checkpoint(source.folder)


def _tokens(stage: Stage) -> Example:
    """The first input: ids, or hidden states in the stage's dtype."""
    shape, axes = (_TRACED["B"], _TRACED["S"]), {0: _AXES["B"], 1: _AXES["S"]}
    if stage.takes_ids:
        return Example("input_ids", torch.zeros(shape, dtype=torch.int64), axes)
    like = next(stage.parameters())
    return Example("hidden_states", torch.zeros((*shape, stage.input_width), dtype=like.dtype), axes)


def _output(stage: Stage) -> str:
    return "logits" if stage.gives_logits else "hidden_states_out"


def _trace_plain(stage: Stage, matrices: Collection[str]) -> Traced:
    tokens = _tokens(stage)
    mask = Example("attention_mask", torch.ones((_TRACED["B"], _TRACED["S"]), dtype=torch.int64), tokens.axes)
    with vectorised_indexer():
        return trace(stage, [tokens, mask], [_output(stage)], matrices)


def _trace_paged(stage: PagedStage, rotary_dims: int, matrices: Collection[str]) -> Traced:
    """The nodes are named as the patcher names them."""
    numbers = range(len(stage.model.layers))
    dtype = next(stage.parameters()).dtype
    pools = [_example(f"past_key_values_{n}", "past_key_value", stage.geometry, rotary_dims, dtype) for n in numbers]
    shared = [_example(name, name, stage.geometry, rotary_dims, dtype) for name in _SHARED]
    outputs = [_output(stage), *(f"present_key_values_{n}" for n in numbers)]
    with qsa_nodes():
        model, pending = trace(stage, [_tokens(stage), pools, *shared], outputs, matrices)
    for number, node in enumerate(node for node in model.graph.node if node.op_type == PLUGIN_NAME):
        node.name = f"qsa_{number}/{PLUGIN_NAME}"
    return model, pending


def _example(name: str, tensor: str, attributes: Geometry, rotary_dims: int, surface: torch.dtype) -> Example:
    """An input of the contract, of zeros."""
    spec = INPUTS[INPUT_INDEX[tensor]]
    dims = resolve_dims(spec.dims, attributes)
    sizes = {**_TRACED, "rotary": rotary_dims}
    shape = [sizes[d] if isinstance(d, str) else d for d in dims]
    axes = {axis: _AXES[d] for axis, d in enumerate(dims) if isinstance(d, str) and d in _AXES}
    dtype = surface if spec.dtype is DType.SURFACE else getattr(torch, spec.dtype.value)
    return Example(name, torch.zeros(shape, dtype=dtype), axes)


def _bake(model: onnx.ModelProto, shape: tuple[int, ...]) -> Weight:
    """Make the rope table an initializer instead of an input."""
    value = next(v for v in model.graph.input if v.name == _ROPE)
    model.graph.input.remove(value)
    return Weight(TensorProto(name=_ROPE, data_type=TensorProto.FLOAT, dims=shape), _ROPE, tuple(range(len(shape))))


def _rope_table(config: Any, rotary: Any, options: Options) -> NDArray[np.float32] | None:
    """The table [1, positions, rotary] to bake in; None leaves it a graph input."""
    if not options.bake_rope:
        return None
    positions = options.max_positions or config.max_position_embeddings
    return rope_table(positions, rotary.inv_freq.numpy(), attention_scaling=rotary.attention_scaling)


def _rope_text(config: Any, options: Options, table: NDArray[np.float32] | None) -> str:
    parameters = ", ".join(f"{key} {value}" for key, value in config.rope_parameters.items())
    if options.plain:
        return f"computed in the graph ({parameters})"
    if table is not None:
        return f"table baked in, {table.shape[1]} positions ({parameters})"
    return f"graph input {_ROPE}; the model wants {parameters}"
