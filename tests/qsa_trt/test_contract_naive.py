"""The reference operator and the ONNX body against the token-by-token oracle, over random small geometries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE, Geometry
from qsa_trt.reference import qsa_attention
from tests.support.naive import Answer, naive_attention, rounding
from tests.support.reference_body import bits, run_body, selection_mask

Array = NDArray[Any]
Result = tuple[Array, Array, NDArray[np.bool_]]  # attn_output, present_key_value, selection [B, S, M*P]
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
#: Largest error over the row's largest value. fp32: sums in another order. fp16, bf16: the inside is fp32 here and
#: float64 there, so now and then a rounding falls to the other side; three roundings follow each other at a key.
BOUND = {"fp32": 1e-5, "fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
#: Share of elements whose last bit may differ at fp16 and bf16: a chain with one rounding more or less changes a tenth
#: of the elements and more.
UNEQUAL = 0.03
#: Relative distance of scores below which such a rounding may swap two blocks; those rows are not compared.
MARGIN = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 2e-2}


def by_reference(tensors: dict[str, Array], geometry: Geometry, surface: str) -> Result:
    result = qsa_attention(tensors, geometry)
    capacity = tensors["kv_page_table"].shape[2] * PAGE_SIZE
    return result.attn_output, result.present_key_value, selection_mask(result.index_lists, capacity)


def by_body(tensors: dict[str, Array], geometry: Geometry, surface: str) -> Result:
    result = run_body(tensors, geometry, surface)
    return result.attn_output, result.present_key_value, result.selection


IMPLEMENTATIONS: dict[str, Callable[[dict[str, Array], Geometry, str], Result]] = {
    "reference": by_reference,
    "body": by_body,
}


def random_geometry(rng: np.random.Generator) -> Geometry:
    ratio, kv_heads = int(rng.choice([2, 4, 8])), int(rng.integers(1, 3))
    return Geometry(
        num_q_heads=kv_heads * int(rng.integers(1, 5)),
        num_kv_heads=kv_heads,
        head_size=int(rng.choice([32, 64])),
        indexer_n_heads=int(rng.integers(1, 4)),
        indexer_head_dim=int(rng.choice([32, 64])),
        indexer_budget=ratio * int(rng.integers(1, 5)),
        indexer_compress_ratio=ratio,
        attention_scale=float(rng.choice([0.0, 0.3])),
        rms_norm_eps=float(rng.choice([1e-6, 1e-2])),
    )


def make_call(
    rng: np.random.Generator, geometry: Geometry, lengths: Sequence[int], seq_len: int, surface: str, pages: int = 2
) -> dict[str, Array]:
    """A prefill call: NaN in padding and in the whole pool, wild ids past each length, arbitrary cosines and sines."""
    g, dtype, batch = geometry, DTYPES[surface], len(lengths)
    plane = batch * pages + 1
    rotary = 2 * int(rng.integers(1, min(g.head_size, g.indexer_head_dim) // 2))
    table = np.stack([rng.permutation(plane)[: batch * pages].reshape(batch, pages) for _ in range(2)], axis=1)
    table[:, 1] += plane
    qkv = rng.standard_normal((batch, seq_len, (g.num_q_heads + 2 * g.num_kv_heads) * g.head_size)) * 3
    index_qk = rng.standard_normal((batch, seq_len, (g.indexer_n_heads + 1) * g.indexer_head_dim)) * 3
    for b, length in enumerate(lengths):
        qkv[b, max(length, 0) :] = index_qk[b, max(length, 0) :] = np.nan
        table[b, :, -(-max(min(length, seq_len), 0) // PAGE_SIZE) :] = rng.choice([-1, 1 << 30])
    surfaces = {
        "qkv": qkv,
        "index_qk": index_qk,
        "past_key_value": np.full((2, plane, PAGE_SIZE, g.num_kv_heads, g.head_size + g.indexer_head_dim), np.nan),
        "q_norm_gamma": 1 + rng.standard_normal(g.head_size) / 4,
        "k_norm_gamma": 1 + rng.standard_normal(g.head_size) / 4,
        "indexer_q_norm_gamma": rng.standard_normal(g.indexer_head_dim) / 4,
        "indexer_k_norm_gamma": rng.standard_normal(g.indexer_head_dim) / 4,
    }
    return {name: value.astype(dtype) for name, value in surfaces.items()} | {
        "context_lengths": np.array(lengths, np.int32),
        "rope_rotary_cos_sin": rng.uniform(-1, 1, (1, pages * PAGE_SIZE, rotary)).astype(np.float32),
        "kvcache_start_index": np.zeros(0, np.int32),
        "kv_page_table": table.astype(np.int32),
    }


def next_call(
    rng: np.random.Generator, call: dict[str, Array], pool: Array, lengths: Sequence[int], table: Array
) -> dict[str, Array]:
    """A decode call on the same sequences; `lengths` include the new token."""
    batch, dtype = len(lengths), call["qkv"].dtype
    tokens = {
        name: (rng.standard_normal((batch, 1, call[name].shape[2])) * 3).astype(dtype) for name in ("qkv", "index_qk")
    }
    for b, length in enumerate(lengths):
        if length <= 0:
            tokens["qkv"][b] = tokens["index_qk"][b] = np.nan
    return call | {
        **tokens,
        "past_key_value": pool.astype(dtype),
        "context_lengths": np.array(lengths, np.int32),
        "kvcache_start_index": rng.integers(-5, 5, batch).astype(np.int32),  # its values are not read
        "kv_page_table": table,
    }


def full_table(call: dict[str, Array], rng: np.random.Generator) -> Array:
    """The call's page table with every entry live: the ids that are free go where none was."""
    table, plane = call["kv_page_table"].copy(), call["past_key_value"].shape[1]
    for half, entries in ((0, table[:, 0]), (1, table[:, 1])):
        dead = (entries < half * plane) | (entries >= (half + 1) * plane)
        free = np.setdiff1d(np.arange(half * plane, (half + 1) * plane), entries[~dead])
        entries[dead] = rng.permutation(free)[: dead.sum()]
    return table


