"""Tile sizes of prefill attention for every tested specialisation and target, without a GPU."""

from __future__ import annotations

import pytest

from qsa_plugin.prefill_launchers import score_stride
from qsa_plugin.prefill_tiles import attn_tile
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, shared_limit
from qsa_plugin.workspace import BLOCK_TILE, MAX_UNION_ROWS

VARIANTS = [(dense, portable) for dense in (False, True) for portable in (False, True)]


@pytest.mark.parametrize("arch", ARCHES.values())
@pytest.mark.parametrize("name", list(SPECIALISATIONS))
def test_tiles_fit_the_target(name: str, arch: str) -> None:
    spec = SPECIALISATIONS[name].on(arch)
    group = spec.geometry.group_size
    for dense, portable in VARIANTS:
        tile = attn_tile(spec, dense, portable)
        assert tile.shared_bytes <= shared_limit(spec.compute_capability)
        hopper = tile.kernel == "prefill_attn_hopper"
        assert hopper <= (spec.hopper and not portable)
        operand_rows = 128 if hopper else tile.defines["QSA_WARPS"] * 16
        assert tile.rows >= 1 and tile.rows * group <= operand_rows
        if not dense:  # a bit a row in each entry of the union
            assert tile.rows == tile.defines["QSA_UNION_ROWS"] <= MAX_UNION_ROWS


def test_only_compute_capability_9_gets_the_warpgroup_kernel() -> None:
    for arch in ARCHES.values():
        kernel = attn_tile(SPECIALISATIONS["real-fp16"].on(arch), dense=True).kernel
        assert (kernel == "prefill_attn_hopper") == (arch == "sm_90a")


def test_scores_are_padded_to_what_a_warp_scores() -> None:
    assert [score_stride(blocks) for blocks in (0, 1, 63, 64, 65)] == [BLOCK_TILE] * 4 + [2 * BLOCK_TILE]
