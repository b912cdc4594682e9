"""The reference: what is written to the pool, what is read from it, padding, and rows that are skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry, Mode
from qsa_trt.paging import SequencePages, empty_pool, flat_pages
from qsa_trt.reference import QsaResult, qsa_attention
from tests.support.cases import GEOMETRIES, INT32_MAX, SMALL, decode_step, random_inputs

Array = NDArray[Any]
BATCH = [1, 150, 0, 35]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def written(inputs: dict[str, Array], g: Geometry, sequence: int, start: int, end: int) -> NDArray[np.bool_]:
    """The pool elements that tokens start..end-1 of a sequence may write, token by token as the contract says."""
    mask = np.zeros(inputs["past_key_value"].shape, bool)
    flat, ratio = flat_pages(mask), g.indexer_compress_ratio
    pages = SequencePages.of(inputs["kv_page_table"], sequence, g.head_size)
    for t in range(start, end):
        flat[pages.key(np.array([t]))] = flat[pages.value(np.array([t]))] = True
        if (t + 1) % ratio == 0:
            flat[pages.block_key(np.array([t + 1 - ratio]))] = True
        elif t // ratio == end // ratio:  # still open when the call ends
            flat[pages.raw_index_key(np.array([t]))] = True
    return mask


def same_bits(a: Array, b: Array) -> NDArray[np.bool_]:
    return a.view(np.uint32) == b.view(np.uint32)  # NaN equals itself


def rows_of(inputs: dict[str, Array], sequence: int, rows: slice) -> dict[str, Array]:
    """One sequence's part of a batch, on the same pool."""
    part = slice(sequence, sequence + 1)
    cut = {name: inputs[name][part] for name in ("context_lengths", "kv_page_table")}
    if inputs["kvcache_start_index"].size:
        cut["kvcache_start_index"] = inputs["kvcache_start_index"][part]
    return inputs | cut | {name: inputs[name][part, rows] for name in ("qkv", "index_qk")}


class TestWrites:
    @pytest.mark.parametrize("name", ["small", "ratio-1", "ratio-8"])
    @pytest.mark.parametrize("length", [1, 3, 4, 127, 128, 129, 256])
    def test_prefill_writes_what_the_contract_lists(self, name: str, length: int):
        g = GEOMETRIES[name]
        inputs = random_inputs(g, [length], Mode.PREFILL, rng=rng(), poison=True)
        pool = qsa_attention(inputs, g).present_key_value
        assert (np.isfinite(pool) == written(inputs, g, 0, 0, length)).all()

    @pytest.mark.parametrize("name", ["small", "ratio-1", "ratio-8"])
    @pytest.mark.parametrize("length", [1, 3, 4, 127, 128, 129, 256])
    def test_decode_writes_one_token(self, name: str, length: int):
        g = GEOMETRIES[name]
        inputs = random_inputs(g, [length], Mode.DECODE, rng=rng(), poison=True)
        pool = qsa_attention(inputs, g).present_key_value
        changed = ~same_bits(pool, inputs["past_key_value"])
        assert (changed == written(inputs, g, 0, length - 1, length)).all()
        assert np.isfinite(pool[changed]).all()

    def test_prefill_and_decode_leave_the_same_live_state(self):
        """Token by token, over a page end with shuffled pages: keys, values, block keys and open raw keys."""
        inputs = random_inputs(SMALL, [131], Mode.PREFILL, rng=rng(), poison=True)
        whole = qsa_attention(inputs, SMALL).present_key_value
        pool = inputs["past_key_value"]
        for t in range(131):
            token = slice(t, t + 1)
            step = decode_step(inputs, pool, [t + 1], inputs["qkv"][:, token], inputs["index_qk"][:, token])
            pool = qsa_attention(step, SMALL).present_key_value
        live = np.isfinite(whole)
        assert (pool[live] == whole[live]).all()

    def test_inputs_are_not_modified(self):
        for mode in Mode:
            inputs = random_inputs(SMALL, BATCH, mode, rng=rng(), poison=True)
            before = {name: array.copy() for name, array in inputs.items()}
            qsa_attention(inputs, SMALL)
            for name, array in inputs.items():
                np.testing.assert_array_equal(array, before[name], err_msg=name)

    def test_a_page_of_no_sequence_is_never_touched(self):
        inputs = random_inputs(SMALL, [200, 10], Mode.PREFILL, rng=rng(), spare_pages=3)
        inputs["past_key_value"][:] = 7
        pool = qsa_attention(inputs, SMALL).present_key_value
        untouched = np.ones((2, inputs["past_key_value"].shape[1]), bool)
        for plane, ids in enumerate(inputs["kv_page_table"].swapaxes(0, 1)):
            untouched[plane, ids[ids >= 0] - plane * untouched.shape[1]] = False
        assert untouched.sum() == 8
        assert (pool[untouched] == 7).all()


