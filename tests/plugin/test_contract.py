"""The texts of the contract's refusals that no other test reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsa_plugin.contract import INPUTS, Geometry, check_call, resolve_dims
from qsa_plugin.errors import ContractError

GEOMETRY = Geometry(
    num_q_heads=8,
    num_kv_heads=2,
    head_size=64,
    indexer_n_heads=2,
    indexer_head_dim=64,
    indexer_budget=64,
    indexer_compress_ratio=4,
)
SIZES = {"B": 2, "S": 5, "N": 4, "M": 2, "maxPos": 256, "rotary": 32, "start": 0}


def shapes(**changes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Legal shapes of a prefill, some of them replaced."""
    legal = {t.name: resolve_dims(t.dims, GEOMETRY) for t in INPUTS}
    return {name: tuple(SIZES.get(d, d) for d in dims) for name, dims in legal.items()} | changes  # type: ignore[misc]


def test_pool_io_is_one_of_three() -> None:
    with pytest.raises(ContractError) as error:
        replace(GEOMETRY, pool_io=7)
    assert str(error.value) == (
        "attribute pool_io: got 7; expected 0 (in place), 1 (alias) or 2 (copy); correct the attribute"
    )


def test_legal_shapes() -> None:
    assert check_call(GEOMETRY, shapes()).batch == 2


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("context_lengths", (2, 1), "context_lengths: got [2, 1]; expected shape [B]; bind a tensor of that rank"),
        ("kv_page_table", (2, 3, 2), "kv_page_table: got [2, 3, 2]; expected shape [B, 2, M]; axis 1 must be 2"),
        (
            "context_lengths",
            (3,),
            "context_lengths: got [3]; expected shape [B] with B = 2 as in qkv; make axis 0 equal",
        ),
    ],
)
def test_shapes_that_contradict_the_contract(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ContractError) as error:
        check_call(GEOMETRY, shapes(**{name: shape}))
    assert str(error.value) == message
