"""The reference's rounding chain: where h() stands, what each dtype gives, and switching it off."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from qsa_plugin.contract import Mode
from qsa_trt.metrics import row_error
from qsa_trt.paging import SequencePages, flat_pages
from qsa_trt.reference import qsa_attention
from tests.support.cases import SMALL, decode_step, random_inputs

Array = NDArray[Any]
HALVES = [np.float16, ml_dtypes.bfloat16]
LENGTH = 23


def h(x: Array, dtype: DTypeLike) -> Array:
    return x.astype(dtype).astype(np.float32)


def norm(x: Array) -> Array:
    return x * (1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-6)))


def turn(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


@pytest.fixture(params=HALVES, ids=["fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def inputs(dtype: Any) -> dict[str, Array]:
    return random_inputs(SMALL, [LENGTH], Mode.PREFILL, dtype=dtype, rng=np.random.default_rng(0), rotary_dims=8)


@pytest.fixture
def stored(inputs: dict[str, Array]) -> dict[str, Array]:
    """What a prefill leaves in the pool, in fp32."""
    flat = flat_pages(qsa_attention(inputs, SMALL).present_key_value)
    pages = SequencePages.of(inputs["kv_page_table"], 0, SMALL.head_size)
    tokens, first_tokens, open_tokens = np.arange(LENGTH), np.arange(0, 20, 4), np.arange(20, LENGTH)
    return {
        "key": flat[pages.key(tokens)].astype(np.float32),
        "value": flat[pages.value(tokens)].astype(np.float32),
        "block_key": flat[pages.block_key(first_tokens)].astype(np.float32),
        "raw": flat[pages.raw_index_key(open_tokens)].astype(np.float32),
    }


def heads(inputs: dict[str, Array]) -> Array:
    return inputs["qkv"][0].astype(np.float32).reshape(LENGTH, 8, 16)


def cos_sin(inputs: dict[str, Array], positions: Array) -> Array:
    return inputs["rope_rotary_cos_sin"][0, positions].reshape(-1, 2, 4).swapaxes(0, 1)  # [2, n, rotary/2]


def test_main_keys_round_before_the_weight_after_it_and_after_rope(inputs: dict, stored: dict, dtype: Any):
    raw, gamma = heads(inputs)[:, 4:6], inputs["k_norm_gamma"].astype(np.float32)
    cos, sin = cos_sin(inputs, np.arange(LENGTH))[:, :, None]
    right = h(turn(h(h(norm(raw), dtype) * gamma, dtype), cos, sin), dtype)
    assert (stored["key"] == right).all()
    once = h(turn(norm(raw) * gamma, cos, sin), dtype)
    assert (stored["key"] != once).mean() > 0.05, "one rounding would show"


def test_values_and_open_raw_keys_are_stored_as_they_came(inputs: dict, stored: dict):
    assert (stored["value"] == heads(inputs)[:, 6:]).all()
    assert (stored["raw"] == inputs["index_qk"][0, 20:, -8:].astype(np.float32)).all()


def test_block_keys_round_the_mean_and_turn_at_the_first_token(inputs: dict, stored: dict, dtype: Any):
    raw = inputs["index_qk"][0, :20, -8:].astype(np.float32).reshape(5, 4, 8)
    weight = 1 + inputs["indexer_k_norm_gamma"].astype(np.float32)
    mean = (((raw[:, 0] + raw[:, 1]) + raw[:, 2]) + raw[:, 3]) / 4

    def block_key(pooled: Array, offset: int) -> Array:
        return h(turn(norm(pooled) * weight, *cos_sin(inputs, np.arange(0, 20, 4) + offset)), dtype)

    assert (stored["block_key"] == block_key(h(mean, dtype), 0)).all()
    assert (stored["block_key"] != block_key(mean, 0)).any(), "a mean that is not rounded would show"
    for offset in (1, 2, 3):
        assert (stored["block_key"] != block_key(h(mean, dtype), offset)).mean() > 0.5, "so would another position"


def test_decode_turns_the_block_key_at_its_first_token_too(inputs: dict, stored: dict):
    """The block is completed by decode step 19; its position is 16."""
    first = {name: inputs[name][:, :19] for name in ("qkv", "index_qk")}
    pool = qsa_attention(inputs | first | {"context_lengths": np.array([19])}, SMALL).present_key_value
    step = decode_step(inputs, pool, [20], inputs["qkv"][:, 19:20], inputs["index_qk"][:, 19:20])
    pages = SequencePages.of(inputs["kv_page_table"], 0, SMALL.head_size)
    decoded = flat_pages(qsa_attention(step, SMALL).present_key_value)[pages.block_key(np.array([16]))]
    assert (decoded.astype(np.float32) == stored["block_key"][4]).all()


def test_scores_use_the_rounded_query_and_are_not_rounded(inputs: dict, stored: dict, dtype: Any):
    raw = inputs["index_qk"][0, :, :-8].astype(np.float32).reshape(LENGTH, 2, 8)
    cos, sin = cos_sin(inputs, np.arange(LENGTH))[:, :, None]
    query = h(turn(norm(raw) * (1 + inputs["indexer_q_norm_gamma"].astype(np.float32)), cos, sin), dtype)
    dots = np.einsum("thd,gd->thg", query.astype(np.float64), stored["block_key"].astype(np.float64))
    expected = np.maximum(dots, 0).sum(axis=1) / np.sqrt(8)
    scores = qsa_attention(inputs, SMALL).scores[0]
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores[22], expected[22], rtol=0, atol=1e-6 * expected.max())


def test_attention_reads_rounded_tensors_and_rounds_once(inputs: dict, stored: dict, dtype: Any):
    """fp64 softmax over the stored keys and values; probabilities are not rounded. Every row sees all tokens."""
    gamma = inputs["q_norm_gamma"].astype(np.float32)
    cos, sin = cos_sin(inputs, np.arange(LENGTH))[:, :, None]
    query = h(turn(h(h(norm(heads(inputs)[:, :4]), dtype) * gamma, dtype), cos, sin), dtype).astype(np.float64)
    key, value = (stored[name].astype(np.float64).repeat(2, axis=1) for name in ("key", "value"))
    logits = np.einsum("thd,shd->ths", query, key) / 4
    logits[np.triu_indices(LENGTH, 1)[0], :, np.triu_indices(LENGTH, 1)[1]] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    expected = np.einsum("ths,shd->thd", weights / weights.sum(axis=-1, keepdims=True), value)
    output = qsa_attention(inputs, SMALL).attn_output[0]
    exact = output.astype(np.float32) == h(expected, dtype)
    assert exact.mean() > 0.99, "rounding boundaries aside"
    half_ulp = ml_dtypes.finfo(dtype).eps / 2
    assert row_error(output, expected).max() <= half_ulp * 1.01


def test_outputs_have_the_surface_dtype(inputs: dict, dtype: Any):
    result = qsa_attention(inputs, SMALL)
    assert result.attn_output.dtype == result.present_key_value.dtype == dtype
    assert result.scores[0].dtype == np.float32 and result.index_lists.dtype == np.int32
    assert qsa_attention(inputs, SMALL, compute=np.float64).attn_output.dtype == dtype


@pytest.mark.parametrize("mode", list(Mode))
def test_fp64_inside_with_the_same_surface(mode: Mode, dtype: Any):
    """Only values on a rounding boundary may move, by the surface's own step."""
    inputs = random_inputs(SMALL, [30], mode, dtype=dtype, rng=np.random.default_rng(0))
    single = qsa_attention(inputs, SMALL, compute=np.float32).attn_output
    double = qsa_attention(inputs, SMALL, compute=np.float64).attn_output
    assert (single == double).mean() > 0.97
    assert row_error(single, double).max() < 2 * ml_dtypes.finfo(dtype).eps


