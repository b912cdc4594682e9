"""Specialisations: what they accept, what they refuse and why, and what the table covers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsa_plugin.errors import ContractError, RefusedError
from qsa_plugin.kernel_limits import HEAD_SIZES, INDEXER_HEAD_DIMS, MAX_BUDGET, MAX_GROUP_SIZE, MAX_INDEXER_HEADS
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, Specialisation, arch_of, shared_limit
from tests.support.cases import REAL

SPEC = SPECIALISATIONS["real-fp16"]


def test_the_real_geometry_is_in_the_table_in_both_surfaces() -> None:
    assert Specialisation.of(REAL, "float16", 64, "sm_80") in SPECIALISATIONS.values()
    assert Specialisation.of(REAL, "bfloat16", 64, "sm_80") in SPECIALISATIONS.values()


def test_the_table_holds_every_extreme_and_is_small() -> None:
    table = SPECIALISATIONS.values()
    assert len(table) <= 24
    assert {s.head_size for s in table} == set(HEAD_SIZES)
    assert {s.indexer_head_dim for s in table} == set(INDEXER_HEAD_DIMS)
    assert {s.indexer_compress_ratio for s in table} == {2, 4, 8}
    assert {s.geometry.group_size for s in table} >= {1, MAX_GROUP_SIZE}
    assert {s.indexer_n_heads for s in table} >= {1, MAX_INDEXER_HEADS}
    assert {s.indexer_budget for s in table} >= {2, MAX_BUDGET}
    assert {s.rotary_dims for s in table} >= {2, 128}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"surface": "float32"}, "surface dtype"),
        ({"head_size": 48, "rotary_dims": 16}, "head_size"),
        ({"num_q_heads": 34}, "query heads per KV head"),
        ({"indexer_n_heads": 9}, "indexer_n_heads"),
        ({"indexer_head_dim": 96}, "indexer_head_dim"),
        ({"indexer_compress_ratio": 16}, "indexer_compress_ratio"),
        ({"indexer_budget": MAX_BUDGET + 4}, "indexer_budget"),
        ({"rotary_dims": 130}, "rotary dims"),
        ({"rotary_dims": 7}, "rotary dims"),
        ({"arch": "sm_75"}, "sm_75"),
    ],
)
def test_a_broken_limit_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        replace(SPEC, **change)


def test_a_contradiction_is_the_contracts_error() -> None:
    with pytest.raises(ContractError, match="num_q_heads"):
        replace(SPEC, num_q_heads=25)


def test_all_broken_limits_stand_in_one_line() -> None:
    with pytest.raises(RefusedError) as caught:
        replace(SPEC, indexer_n_heads=9, rotary_dims=7)
    assert "indexer_n_heads" in str(caught.value)
    assert "rotary dims" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defines_are_the_geometry() -> None:
    defines = SPEC.defines()
    assert defines["QSA_HQ"] == 24
    assert defines["QSA_HKV"] == 2
    assert defines["QSA_D"] == 256
    assert defines["QSA_ID"] == 128
    assert defines["QSA_BF16"] == 0
    assert SPECIALISATIONS["real-bf16"].defines()["QSA_BF16"] == 1


def test_capabilities_and_targets() -> None:
    assert arch_of((9, 0)) == "sm_90a"
    assert SPEC.on("sm_90a").compute_capability == (9, 0)
    assert len(ARCHES) == 10
    with pytest.raises(RefusedError, match=r"7\.5"):
        arch_of((7, 5))


def test_shared_memory_of_unlisted_devices_is_the_smallest() -> None:
    assert shared_limit((12, 0)) == 99 * 1024
    assert shared_limit((9, 0)) == 227 * 1024
