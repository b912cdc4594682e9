"""One line a QSA layer."""

from __future__ import annotations

from qsa_plugin.contract import Geometry

HEAD = ("layer", "found by", "heads", "size", "rotary", "indexer", "budget", "ratio", "scale", "eps")


def row(name: str, found_by: str, geometry: Geometry, rotary_dims: int | None) -> tuple[object, ...]:
    """A layer's cells under `HEAD`."""
    g = geometry
    return (
        name,
        found_by,
        f"{g.num_q_heads}/{g.num_kv_heads}",
        g.head_size,
        "?" if rotary_dims is None else rotary_dims,
        f"{g.indexer_n_heads}x{g.indexer_head_dim}",
        g.indexer_budget,
        g.indexer_compress_ratio,
        f"{g.scale:.6g}",
        f"{g.rms_norm_eps:.3g}",
    )