def check(call: dict[str, Array], geometry: Geometry, surface: str, implementation: str, margin: float) -> Answer:
    """One call by both; every element of both outputs is judged."""
    truth = naive_attention(geometry, call, rounding(None if surface == "fp32" else DTYPES[surface]))
    before = call["past_key_value"].copy()
    output, pool, selection = IMPLEMENTATIONS[implementation](call, geometry, surface)
    assert np.array_equal(bits(call["past_key_value"]), bits(before)), "the input pool was modified"
    assert np.array_equal(bits(pool)[~truth.written], bits(before)[~truth.written]), "a slot was written in excess"
    split = geometry.head_size
    for part in (slice(0, split), slice(split, None)):
        got, want = pool[..., part].astype(np.float64), truth.pool[..., part]
        live = truth.written[..., part]
        scale = np.abs(np.where(live, want, 0)).max(axis=-1, keepdims=True)
        error = np.abs(np.where(live, got - want, 0))
        assert (error <= BOUND[surface] * scale).all(), f"pool columns {part}"
        assert surface == "fp32" or error.astype(bool).sum() <= UNEQUAL * live.sum(), f"pool columns {part}: roundings"
    compared, unequal = 0, 0.0
    for b in range(output.shape[0]):
        for t in range(output.shape[1]):
            position = int(call["context_lengths"][b]) - 1 if call["kvcache_start_index"].size else t
            tokens = truth.lists.get((b, position))
            if tokens is None:
                assert (output[b, t] == 0).all(), f"row {b}, {t} should be zeros"
                assert not selection[b, t].any()
            elif truth.margins.get((b, position), np.inf) >= margin:
                compared += 1
                assert np.flatnonzero(selection[b, t]).tolist() == sorted(tokens), f"row {b}, {t}"
                difference = np.abs(output[b, t].astype(np.float64) - truth.output[b, t])
                unequal += float((difference > 0).mean())
                assert difference.max() <= BOUND[surface] * np.abs(truth.output[b, t]).max(), f"row {b}, {t}"
    assert surface == "fp32" or unequal <= max(1, UNEQUAL * compared), "roundings of the output"
    assert len(truth.lists) - compared <= max(2, len(truth.lists) // 5), "too few rows were far enough from a tie"
    return truth


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("surface", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_prefill_then_decode(seed: int, surface: str, implementation: str) -> None:
    """Ragged prefill with an inactive row, then steps in which rows join, pause and cross block ends."""
    rng = np.random.default_rng(seed)
    geometry = random_geometry(rng)
    prompt = [int(rng.integers(18, 40)), 0, int(rng.integers(1, 18)), 31]
    call = make_call(rng, geometry, prompt, 36, surface)
    truth = check(call, geometry, surface, implementation, MARGIN[surface])
    table, lengths, pool = full_table(call, rng), np.minimum(prompt, 36), truth.pool
    for step in range(geometry.indexer_compress_ratio + 1):
        active = np.array([True, step != 1, True, step % 2 == 0])
        lengths = lengths + active
        call = next_call(rng, call, pool, np.where(active, lengths, 0).tolist(), table)
        pool = check(call, geometry, surface, implementation, MARGIN[surface]).pool


@pytest.mark.parametrize("length", [1, 127, 128, 129])
def test_page_end(length: int, implementation: str) -> None:
    """Prefill up to and past the end of a page, then over it in decode."""
    rng = np.random.default_rng(length)
    geometry = replace(random_geometry(rng), num_q_heads=2, num_kv_heads=1)
    call = make_call(rng, geometry, [length, 5], 129, "fp32")
    pool = check(call, geometry, "fp32", implementation, MARGIN["fp32"]).pool
    table = full_table(call, rng)
    for total in (length + 1, length + 2):
        call = next_call(rng, call, pool, [total, 0], table)
        pool = check(call, geometry, "fp32", implementation, 0).pool


@pytest.mark.parametrize("length", [-3, 256, 257, 1 << 30])
def test_lengths_out_of_range(length: int, implementation: str) -> None:
    """A decode row may fill the table, not more; prefill takes min(length, S) of any length. Others go on."""
    rng = np.random.default_rng(3)
    geometry = random_geometry(rng)
    prefill = make_call(rng, geometry, [length, 9], 20, "fp32")
    if length > 0:
        prefill = {**prefill, "qkv": np.nan_to_num(prefill["qkv"]), "index_qk": np.nan_to_num(prefill["index_qk"])}
    check(prefill, geometry, "fp32", implementation, MARGIN["fp32"])
    pool = np.nan_to_num(prefill["past_key_value"]) + rng.standard_normal(prefill["past_key_value"].shape)
    call = next_call(rng, prefill, pool, [length, 10], full_table(prefill, rng))
    truth = check(call, geometry, "fp32", implementation, 0)
    assert truth.output[0].any() == (length == 256)
    assert truth.output[1].any()


def test_decode_past_the_rope_table(implementation: str) -> None:
    rng = np.random.default_rng(4)
    geometry = random_geometry(rng)
    call = make_call(rng, geometry, [20, 9], 20, "fp32")
    pool = check(call, geometry, "fp32", implementation, MARGIN["fp32"]).pool
    call["rope_rotary_cos_sin"] = call["rope_rotary_cos_sin"][:, :20]
    truth = check(next_call(rng, call, pool, [21, 10], full_table(call, rng)), geometry, "fp32", implementation, 0)
    assert not truth.written[:, full_table(call, rng)[0, 0, 0]].all() and truth.output[1].any()


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("page", [-1, "below", "above", 1 << 30])
@pytest.mark.parametrize("slot", [0, 1])
def test_bad_live_page_in_decode(slot: int, page: int | str, plane: int, implementation: str) -> None:
    """Any live slot counts, and each plane has its own range; the other row goes on."""
    rng = np.random.default_rng(5)
    geometry = replace(random_geometry(rng), num_q_heads=1, num_kv_heads=1)
    call = make_call(rng, geometry, [1, 9], 20, "fp32")
    pool = np.nan_to_num(call["past_key_value"]) + rng.standard_normal(call["past_key_value"].shape)
    table, pages = full_table(call, rng), pool.shape[1]
    table[0, plane, slot] = {"below": plane * pages - 1, "above": (plane + 1) * pages}.get(str(page), page)
    call = next_call(rng, call, pool, [130, 10], table)
    truth = check(call, geometry, "fp32", implementation, 0)
    assert not truth.output[0].any() and truth.output[1].any()
    if slot:  # the same entry is not live yet one page earlier
        again = call | {"context_lengths": np.array([128, 10], np.int32)}
        assert check(again, geometry, "fp32", implementation, 0).output[0].any()


@pytest.mark.parametrize("surface", DTYPES)
@pytest.mark.parametrize("what", ["equal keys", "zero scores", "zero keys", "zero query"])
def test_ties_go_to_the_lower_block(what: str, surface: str, implementation: str) -> None:
    rng = np.random.default_rng(6)
    geometry = replace(random_geometry(rng), indexer_budget=4, indexer_compress_ratio=2, indexer_n_heads=2)
    width = geometry.indexer_head_dim
    call = make_call(rng, geometry, [23], 23, surface)
    call["rope_rotary_cos_sin"] = call["rope_rotary_cos_sin"] * 0
    call["rope_rotary_cos_sin"][..., : call["rope_rotary_cos_sin"].shape[2] // 2] = 1
    keys, queries = call["index_qk"][..., -width:], call["index_qk"][..., :-width]
    if what == "equal keys":
        keys[:] = keys[:, :1]
    elif what == "zero scores":  # every product is negative
        keys[:] = np.abs(keys)
        queries[:] = -np.abs(queries)
        call["indexer_q_norm_gamma"][:] = call["indexer_k_norm_gamma"][:] = 0
    else:
        (keys if what == "zero keys" else queries)[:] = 0
    truth = check(call, geometry, surface, implementation, 0)
    assert truth.lists[0, 22] == [0, 1, 2, 3, 22]
    assert set(truth.margins.values()) <= {0.0, np.inf}
    assert (0.0 in truth.margins.values()) == (what == "equal keys")
