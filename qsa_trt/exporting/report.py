"""What an export made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qsa_plugin.contract import Geometry, PoolIO


@dataclass(frozen=True)
class ExportReport:
    """The outcome of `export_onnx`.

    Attributes:
        source: CHECKPOINT_OR_CONFIG.
        output: OUT.
        data: the file with the weights; None where OUT holds them.
        weight_bytes: bytes of all weights.
        weights: where they came from.
        layers: numbers of the exported layers.
        layer_count: layers of the whole model.
        geometry: attributes of every attention.
        rotary_dims: last dim of the rope table.
        dtype: element type of weights and activations.
        plain: plain operators instead of QsaAttention nodes.
        inputs: names of the graph inputs.
        outputs: names of the graph outputs.
        rope: where cosines and sines come from.
        reference_body: whether the file carries the plain-op function.
    """

    source: Path
    output: Path
    data: Path | None
    weight_bytes: int
    weights: str
    layers: range
    layer_count: int
    geometry: Geometry
    rotary_dims: int
    dtype: str
    plain: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rope: str
    reference_body: bool

    def summary(self) -> str:
        """The report as text for people."""
        g, kind = self.geometry, "plain operators" if self.plain else "QsaAttention nodes"
        written = f"{self.output}" + (f" and {self.data}" if self.data else "")
        lines = [
            f"{self.source}: layers {self.layers[0]}-{self.layers[-1]} of {self.layer_count} exported in {self.dtype},"
            f" with {kind}",
            f"attention: heads {g.num_q_heads}/{g.num_kv_heads} x {g.head_size}, rotary {self.rotary_dims}, indexer"
            f" {g.indexer_n_heads} x {g.indexer_head_dim}, budget {g.indexer_budget} tokens, ratio"
            f" {g.indexer_compress_ratio}, eps {g.rms_norm_eps:.3g}",
            f"weights: {self.weights}, {self.weight_bytes:,} bytes",
            f"inputs: {', '.join(self.inputs)}",
            f"outputs: {', '.join(self.outputs)}",
            f"rope: {self.rope}",
        ]
        if not self.plain:
            body = "in the file (what onnxruntime runs)" if self.reference_body else "left out"
            lines += [f"pool: {PoolIO(g.pool_io).option}", f"reference body: {body}"]
        return "\n".join([*lines, f"written: {written}"])
