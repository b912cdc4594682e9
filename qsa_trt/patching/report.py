"""What a patch did, or would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qsa_plugin.contract import Geometry, PoolIO

if TYPE_CHECKING:
    from ..comparison import ValidationReport

Status = Literal["patched", "already-patched", "dry-run"]
_PADDING = (
    "Only causal attention with padding on the right survives patching: whatever else the model's mask could say is"
    " gone. The node takes lengths (context_lengths) instead of a mask."
)


@dataclass(frozen=True)
class TensorReport:
    """A graph input or output that the patch adds."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class LayerReport:
    """One QSA attention that became a node.

    Attributes:
        index: counts attention layers from 0; the number in the pool names.
        name: the layer's module path, or the node that it was found around.
        strategy: how the layer was found.
        geometry: the node's attributes.
        rotary_dims: last dim of the rope table.
        graph_dtype: element type of the graph's activations.
        surface: element type at the node.
        where: attribute name to the place in the graph (or the config) that told it.
        biases: projections that carry a bias.
    """

    index: int
    name: str
    strategy: str
    geometry: Geometry
    rotary_dims: int
    graph_dtype: str
    surface: str
    where: Mapping[str, str]
    biases: tuple[str, ...]


@dataclass(frozen=True)
class PatchReport:
    """The outcome of `patch_onnx`.

    Attributes:
        status: `patched`, `already-patched` (nothing was written) or `dry-run` (nothing was written).
        input: MODEL.
        output: OUT, whether or not it was written.
        layers: the attentions, in graph order; of an already patched model none.
        removed_inputs: graph inputs that nobody reads any more.
        removed_outputs: graph outputs that held dense caches.
        removed_nodes: how many nodes went.
        new_inputs: graph inputs that the nodes need.
        new_outputs: graph outputs that the nodes add.
        rope: where the rope table comes from.
        reference_body: whether the file carries the plain-op function.
        fused_widths: columns of the one MatMul that each layer's projections became; empty without `fuse_qkv`.
        verification: how the result compared with the model in onnxruntime; None where that was not asked for.
        warnings: what a user should know before using the file.
    """

    status: Status
    input: Path
    output: Path
    layers: tuple[LayerReport, ...] = ()
    removed_inputs: tuple[str, ...] = ()
    removed_outputs: tuple[str, ...] = ()
    removed_nodes: int = 0
    new_inputs: tuple[TensorReport, ...] = ()
    new_outputs: tuple[TensorReport, ...] = ()
    rope: str = ""
    reference_body: bool = True
    fused_widths: tuple[int, ...] = ()
    verification: ValidationReport | None = None
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """The report as text for people."""
        if self.status == "already-patched":
            return "\n".join([f"{self.input}: already patched; nothing was written", *self._warning_lines()])
        would = "would be " if self.status == "dry-run" else ""
        lines = [f"{self.input}: {len(self.layers)} QSA attention layer{'s'[: len(self.layers) != 1]} {would}patched"]
        for layer in self.layers:
            lines += _layer_lines(layer)
        lines += [f"removed: {self.removed_nodes} nodes"]
        lines += _listed("removed inputs", self.removed_inputs) + _listed("removed outputs", self.removed_outputs)
        lines += _listed("new inputs", self.new_inputs) + _listed("new outputs", self.new_outputs)
        lines += [f"rope table: {self.rope}"]
        body = "in the file (what onnxruntime runs)" if self.reference_body else "left out"
        lines += [f"reference body: {body}", f"note: {_PADDING}", *self._warning_lines()]
        if self.fused_widths:
            lines += [
                f"fused: q, k, v, index_qk and gate of a layer are one MatMul, {_spread(self.fused_widths)} columns"
            ]
        if self.verification is not None:
            lines += ["verified in onnxruntime, fp32:", *(f"  {v}" for v in self.verification.summary().splitlines())]
        lines += [f"{would}written: {self.output}" + (" (dry run: nothing was written)" if would else "")]
        return "\n".join(lines)

    def _warning_lines(self) -> list[str]:
        return [f"warning: {warning}" for warning in self.warnings]


def _spread(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, dict.fromkeys(numbers)))


def _layer_lines(layer: LayerReport) -> list[str]:
    g = layer.geometry
    lines = [
        f"layer {layer.index}: {layer.name} (found by {layer.strategy})",
        f"  heads {g.num_q_heads}/{g.num_kv_heads} x {g.head_size}, rotary {layer.rotary_dims}, indexer"
        f" {g.indexer_n_heads} x {g.indexer_head_dim}, budget {g.indexer_budget} tokens, ratio"
        f" {g.indexer_compress_ratio}, scale {g.scale:.6g}, eps {g.rms_norm_eps:.3g}, pool {PoolIO(g.pool_io).option}",
    ]
    if layer.graph_dtype == layer.surface:
        lines += [f"  surface {layer.surface}, as the graph"]
    else:
        lines += [f"  surface {layer.surface}: casts stand around the node, the graph is {layer.graph_dtype}"]
    if layer.biases:
        lines += [f"  biases stay in the graph: {', '.join(layer.biases)}"]
    return lines


def _listed(title: str, items: tuple[object, ...]) -> list[str]:
    return [f"{title}: {', '.join(str(i) for i in items)}"] if items else []
