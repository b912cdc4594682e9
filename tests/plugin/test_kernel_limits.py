"""The limits of the CUDA kernels: both ends of every range pass, the next value is refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsa_plugin import Geometry, kernel_refusals
from tests.support.plugin_host import GEOMETRY

REAL = Geometry(24, 2, 256, 4, 128, 2048, 4)


@pytest.mark.parametrize(
    ("geometry", "surface", "rotary"),
    [
        (REAL, "float16", 64),
        (REAL, "bfloat16", 128),
        (replace(REAL, head_size=32, indexer_head_dim=32), "float16", 32),
        (replace(REAL, num_q_heads=2), "float16", 2),
        (replace(REAL, num_q_heads=32), "float16", None),
        (replace(REAL, indexer_n_heads=8, indexer_compress_ratio=8, indexer_budget=8192), "float16", 64),
        (replace(REAL, indexer_n_heads=1, indexer_compress_ratio=2, indexer_budget=2), "float16", 64),
    ],
)
def test_supported(geometry: Geometry, surface: str, rotary: int | None) -> None:
    assert kernel_refusals(geometry, surface, rotary) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 96}, "head_size: got 96; the CUDA kernels support one of (32, 64, 128, 256)"),
        (
            {"num_q_heads": 34},
            "query heads per KV head: got 17; the CUDA kernels support 1 to 16 (num_q_heads / num_kv_heads)",
        ),
        ({"indexer_n_heads": 9}, "indexer_n_heads: got 9; the CUDA kernels support 1 to 8"),
        ({"indexer_head_dim": 256}, "indexer_head_dim: got 256; the CUDA kernels support one of (32, 64, 128)"),
        ({"indexer_compress_ratio": 1}, "indexer_compress_ratio: got 1; the CUDA kernels support one of (2, 4, 8)"),
        ({"indexer_budget": 8196}, "indexer_budget: got 8196; the CUDA kernels support at most 8192 tokens"),
    ],
)
def test_refused_attribute(change: dict[str, int], reason: str) -> None:
    assert kernel_refusals(replace(REAL, **change), "float16", 64) == [reason]


def test_refused_surface_and_rotary() -> None:
    assert kernel_refusals(REAL, "float32", 64) == [
        "surface dtype: got float32; the CUDA kernels support float16 or bfloat16"
    ]
    for rotary in (0, 63, 130):
        (reason,) = kernel_refusals(REAL, "float16", rotary)
        assert reason == (
            f"rotary dims: got {rotary}; the CUDA kernels support even, from 2 to 128 "
            "(the smaller of head_size and indexer_head_dim)"
        )


def test_every_reason_is_listed() -> None:
    assert len(kernel_refusals(replace(REAL, head_size=48, indexer_n_heads=12), "float32", 7)) == 4


def test_the_geometry_of_the_plugin_tests_is_supported() -> None:
    assert kernel_refusals(GEOMETRY, "float16", 16) == []
