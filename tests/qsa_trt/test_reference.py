"""The reference: selection, block boundaries, and decode against prefill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry, Mode
from qsa_plugin.errors import ContractError, InputError
from qsa_trt.metrics import row_error, same_index_sets
from qsa_trt.reference import attend, block_scores, index_list, qsa_attention, select_blocks
from qsa_trt.rope import rope_table
from tests.support.cases import GEOMETRIES, REAL, SMALL, decode_step, geometry, random_inputs

Array = NDArray[Any]


def dense_attention(inputs: dict[str, Array], g: Geometry) -> Array:
    """Causal attention over everything, fp64, one query and one head at a time: `[S, Hq, D]` of sequence 0.

    Written apart from the reference, to be compared with it where the budget holds all complete blocks.
    """
    x = inputs["qkv"][0].astype(np.float64).reshape(-1, g.num_q_heads + 2 * g.num_kv_heads, g.head_size)
    cos, sin = np.split(inputs["rope_rotary_cos_sin"][0].astype(np.float64), 2, axis=-1)
    half = cos.shape[-1]

    def norm_and_rope(vector: Array, gamma: Array, t: int) -> Array:
        y = vector / np.sqrt((vector**2).mean() + g.rms_norm_eps) * gamma
        pairs = y[:half] + 1j * y[half : 2 * half]  # RoPE is a rotation of the complex plane
        turned = pairs * (cos[t] + 1j * sin[t])
        return np.concatenate([turned.real, turned.imag, y[2 * half :]])

    out = np.zeros((len(x), g.num_q_heads, g.head_size))
    for head in range(g.num_q_heads):
        kv_head = head // g.group_size
        key_head, value_head = g.num_q_heads + kv_head, g.num_q_heads + g.num_kv_heads + kv_head
        keys = np.array([norm_and_rope(x[t, key_head], inputs["k_norm_gamma"], t) for t in range(len(x))])
        for t in range(len(x)):
            logits = g.scale * keys[: t + 1] @ norm_and_rope(x[t, head], inputs["q_norm_gamma"], t)
            weights = np.exp(logits - logits.max())
            out[t, head] = weights @ x[: t + 1, value_head] / weights.sum()
    return out


def without_rope(inputs: dict[str, Array]) -> dict[str, Array]:
    """The same call with every angle 0, so that equal raw keys make equal block keys wherever they stand."""
    positions, rotary = inputs["rope_rotary_cos_sin"].shape[1:]
    return inputs | {"rope_rotary_cos_sin": rope_table(positions, np.zeros(rotary // 2))}


class TestSelection:
    @pytest.mark.parametrize("blocks", [513, 16_448, 30_938, 65_504, 262_144])
    def test_scores_one_step_apart(self, blocks: int):
        """Neighbouring fp32 numbers in random order: exactly the 512 largest, best first."""
        ranks = np.random.default_rng(blocks).permutation(blocks)
        scores = (np.float32(1).view(np.int32) + ranks.astype(np.int32)).view(np.float32)
        assert (select_blocks(scores, 512) == np.argsort(ranks)[::-1][:512]).all()

    @pytest.mark.parametrize("value", [0.0, 3.5])
    def test_all_equal_takes_the_lowest_ids(self, value: float):
        assert select_blocks(np.full(5000, value, np.float32), 512).tolist() == list(range(512))

    def test_ties_at_the_boundary_take_the_lowest_ids(self):
        order = np.random.default_rng(0).permutation(2000)
        scores = np.zeros(2000, np.float32)
        scores[order[:400]], scores[order[400:550]] = 2, 1
        selected = select_blocks(scores, 512)
        assert set(selected[:400]) == set(order[:400])
        assert selected[400:].tolist() == sorted(order[400:550])[:112]

    def test_minus_zero_equals_plus_zero(self):
        scores = np.zeros(1000, np.float32)
        scores[::2] = -0.0
        assert select_blocks(scores, 300).tolist() == list(range(300))

    def test_nan_ranks_lowest_and_by_id(self):
        scores = np.array([np.nan, 0, np.nan, 5, -0.0, np.inf], np.float32)
        assert select_blocks(scores, 6).tolist() == [5, 3, 1, 4, 0, 2]
        assert select_blocks(scores, 4).tolist() == [5, 3, 1, 4]

    def test_list_is_blocks_in_rank_order_then_the_tail(self):
        assert index_list(SMALL, np.array([1.0, 3.0]), 10).tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10]
        assert index_list(SMALL, np.array([]), 2).tolist() == [0, 1, 2]
        assert index_list(SMALL, np.array([1.0]), 3).tolist() == [0, 1, 2, 3]

    def test_score_is_the_relu_sum_over_heads_over_the_root_of_the_dim(self):
        index_q = np.array([[[1.0, 2, 0, 0], [0, 0, -3, 1]]])
        block_keys = np.array([[1.0, 1, 1, 1], [-1, -1, -1, 0], [-1, 0, 1, 1]])
        # head dots: (3, -2), (-3, 3), (-1, -2); sqrt(Id) = 2
        assert block_scores(index_q, block_keys).tolist() == [[1.5, 1.5, 0.0]]

    @pytest.mark.parametrize("compute", [np.float32, np.float64])
    def test_equal_block_keys_score_equally_wherever_they_stand(self, compute: type):
        rng = np.random.default_rng(0)
        index_q = rng.standard_normal((3, 4, 128)).astype(compute)
        key = rng.standard_normal(128).astype(compute)
        for blocks in (1, 2, 7, 64, 513):
            many = block_scores(index_q, np.tile(key, (blocks, 1)))
            alone = block_scores(index_q[1:2], key[None])
            assert (many == many[:, :1]).all()
            assert (many[1] == alone).all()

    def test_all_heads_negative_selects_the_lowest_blocks(self):
        """Every score is exactly 0: keys are the negatives of the queries they meet."""
        inputs = without_rope(random_inputs(SMALL, [100], Mode.PREFILL, rng=np.random.default_rng(0)))
        inputs["indexer_q_norm_gamma"][:] = inputs["indexer_k_norm_gamma"][:] = 0
        inputs["index_qk"][:, :, :-8] = 1
        inputs["index_qk"][:, :, -8:] = -1
        result = qsa_attention(inputs, SMALL)
        assert (result.scores[0][99, :25] == 0).all()
        assert result.index_lists[0, 98].tolist() == [*range(32), 96, 97, 98]

    def test_nan_index_key_ranks_its_block_lowest(self):
        """Left out where enough other blocks are visible, taken where the budget holds them all."""
        inputs = random_inputs(SMALL, [64], Mode.PREFILL, rng=np.random.default_rng(0))
        clean = qsa_attention(inputs, SMALL)
        inputs["index_qk"][0, 5, -8:] = np.nan
        result = qsa_attention(inputs, SMALL)
        assert np.isnan(result.scores[0][63, 1]) and np.isfinite(np.delete(result.scores[0][63], 1)).all()
        assert not np.isin([4, 5, 6, 7], result.index_lists[0, 40:]).any()
        assert result.index_lists[0, 11].tolist()[8:12] == [4, 5, 6, 7], "three blocks visible: all three selected"
        assert same_index_sets(result.index_lists[0, :35], clean.index_lists[0, :35]).all(), "up to the budget"
        assert np.isfinite(result.attn_output).all()

    def test_nan_index_query_takes_the_lowest_blocks(self):
        inputs = random_inputs(SMALL, [64], Mode.PREFILL, rng=np.random.default_rng(0))
        inputs["index_qk"][0, 62, 0] = np.nan
        result = qsa_attention(inputs, SMALL)
        assert result.index_lists[0, 62].tolist() == [*range(32), 60, 61, 62]
        assert np.isfinite(result.attn_output).all()


@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "real"])
def test_lists_are_best_blocks_and_tail(name: str):
    """Properties of every row: ids distinct and visible, tail kept, no block left out that beats one taken."""
    g, length = GEOMETRIES[name], 150
    result = qsa_attention(random_inputs(g, [length], Mode.PREFILL, rng=np.random.default_rng(0)), g)
    ratio, scores = g.indexer_compress_ratio, result.scores[0]
    assert result.index_lists.shape == (1, length, g.list_width)
    for t, row in enumerate(result.index_lists[0]):
        complete = (t + 1) // ratio
        tokens = row[row >= 0]
        assert (row[tokens.size :] == -1).all()
        blocks, tail = tokens[: tokens.size - (t + 1) % ratio], tokens[tokens.size - (t + 1) % ratio :]
        assert tail.tolist() == list(range(complete * ratio, t + 1))
        taken = blocks[::ratio] // ratio
        assert (blocks.reshape(-1, ratio) == taken[:, None] * ratio + np.arange(ratio)).all()
        assert len(set(taken)) == len(taken) == min(g.budget_blocks, complete)
        left = np.setdiff1d(np.arange(complete), taken)
        assert left.size == 0 or scores[t, taken].min() >= scores[t, left].max()
        assert (scores[t, complete:] == -np.inf).all()


class TestBoundaries:
    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 31, 32, 33, 34, 35])
    def test_up_to_the_budget_it_is_dense_attention(self, length: int):
        """SMALL selects 8 blocks of 4: rows up to context 35 attend to everything. fp32 against fp64."""
        inputs = random_inputs(SMALL, [length], Mode.PREFILL, rng=np.random.default_rng(length), poison=True)
        result = qsa_attention(inputs, SMALL)
        assert [set(row[row >= 0]) for row in result.index_lists[0]] == [set(range(t + 1)) for t in range(length)]
        assert row_error(result.attn_output[0], dense_attention(inputs, SMALL)).max() < 2e-6  # 20 ulp of fp32

    @pytest.mark.parametrize("name", ["multi-head", "multi-query", "ratio-1", "ratio-2", "ratio-16"])
    def test_dense_in_other_geometries(self, name: str):
        g = GEOMETRIES[name]
        inputs = random_inputs(g, [g.list_width], Mode.PREFILL, rng=np.random.default_rng(0))
        result = qsa_attention(inputs, g)
        assert row_error(result.attn_output[0], dense_attention(inputs, g)).max() < 2e-6  # 20 ulp of fp32

    def test_first_length_past_the_budget_leaves_one_block_out(self):
        inputs = random_inputs(SMALL, [36], Mode.PREFILL, rng=np.random.default_rng(0))
        row = qsa_attention(inputs, SMALL).index_lists[0, 35]
        assert (row >= 0).sum() == 32 and row.max() <= 35
        left_out = sorted(set(range(36)) - set(row.tolist()))
        assert left_out == list(range(left_out[0], left_out[0] + 4)) and left_out[0] % 4 == 0

    def test_the_block_completed_by_this_token_is_selectable(self):
        """ctx 4, 8 and 40: the tail is empty, and the last block is there because its score is the best."""
        inputs = without_rope(random_inputs(SMALL, [40], Mode.PREFILL, rng=np.random.default_rng(0)))
        inputs["indexer_q_norm_gamma"][:] = inputs["indexer_k_norm_gamma"][:] = 0
        inputs["index_qk"][:, :, :-8] = 1  # every query asks for the direction (1, .., 1)
        inputs["index_qk"][:, 36:, -8:] = 1
        lists = qsa_attention(inputs, SMALL).index_lists[0]
        assert lists[39, :4].tolist() == [36, 37, 38, 39]
        assert sorted(lists[3, :4]) == [0, 1, 2, 3] and (lists[3, 4:] == -1).all()
        assert sorted(lists[7, :8]) == list(range(8)) and (lists[7, 8:] == -1).all()

    def test_single_token_prefill_attends_to_itself(self):
        inputs = random_inputs(SMALL, [1, 1], Mode.PREFILL, rng=np.random.default_rng(0))
        result = qsa_attention(inputs, SMALL)
        assert inputs["kvcache_start_index"].shape == (0,)
        values = inputs["qkv"][:, 0, -2 * 16 :].reshape(2, 2, 16)
        np.testing.assert_allclose(result.attn_output[:, 0], values.repeat(2, axis=1), rtol=1e-6)

    @pytest.mark.parametrize("length", range(2047, 2054))
    def test_the_real_budget(self, length: int):
        """Decode at 2047 to 2053 tokens: all of them up to 2051, then 512 of 513 blocks and the tail."""
        inputs = random_inputs(REAL, [length], Mode.DECODE, rng=np.random.default_rng(length), theta=1e7)
        row = qsa_attention(inputs, REAL).index_lists[0, 0]
        expected = length if length <= 2051 else 2048 + length % 4
        assert len(set(row[row >= 0])) == (row >= 0).sum() == expected
        assert row.max() < length and set(range(length // 4 * 4, length)) <= set(row)


class TestDecode:
    @pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "real"])
    @pytest.mark.parametrize("start", [0, 100])
    def test_decode_equals_the_prefill_row(self, name: str, start: int):
        """From an empty pool and from a prefill, over a page end: scores and lists bit for bit."""
        g, total = GEOMETRIES[name], 140
        inputs = random_inputs(g, [total], Mode.PREFILL, rng=np.random.default_rng(0), poison=True)
        whole = qsa_attention(inputs, g)
        pool = inputs["past_key_value"]
        if start:
            first = {key: inputs[key][:, :start] for key in ("qkv", "index_qk")}
            pool = qsa_attention(inputs | first | {"context_lengths": np.array([start])}, g).present_key_value
        for t in range(start, total):
            token = slice(t, t + 1)
            step = decode_step(inputs, pool, [t + 1], inputs["qkv"][:, token], inputs["index_qk"][:, token])
            result = qsa_attention(step, g)
            pool = result.present_key_value
            complete = (t + 1) // g.indexer_compress_ratio
            assert (result.scores[0][0] == whole.scores[0][t, :complete]).all()
            assert (result.index_lists[0, 0] == whole.index_lists[0, t]).all()
            assert row_error(result.attn_output[0, 0], whole.attn_output[0, t]).max() < 1e-6  # BLAS may sum otherwise

    def test_ties_are_decided_as_in_prefill(self):
        """Blocks repeat four patterns, so that most scores of a row are tied."""
        inputs = without_rope(random_inputs(SMALL, [120], Mode.PREFILL, rng=np.random.default_rng(0)))
        inputs["index_qk"][0, :, -8:] = np.tile(inputs["index_qk"][0, :16, -8:], (8, 1))[:120]
        whole = qsa_attention(inputs, SMALL)
        assert len(set(whole.scores[0][119])) <= 4
        pool = inputs["past_key_value"]
        for t in range(120):
            token = slice(t, t + 1)
            step = decode_step(inputs, pool, [t + 1], inputs["qkv"][:, token], inputs["index_qk"][:, token])
            result = qsa_attention(step, SMALL)
            pool = result.present_key_value
            assert (result.index_lists[0, 0] == whole.index_lists[0, t]).all()

    def test_start_index_values_are_not_read(self):
        inputs = random_inputs(SMALL, [50, 7], Mode.DECODE, rng=np.random.default_rng(0))
        expected = qsa_attention(inputs, SMALL)
        inputs["kvcache_start_index"][:] = [-5, 10**9]
        assert (qsa_attention(inputs, SMALL).attn_output == expected.attn_output).all()


class TestAttend:
    def test_query_heads_share_kv_heads_in_groups(self):
        values = np.arange(6, dtype=np.float32).reshape(2, 1, 3)  # [Hkv, 1, D]
        out = attend(np.ones((4, 3), np.float32), np.ones((2, 1, 3), np.float32), values, 1.0)
        assert out.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]

    def test_scale_attribute(self):
        inputs = random_inputs(SMALL, [30], Mode.PREFILL, rng=np.random.default_rng(0))
        default = qsa_attention(inputs, SMALL).attn_output
        for scale, equal in ((0.25, True), (-1.0, True), (0.0, True), (0.5, False)):
            g = geometry("4/2", 16, "2x8", 32, 4, attention_scale=scale)
            assert (qsa_attention(inputs, g).attn_output == default).all() == equal

    def test_dots_beyond_fp16_stay_finite(self):
        g = geometry("4/2", 256, "2x8", 32, 4)
        inputs = random_inputs(g, [60], Mode.PREFILL, dtype=np.float16, rng=np.random.default_rng(0))
        inputs["q_norm_gamma"][:] = inputs["k_norm_gamma"][:] = 40  # dots of some |q|^2 = 256 * 40^2 = 409,600
        inputs["qkv"][0, :, :256] = inputs["qkv"][0, :, 4 * 256 : 5 * 256]  # query head 0 equals its key
        assert np.isfinite(qsa_attention(inputs, g).attn_output).all()


class TestBadCalls:
    def test_shapes_are_checked_before_anything_is_done(self):
        inputs = random_inputs(SMALL, [20], Mode.PREFILL, rng=np.random.default_rng(0))
        with pytest.raises(ContractError, match="qkv"):
            qsa_attention(inputs | {"kvcache_start_index": np.zeros(1, np.int32)}, SMALL)

    def test_compute_dtype(self):
        inputs = random_inputs(SMALL, [1], Mode.PREFILL, rng=np.random.default_rng(0))
        with pytest.raises(InputError, match="compute: got float16; expected float32 or float64; choose"):
            qsa_attention(inputs, SMALL, compute=np.float16)