class TestPadding:
    @pytest.mark.parametrize("mode", list(Mode))
    def test_poison_changes_nothing(self, mode: Mode):
        """NaN wherever nothing is live, INT_MAX in dead page table entries: the same bits as with zeros and -1."""
        clean = qsa_attention(random_inputs(SMALL, BATCH, mode, rng=rng()), SMALL)
        poisoned = qsa_attention(random_inputs(SMALL, BATCH, mode, rng=rng(), poison=True), SMALL)
        assert np.isfinite(poisoned.attn_output).all()
        assert (poisoned.attn_output == clean.attn_output).all()
        assert (poisoned.index_lists == clean.index_lists).all()

    @pytest.mark.parametrize("dead", [-1, INT32_MAX, 10**9])
    @pytest.mark.parametrize("mode", list(Mode))
    def test_dead_page_table_entries_are_never_followed(self, mode: Mode, dead: int):
        inputs = random_inputs(SMALL, BATCH, mode, rng=rng())
        expected = qsa_attention(inputs, SMALL)
        inputs["kv_page_table"][inputs["kv_page_table"] < 0] = dead
        result = qsa_attention(inputs, SMALL)
        assert (result.attn_output == expected.attn_output).all()
        assert (result.present_key_value == expected.present_key_value).all()

    def test_padding_rows_are_exact_zeros(self):
        inputs = random_inputs(SMALL, BATCH, Mode.PREFILL, rng=rng(), poison=True)
        result = qsa_attention(inputs, SMALL)
        for b, length in enumerate(BATCH):
            assert (result.attn_output[b, length:] == 0).all() and result.attn_output[b, :length].any(axis=(1, 2)).all()
            assert (result.index_lists[b, length:] == -1).all()
            assert (result.scores[b][length:] == -np.inf).all() and result.scores[b].shape == (150, length // 4)

    @pytest.mark.parametrize("mode", list(Mode))
    def test_each_row_of_a_batch_equals_the_row_alone(self, mode: Mode):
        inputs = random_inputs(SMALL, BATCH, mode, rng=rng(), poison=True)
        batch = qsa_attention(inputs, SMALL)
        for b, length in enumerate(BATCH):
            rows = slice(length if mode is Mode.PREFILL else 1)
            if length:
                alone = qsa_attention(rows_of(inputs, b, rows), SMALL)
                assert (alone.attn_output[0] == batch.attn_output[b, rows]).all()
                assert (alone.index_lists[0] == batch.index_lists[b, rows]).all()

    def test_prefill_length_is_clamped_to_the_tokens_given(self):
        inputs = random_inputs(SMALL, [20, 30], Mode.PREFILL, rng=rng())
        expected = qsa_attention(inputs, SMALL)
        inputs["context_lengths"][1] = INT32_MAX
        result = qsa_attention(inputs, SMALL)
        assert (result.attn_output == expected.attn_output).all()
        assert (result.present_key_value == expected.present_key_value).all()


def assert_skipped(result: QsaResult, inputs: dict[str, Array], sequence: int, alive: int) -> None:
    """The sequence is zeros and wrote nothing; the other sequence was computed."""
    assert (result.attn_output[sequence] == 0).all()
    assert (result.index_lists[sequence] == -1).all()
    assert result.scores[sequence].size == 0
    assert result.attn_output[alive].any()
    without = inputs | {"context_lengths": inputs["context_lengths"].copy()}
    without["context_lengths"][sequence] = 0
    assert same_bits(result.present_key_value, qsa_attention(without, SMALL).present_key_value).all()


class TestSkippedRows:
    @pytest.mark.parametrize("mode", list(Mode))
    @pytest.mark.parametrize("length", [0, -1, np.iinfo(np.int32).min])
    def test_inactive(self, mode: Mode, length: int):
        inputs = random_inputs(SMALL, [60, 60], mode, rng=rng(), poison=True)
        inputs["context_lengths"][0] = length
        assert_skipped(qsa_attention(inputs, SMALL), inputs, sequence=0, alive=1)

    @pytest.mark.parametrize("mode", list(Mode))
    def test_nothing_active_leaves_the_pool_alone(self, mode: Mode):
        inputs = random_inputs(SMALL, [60], mode, rng=rng(), poison=True)
        inputs["context_lengths"][:] = 0
        assert same_bits(qsa_attention(inputs, SMALL).present_key_value, inputs["past_key_value"]).all()

    @pytest.mark.parametrize("length", [129, INT32_MAX])
    def test_decode_longer_than_the_page_table(self, length: int):
        inputs = random_inputs(SMALL, [128, 128], Mode.DECODE, rng=rng(), max_positions=1000)
        inputs["context_lengths"][1] = length
        assert_skipped(qsa_attention(inputs, SMALL), inputs, sequence=1, alive=0)

    def test_decode_longer_than_the_rope_table(self):
        inputs = random_inputs(SMALL, [100, 101], Mode.DECODE, rng=rng(), max_positions=100)
        assert_skipped(qsa_attention(inputs, SMALL), inputs, sequence=1, alive=0)

    @pytest.mark.parametrize("mode", list(Mode))
    @pytest.mark.parametrize("plane", [0, 1])
    @pytest.mark.parametrize("slot", [0, 1])
    @pytest.mark.parametrize("bad", [-1, "low", "high", INT32_MAX])
    def test_live_page_id_out_of_range(self, mode: Mode, plane: int, slot: int, bad: int | str):
        inputs = random_inputs(SMALL, [129, 129], mode, rng=rng())
        num_pages = inputs["past_key_value"].shape[1]
        value = {"low": plane * num_pages - 1, "high": (plane + 1) * num_pages}.get(str(bad), bad)
        inputs["kv_page_table"][0, plane, slot] = value
        assert_skipped(qsa_attention(inputs, SMALL), inputs, sequence=0, alive=1)


class TestState:
    def decode(self, inputs: dict[str, Array], pool: Array, qkv: Array, index_qk: Array, lengths: list[int]) -> Any:
        """Decode the n tokens of `qkv` one by one after `lengths` others; returns outputs `[n, Hq, D]` and the pool."""
        outputs = []
        for t in range(qkv.shape[1]):
            lengths = [length + 1 for length in lengths]
            step = decode_step(inputs, pool, lengths, qkv[:, t : t + 1], index_qk[:, t : t + 1])
            result = qsa_attention(step, SMALL)
            pool = result.present_key_value
            outputs.append(result.attn_output[0, 0])
        return np.array(outputs), pool

    def test_prefill_under_the_budget_feeds_decode_past_it(self):
        inputs = random_inputs(SMALL, [60], Mode.PREFILL, rng=rng())
        whole = qsa_attention(inputs, SMALL)
        short = qsa_attention(rows_of(inputs, 0, slice(10)) | {"context_lengths": np.array([10])}, SMALL)
        outputs, _ = self.decode(
            inputs, short.present_key_value, inputs["qkv"][:, 10:], inputs["index_qk"][:, 10:], [10]
        )
        np.testing.assert_allclose(outputs, whole.attn_output[0, 10:], atol=1e-5)

    def test_a_short_request_in_the_pages_of_a_long_one(self):
        """A of 150 tokens, then B of 6 in A's pages, decoded past the budget: the bits of a fresh pool."""
        a = random_inputs(SMALL, [150], Mode.PREFILL, rng=rng(1))
        b = random_inputs(SMALL, [6], Mode.PREFILL, rng=rng(2), pages_per_seq=2)
        more = random_inputs(SMALL, [50], Mode.PREFILL, rng=rng(3))
        b["kv_page_table"] = a["kv_page_table"]
        used = qsa_attention(a, SMALL).present_key_value
        fresh = empty_pool(SMALL, used.shape[1], np.float32, np.nan)
        results = []
        for pool in (used, fresh):
            prefill = qsa_attention(b | {"past_key_value": pool}, SMALL)
            outputs, _ = self.decode(b, prefill.present_key_value, more["qkv"], more["index_qk"], [6])
            results.append(outputs)
        assert np.isfinite(results[1]).all()
        assert (results[0] == results[1]).all()

    def test_copied_pages_continue_equally(self):
        inputs = random_inputs(SMALL, [130], Mode.PREFILL, rng=rng(1))
        more = random_inputs(SMALL, [10], Mode.PREFILL, rng=rng(2))
        pool = qsa_attention(inputs, SMALL).present_key_value
        num_pages = 8
        moved = empty_pool(SMALL, num_pages, np.float32, np.nan)
        new_ids = np.array([[[5, 1], [num_pages + 2, num_pages + 7]]], np.int32)
        flat_pages(moved)[new_ids.ravel()] = flat_pages(pool)[inputs["kv_page_table"].ravel()]
        here, _ = self.decode(inputs, pool, more["qkv"], more["index_qk"], [130])
        there, _ = self.decode(inputs | {"kv_page_table": new_ids}, moved, more["qkv"], more["index_qk"], [130])
        assert (here == there).all()

    def test_interleaved_requests_equal_their_solo_runs(self):
        both = random_inputs(SMALL, [30, 126], Mode.PREFILL, rng=rng(1), pages_per_seq=2)
        both["kv_page_table"] = random_inputs(SMALL, [200, 200], Mode.PREFILL, rng=rng(5))["kv_page_table"]
        more = random_inputs(SMALL, [12, 12], Mode.PREFILL, rng=rng(2))
        start = qsa_attention(both, SMALL).present_key_value
        requests = [rows_of(both, b, slice(None)) for b in (0, 1)]
        solo = [
            self.decode(requests[b], start, more["qkv"][b : b + 1], more["index_qk"][b : b + 1], [length])[0]
            for b, length in enumerate((30, 126))
        ]
        pool, mixed = start, ([], [])
        for t in range(12):
            for b, length in enumerate((30, 126)):
                qkv, index_qk = (more[name][b : b + 1, t : t + 1] for name in ("qkv", "index_qk"))
                output, pool = self.decode(requests[b], pool, qkv, index_qk, [length + t])
                mixed[b].append(output[0])
        assert (np.array(mixed) == np.array(solo)).all()
