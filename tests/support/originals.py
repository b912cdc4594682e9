"""Runs unpatched models in onnxruntime and tells which tokens their own indexers chose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry
from qsa_trt.patching.attributes import read_attributes
from qsa_trt.patching.detect import find_layers
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.patching.verify import check_layer
from qsa_trt.rope import default_inv_freq, rope_table

from .samples import sample

Array = NDArray[Any]
MODELS = Path(__file__).parents[2] / "models"
VOCABULARY = 128
#: Rope base of the layer tests; layer graphs take cosines and sines as inputs and hold none.
THETA = 1e4


def model_path(name: str) -> Path:
    """A model of `models/`, else a sample; `sample/NAME` is the sample where both have one."""
    if name.startswith("sample/"):
        return sample(name.removeprefix("sample/"))
    own = MODELS / f"{name}.onnx"
    return own if own.is_file() else sample(name)


@dataclass(frozen=True)
class Run:
    """One run of an original.

    Attributes:
        outputs: graph outputs by name.
        blocks: one array `[B, S, K]` a layer: the block ids that TopK gave, incomplete blocks included.
    """

    outputs: dict[str, Array]
    blocks: list[Array]


class Original:
    """An unpatched model whose indexers' TopK indices are additional outputs."""

    def __init__(self, name: str) -> None:
        self.path = model_path(name)
        model = onnx.load(self.path)
        index = GraphIndex(model)
        cuts = [check_layer(index, anchors) for anchors in find_layers(index)]
        attributes = [read_attributes(index, cut, {}, 0) for cut in cuts]
        self.geometries: list[Geometry] = [a.geometry for a in attributes]
        self.rotary = attributes[0].rotary_dims
        self.inv_freq = next(
            (onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("inv_freq")),
            default_inv_freq(self.rotary, THETA),
        )
        self._outputs = [v.name for v in model.graph.output]
        self._topks = [cut.topks[0].outputs[1] for cut in cuts]
        model.graph.output.extend(onnx.ValueInfoProto(name=t) for t in self._topks)
        self._session = session(model)
        self.inputs = {i.name: i for i in self._session.get_inputs()}

    @property
    def is_layer(self) -> bool:
        """One attention layer, hidden states in and out; else a causal LM."""
        return "hidden_states" in self.inputs

    def rope(self, positions: int) -> NDArray[np.float32]:
        """The rope table `[1, positions, rotary]` that fits this model."""
        return rope_table(positions, self.inv_freq)

    def tokens(self, rng: np.random.Generator, batch: int, seq_len: int) -> dict[str, Array]:
        """Random inputs that a patched model keeps: hidden states or token ids."""
        if not self.is_layer:
            return {"input_ids": rng.integers(0, VOCABULARY, (batch, seq_len))}
        dtype = np.float16 if self.inputs["hidden_states"].type == "tensor(float16)" else np.float32
        hidden = self.inputs["hidden_states"].shape[2]
        return {"hidden_states": rng.standard_normal((batch, seq_len, hidden), np.float32).astype(dtype)}

    def prefill(self, tokens: dict[str, Array], lengths: Array) -> Run:
        """Run padded prompts with a causal, right-padded mask."""
        batch, seq_len = next(iter(tokens.values())).shape[:2]
        feeds = dict(tokens)
        live = np.arange(seq_len) < np.asarray(lengths)[:, None]  # [B, S]
        if self.is_layer:
            feeds |= self.layer_feeds(batch, seq_len, live)
        elif "attention_mask" in self.inputs:
            feeds["attention_mask"] = live.astype(np.int64)
        return self.run(feeds)

    def run(self, feeds: dict[str, Array]) -> Run:
        """Run with all inputs given."""
        values = self._session.run([*self._outputs, *self._topks], feeds)
        return Run(
            dict(zip(self._outputs, values[: len(self._outputs)], strict=True)), list(values[len(self._outputs) :])
        )

    def layer_feeds(self, batch: int, seq_len: int, live: Array) -> dict[str, Array]:
        """Cosines, sines and the causal mask of a layer graph; `live` is bool `[B, S]`."""
        table = self.rope(seq_len)
        half = self.rotary // 2
        dtype = np.float16 if self.inputs["cos"].type == "tensor(float16)" else np.float32
        cos, sin = (np.tile(part, (batch, 1, 2)).astype(dtype) for part in (table[..., :half], table[..., half:]))
        visible = np.tril(np.ones((seq_len, seq_len), bool)) & live[:, None, None, :]  # [B, 1, S, S]
        if self.inputs["attention_mask"].type != "tensor(bool)":
            visible = np.where(visible, 0, np.finfo(np.float32).min).astype(np.float32)
        return {"cos": cos, "sin": sin, "attention_mask": visible}


def index_list(geometry: Geometry, blocks: Array, position: int) -> Array:
    """The tokens that a row at `position` attends to, from its TopK's block ids; -1 to the right."""
    ratio = geometry.indexer_compress_ratio
    complete = (position + 1) // ratio
    chosen = blocks[blocks < complete]
    listed = np.full(geometry.list_width, -1, np.int32)
    tokens = np.concatenate(
        [(chosen[:, None] * ratio + np.arange(ratio)).ravel(), np.arange(complete * ratio, position + 1)]
    )
    listed[: tokens.size] = tokens
    return listed


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A CPU session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
