"""Inputs of the cases: legal calls, and block keys whose scores have the distribution they are named after."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import INPUTS, check_call
from qsa_trt.benchmark import inputs
from qsa_trt.benchmark.cases import CASES, GEOMETRY, Case, select
from qsa_trt.benchmark.inputs import SCORES, InputMaker, block_keys, context_length, page_table, shapes_of_case
from qsa_trt.reference import block_scores


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_legal_call(case: Case) -> None:
    shapes = shapes_of_case(case, GEOMETRY)
    call = check_call(GEOMETRY, {tensor.name: shapes[tensor.name] for tensor in INPUTS})
    assert (call.mode, call.batch, call.max_kv_len) == (case.mode, case.batch, case.capacity or case.length)


@pytest.mark.parametrize("name", ["decode-b16-8192", "decode-b1-8192-in-1M", "prefill-8192-random"])
def test_page_tables_hold_every_live_page_once(name: str) -> None:
    (case,) = select([name], False)
    table = page_table(np.random.default_rng(0), case)
    live, pages = case.length // 128, case.batch * case.pages_a_sequence
    for plane in (0, 1):
        ids = table[:, plane, :live].ravel() - plane * pages
        assert np.unique(ids).size == ids.size == case.batch * live
        assert ids.min() >= 0 and ids.max() < pages
    assert (table[:, :, live:] == -1).all()
    assert not np.array_equal(table[:, 0, :live], table[:, 1, :live] - pages)


@pytest.mark.parametrize("kind", [kind for kind in SCORES if kind != "normal"])
def test_scores_have_the_distribution_of_their_name(kind: str) -> None:
    (case,) = select([f"decode-b1-8192-{kind.replace(' ', '-')}"], False)
    count = context_length(case) // 4
    rng = np.random.default_rng(0)
    query = InputMaker(GEOMETRY).small(rng, case)["index_qk"].astype(np.float32).reshape(1, 5, -1)[:, :-1]
    query = (query * (1 + rng.standard_normal(query.shape[-1]) / 4)).astype(np.float16).astype(np.float32)  # its norm
    keys = block_keys(rng, GEOMETRY, kind, count).astype(np.float32)
    (scores,) = block_scores(query, keys)
    values, counts = np.unique(scores, return_counts=True)
    if kind == "concentrated":
        assert values.size > count * 0.8 and values[-1] / values[0] < 1.05 and values[0] > 0
    else:
        expected = {"all equal": 1, "five values": 5, "400 high": 2}[kind]
        assert values.size == expected and values[0] > 0
        assert kind != "400 high" or counts[-1] == 400


def test_blocks_of_a_context_are_distinct_where_scores_are_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_PAGES", 37)
    monkeypatch.setattr(inputs, "_RANDOM_PAGES", 5)
    pages = InputMaker(GEOMETRY)._pages
    keys = pages[:, ::4, 0, GEOMETRY.head_size :].reshape(-1, GEOMETRY.indexer_head_dim)
    assert np.unique(keys, axis=0).shape == keys.shape


def test_filling_repeats_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory stands here as a NumPy array."""
    from cuda.bindings import driver

    memory = np.zeros(23, np.uint8)

    class Memory:
        address, nbytes = 0, memory.nbytes

        def write(self, array: Any) -> None:
            memory[: array.nbytes] = array

    def copy(target: int, source: int, count: int) -> tuple[int]:
        memory[target : target + count] = memory[source : source + count].copy()
        return (0,)

    monkeypatch.setattr(driver, "cuMemcpyDtoD", copy)
    inputs.fill(Memory(), np.array([1, 2, 3], np.uint8))  # type: ignore[arg-type]
    assert list(memory) == [1 + i % 3 for i in range(23)]
    inputs.fill(Memory(), np.arange(100, dtype=np.uint8))  # type: ignore[arg-type]
    assert list(memory) == list(range(23))
