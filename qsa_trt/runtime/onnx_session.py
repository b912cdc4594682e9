"""A patched model in onnxruntime on the CPU, through the definition that the file carries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from qsa_plugin.contract import EDGE_LLM_NAME, PLUGIN_NAME
from qsa_plugin.errors import InputError

from ..onnx_model import Array, node_weights, open_session, qsa_nodes, run_session
from ..paging import flat_pages
from ..patching.files import ModelFile, load_model
from .layout import LayerPool, PoolLayout, names, pools_in_memory
from .pages import PageCopy
from .session import Session, check_feeds, check_rope

#: What a step gives a model beside its own inputs, by the contract's names.
_STEP = ("context_lengths", "kvcache_start_index", "kv_page_table")


class OnnxSession(Session):
    """A patched model and its pools in memory.

    Args:
        model: a patched file, by path or loaded, or a model without external data; it needs its reference body.
        num_pages: pages a plane of every pool, 128 tokens each.
        max_kv_len: tokens of the longest sequence.
        rope: the rope table fp32 `[1, maxPos, rotary]`; None where the model has it baked in.
        rng: shuffles the page ids; None hands them out in order.
        fill: what the pools hold at first; NaN finds reads of stale state.
        threads: threads that onnxruntime may use.
        expose: further tensors that `prefill` and `decode` return.

    Attributes:
        nodes: the QsaAttention nodes.
        own_inputs: what callers feed, and its types.
        pools: every layer's pool by the name of its input.

    Raises:
        InputError: the model is not patched, has no reference body, or lacks a rope table.
        MissingPackageError: onnxruntime is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto | ModelFile,
        *,
        num_pages: int,
        max_kv_len: int,
        rope: NDArray[np.float32] | None = None,
        rng: np.random.Generator | None = None,
        fill: float = 0.0,
        threads: int = 1,
        expose: Sequence[str] = (),
    ) -> None:
        if isinstance(model, onnx.ModelProto):
            proto, folder = model, None
        else:
            file = model if isinstance(model, ModelFile) else load_model(model)
            proto, folder = file.model, file.folder
        self.nodes = qsa_nodes(proto)
        self._check(proto)
        super().__init__(self._layout(proto, num_pages, max_kv_len), rng)
        self.weights = node_weights(proto, self.nodes, folder)
        self._rope = self._rope_feed(rope)
        self._step_names = {name: self.nodes[0].inputs[name] for name in _STEP}
        self._fill = fill
        self.pools = pools_in_memory(self.layout, fill)
        fed = {*self._step_names.values(), *self._rope, *names(self.layout.layers)}
        initial = {tensor.name for tensor in proto.graph.initializer}
        self.own_inputs = {
            v.name: np.dtype(helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type))
            for v in proto.graph.input
            if v.name not in fed | initial
        }
        self._session = open_session(_exposing(proto, expose), folder, threads)

    def reset(self) -> None:
        """Free all sequences and fill the pools anew."""
        for sequence in self.pages.sequences:
            self.pages.free(sequence)
        self.pools = pools_in_memory(self.layout, self._fill)

    def fed(self, feeds: Mapping[str, Array], step: Mapping[str, Array]) -> dict[str, Array]:
        """All inputs of one call by the graph's names."""
        return {**feeds, **self.pools, **{self._step_names[n]: a for n, a in step.items()}, **self._rope}

    def _run(self, feeds: Mapping[str, Array], step: Mapping[str, Array]) -> dict[str, Array]:
        check_feeds(feeds, self.own_inputs, step["context_lengths"].size)
        values = run_session(self._session, self.fed(feeds, step))
        self.pools = {layer.past: values.pop(layer.present) for layer in self.layout.layers}
        return values

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for pool in self.pools.values():
            pages = flat_pages(pool)  # [2 * N, P, Hkv, D+Id]
            for copy in copies:
                pages[copy.target] = pages[copy.source]

    def _layout(self, proto: onnx.ModelProto, num_pages: int, max_kv_len: int) -> PoolLayout:
        types = {v.name: v.type.tensor_type.elem_type for v in proto.graph.input}
        layers = tuple(
            LayerPool(node.name, node.inputs["past_key_value"], node.outputs["present_key_value"], node.geometry)
            for node in self.nodes
        )
        dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(types[layers[0].past])
        return PoolLayout(layers, dtype, num_pages, max_kv_len)

    def _rope_feed(self, rope: NDArray[np.float32] | None) -> dict[str, Array]:
        name = self.nodes[0].inputs["rope_rotary_cos_sin"]
        if name in self.weights:
            return {}
        return {name: check_rope(rope, name, self.layout.max_kv_len)}

    def _check(self, proto: onnx.ModelProto) -> None:
        if not self.nodes:
            raise InputError("model", "no QsaAttention node", "a patched model", "run: qsa-trt patch-onnx MODEL")
        if not any(function.name in (PLUGIN_NAME, EDGE_LLM_NAME) for function in proto.functions):
            raise InputError("model", "no reference body", "one", "patch it without --no-reference-body")


def _exposing(proto: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """The model, or a copy of it with more tensors among its outputs."""
    if not tensors:
        return proto
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    exposed.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in tensors)
    return exposed
