"""What the CUDA kernels support; narrower than the contract, which the reference and the patcher follow."""

from __future__ import annotations

from .contract import Geometry

SURFACE_DTYPES = ("float16", "bfloat16")
HEAD_SIZES = (32, 64, 128, 256)
MAX_GROUP_SIZE = 16
MAX_INDEXER_HEADS = 8
INDEXER_HEAD_DIMS = (32, 64, 128)
COMPRESS_RATIOS = (2, 4, 8)
MAX_BUDGET = 8192


def kernel_refusals(geometry: Geometry, surface_dtype: str, rotary_dims: int | None) -> list[str]:
    """Why the CUDA kernels cannot run this node; empty when they can.

    Args:
        geometry: the node's attributes.
        surface_dtype: element type of `qkv` by its NumPy name: `float16`, `bfloat16`, `float32`.
        rotary_dims: last dim of `rope_rotary_cos_sin`; None when it is not known yet.
    """
    g = geometry
    smaller = min(g.head_size, g.indexer_head_dim)
    rules: list[tuple[bool, str, object, str]] = [
        (surface_dtype in SURFACE_DTYPES, "surface dtype", surface_dtype, " or ".join(SURFACE_DTYPES)),
        (g.head_size in HEAD_SIZES, "head_size", g.head_size, f"one of {HEAD_SIZES}"),
        (
            g.group_size <= MAX_GROUP_SIZE,
            "query heads per KV head",
            g.group_size,
            f"1 to {MAX_GROUP_SIZE} (num_q_heads / num_kv_heads)",
        ),
        (g.indexer_n_heads <= MAX_INDEXER_HEADS, "indexer_n_heads", g.indexer_n_heads, f"1 to {MAX_INDEXER_HEADS}"),
        (
            g.indexer_head_dim in INDEXER_HEAD_DIMS,
            "indexer_head_dim",
            g.indexer_head_dim,
            f"one of {INDEXER_HEAD_DIMS}",
        ),
        (
            g.indexer_compress_ratio in COMPRESS_RATIOS,
            "indexer_compress_ratio",
            g.indexer_compress_ratio,
            f"one of {COMPRESS_RATIOS}",
        ),
        (g.indexer_budget <= MAX_BUDGET, "indexer_budget", g.indexer_budget, f"at most {MAX_BUDGET} tokens"),
        (
            rotary_dims is None or (rotary_dims % 2 == 0 and 2 <= rotary_dims <= smaller),
            "rotary dims",
            rotary_dims,
            f"even, from 2 to {smaller} (the smaller of head_size and indexer_head_dim)",
        ),
    ]
    return [f"{what}: got {value}; the CUDA kernels support {legal}" for ok, what, value, legal in rules if not ok]
