"""Runs a patched model in onnxruntime over paged pools, step by step, and records what its QsaAttention nodes see."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from .onnx_model import Array, QsaNode, open_session, qsa_nodes, run_session
from .paging import pages_for
from .patching.files import ModelFile, load_model
from .runtime.onnx_session import OnnxSession


@dataclass(frozen=True)
class NodeCall:
    """One run of one node: the eleven inputs by contract name, and both outputs. The geometry is the node's."""

    node: QsaNode
    inputs: Mapping[str, Array]
    attn_output: Array
    present_key_value: Array


@dataclass(frozen=True)
class Step:
    """One run of the model: its outputs without the pools, and what each node saw (empty unless recording)."""

    outputs: Mapping[str, Array]
    calls: tuple[NodeCall, ...]


class PatchedSession:
    """A patched model, its pools and its page table: one prefill, then any number of decode steps.

    Args:
        model: a patched file, by path or loaded, or a model without external data; it needs its reference body.
        batch: sequences.
        max_kv_len: longest sequence that will be run.
        rope: the rope table fp32 `[1, maxPos, rotary]`; None where the model has it baked in.
        record: keep every node's inputs and outputs.
        rng: shuffles the page ids, those of K and of V independently; None hands them out in order.
        fill: what the pools hold at first; NaN finds reads of stale state.
        threads: threads that onnxruntime may use.

    Raises:
        InputError: the model is not patched, has no reference body, or lacks a rope table.
        MissingPackageError: onnxruntime is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto | ModelFile,
        *,
        batch: int,
        max_kv_len: int,
        rope: NDArray[np.float32] | None = None,
        record: bool = False,
        rng: np.random.Generator | None = None,
        fill: float = 0.0,
        threads: int = 1,
    ) -> None:
        if not isinstance(model, onnx.ModelProto | ModelFile):
            model = load_model(model)
        proto = model.model if isinstance(model, ModelFile) else model
        self.nodes = qsa_nodes(proto)
        self.num_pages = batch * pages_for(max_kv_len) + 1  # one page belongs to no sequence
        self.max_kv_len, self.record = max_kv_len, record
        self._session = _RecordingSession(
            model,
            num_pages=self.num_pages,
            max_kv_len=max_kv_len,
            rope=rope,
            rng=rng,
            fill=fill,
            threads=threads,
            expose=_inner_tensors(proto, self.nodes) if record else (),
        )
        self._session.record = record
        self._outputs = {v.name for v in proto.graph.output}
        self._sequences = [self._session.pages.allocate() for _ in range(batch)]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, `[B]`."""
        return self._session.pages.lengths(self._sequences)

    @property
    def pools(self) -> Mapping[str, Array]:
        """Every node's pool by the name of its input."""
        return self._session.pools

    def reset(self) -> None:
        """Forget all sequences: empty pools, lengths 0."""
        self._session.reset()
        self._sequences = [self._session.pages.allocate() for _ in self._sequences]

    def prefill(self, feeds: Mapping[str, Array], lengths: Sequence[int] | NDArray[Any]) -> Step:
        """Run padded prompts, one a sequence.

        Args:
            feeds: the model's own inputs, `[B, S, ...]`, padded on the right.
            lengths: live tokens of each sequence; 0 leaves it inactive.
        """
        for sequence in self._sequences:
            self._session.pages.free(sequence)
        self._sequences = [self._session.pages.allocate() for _ in self._sequences]
        return self._done(self._session.prefill(self._sequences, feeds, lengths))

    def decode(self, feeds: Mapping[str, Array], active: Sequence[bool] | NDArray[np.bool_] | None = None) -> Step:
        """Run one more token of each sequence.

        Args:
            feeds: the model's own inputs, `[B, 1, ...]`.
            active: which sequences go on; the others pass length 0 and keep their state. Default all.
        """
        goes_on = [True] * len(self._sequences) if active is None else active
        rows = [sequence if on else None for sequence, on in zip(self._sequences, goes_on, strict=True)]
        return self._done(self._session.decode(rows, feeds))

    def _done(self, values: Mapping[str, Array]) -> Step:
        outputs = {name: value for name, value in values.items() if name in self._outputs}
        return Step(outputs, self._session.calls)


class _RecordingSession(OnnxSession):
    """Keeps what every node saw in the last call."""

    record = False
    calls: tuple[NodeCall, ...] = ()

    def _run(self, feeds: Mapping[str, Array], step: Mapping[str, Array]) -> dict[str, Array]:
        fed = self.fed(feeds, step)
        values = super()._run(feeds, step)
        if self.record:
            presents = {layer.present: self.pools[layer.past] for layer in self.layout.layers}
            known = {**self.weights, **fed, **values, **presents}
            self.calls = tuple(_call(node, known) for node in self.nodes)
        return values


def _call(node: QsaNode, known: Mapping[str, Array]) -> NodeCall:
    inputs = {name: known[tensor] for name, tensor in node.inputs.items()}
    return NodeCall(node, inputs, known[node.outputs["attn_output"]], known[node.outputs["present_key_value"]])


def _inner_tensors(proto: onnx.ModelProto, nodes: Sequence[QsaNode]) -> list[str]:
    """The tensors of the nodes that the graph computes inside."""
    wanted = [t for node in nodes for t in (*node.inputs.values(), *node.outputs.values())]
    graph = proto.graph
    known = {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
    return [t for t in dict.fromkeys(wanted) if t not in known]


__all__ = ["NodeCall", "PatchedSession", "QsaNode", "Step", "open_session", "qsa_nodes", "run_session"]