@pytest.mark.parametrize("mode", list(Mode))
def test_rounding_can_be_switched_off(mode: Mode, dtype: Any):
    """fp16 tensors with fp64 everywhere inside: equal to passing them as fp64 from the start."""
    inputs = random_inputs(SMALL, [60], mode, dtype=dtype, rng=np.random.default_rng(0))
    off = qsa_attention(inputs, SMALL, compute=np.float64, rounding=np.float64)
    widened = {name: a.astype(np.float64) if a.dtype == dtype else a for name, a in inputs.items()}
    expected = qsa_attention(widened, SMALL, compute=np.float64)
    assert off.attn_output.dtype == off.present_key_value.dtype == np.float64
    assert (off.attn_output == expected.attn_output).all()
    assert (off.present_key_value == expected.present_key_value).all()
    assert (off.attn_output != h(off.attn_output, dtype)).any()


def test_fp32_tensors_can_be_rounded_to_a_surface(inputs: dict, dtype: Any):
    """`rounding` rounds the surface inputs on entry, never the rope table."""
    widened = {name: a.astype(np.float32) if a.dtype == dtype else a for name, a in inputs.items()}
    result = qsa_attention(widened, SMALL, rounding=dtype)
    expected = qsa_attention(inputs, SMALL)
    assert result.attn_output.dtype == dtype
    assert (result.attn_output == expected.attn_output).all()
    assert (result.present_key_value == expected.present_key_value).all()
