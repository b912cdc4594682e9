"""The rope table and the inverse frequencies of a config."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from qsa_plugin.errors import InputError
from qsa_trt.rope import default_inv_freq, rope_from_config, rope_table
from tests.support.requirements import needs_oracle

REAL_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def test_table_layout_and_values():
    inv_freq = default_inv_freq(8, 100.0)
    table = rope_table(6, inv_freq)
    assert table.shape == (1, 6, 8) and table.dtype == np.float32
    assert (table[0, 0] == [1, 1, 1, 1, 0, 0, 0, 0]).all()
    angles = 5 * 100.0 ** -np.array([0, 0.25, 0.5, 0.75])
    np.testing.assert_allclose(table[0, 5], np.concatenate([np.cos(angles), np.sin(angles)]), rtol=0, atol=2e-7)


def test_angles_are_fp32_products():
    """At position 999,999 the fp32 product is off the real one by far more than the table's precision."""
    inv_freq = default_inv_freq(64, 1e7)
    angle = np.float32(999_999) * inv_freq[1]
    assert rope_table(1_000_000, inv_freq[:2])[0, -1, 1] == np.float32(np.cos(np.float64(angle)))
    assert abs(np.cos(np.float64(angle)) - np.cos(999_999 * np.float64(inv_freq[1]))) > 1e-3


def test_attention_scaling_multiplies_both_halves():
    inv_freq = default_inv_freq(4, 10.0)
    assert (rope_table(3, inv_freq, attention_scaling=2.0) == 2 * rope_table(3, inv_freq)).all()


def test_config_of_the_real_model():
    config = {"text_config": {"head_dim": 256, "rope_parameters": REAL_ROPE}, "head_dim": 1}
    assert (rope_from_config(config) == default_inv_freq(64, 1e7)).all()
    assert (rope_from_config(config["text_config"]) == default_inv_freq(64, 1e7)).all()


def test_older_spellings():
    expected = default_inv_freq(16, 5e5)
    flat: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "rope_theta": 5e5}
    assert (rope_from_config(flat | {"partial_rotary_factor": 0.25}) == expected).all()
    assert (rope_from_config(flat | {"partial_rotary_factor": 0.25, "rope_scaling": None}) == expected).all()
    linear = flat | {"head_dim": 16, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert (rope_from_config(linear) == expected / np.float32(4)).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn", "llama3", "proportional", "new-one"])
def test_other_rope_types_are_refused(kind: str):
    with pytest.raises(InputError, match=f"config rope_type: got {kind}; expected default or linear; leave the rope"):
        rope_from_config({"head_dim": 64, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {}}, "config rope_theta: got None; expected a positive number"),
        ({"rope_parameters": {"rope_theta": -1}}, "config rope_theta: got -1; expected a positive number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "config rope_theta: got 1e4; expected a positive number"),
        ({"head_dim": None}, "config hidden_size: got None; expected a positive number"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.07}},
            "config partial_rotary_factor: got 0.07; expected an even number of rotary dims of 100; correct the config",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "half"}},
            "config partial_rotary_factor: got half; expected a positive number",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}},
            "config partial_rotary_factor: got 2.0; expected an even number of rotary dims of 100; correct the config",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}},
            "config factor: got None; expected a positive number",
        ),
    ],
)
def test_impossible_configs(change: dict[str, Any], message: str):
    with pytest.raises(InputError) as error:
        rope_from_config({"head_dim": 100, "rope_parameters": {"rope_theta": 1e4}} | change)
    assert str(error.value).startswith(message)


@pytest.mark.oracle
class TestAgainstHuggingFace:
    pytestmark = needs_oracle

    @pytest.mark.parametrize(
        "rope",
        [REAL_ROPE, {"rope_type": "linear", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 8.0}],
        ids=["default", "linear"],
    )
    def test_table_equals_the_rotary_module(self, rope: dict[str, Any]):
        """Inverse frequencies and angles are the same fp32 numbers; each side rounds cos and sin within 1 ulp."""
        import torch
        from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRotaryEmbedding

        positions = 100_000
        config = Qwen4ExpTextConfig(head_dim=256, max_position_embeddings=positions, rope_parameters=dict(rope))
        rotary = Qwen4ExpTextRotaryEmbedding(config)
        inv_freq = rope_from_config(json.loads(config.to_json_string()))
        np.testing.assert_array_max_ulp(inv_freq, rotary.inv_freq.numpy(), maxulp=1)
        cos, sin = rotary(torch.zeros(1), torch.arange(positions).expand(3, 1, positions))
        half = inv_freq.size
        table = rope_table(positions, rotary.inv_freq.numpy())[0]
        np.testing.assert_array_max_ulp(table[:, :half], cos[0, :, :half].numpy(), maxulp=1)
        np.testing.assert_array_max_ulp(table[:, half:], sin[0, :, :half].numpy(), maxulp=1)
        assert (cos[0, :, :half] == cos[0, :, half:]).all(), "pairs (i, i + rotary/2) share an angle"
