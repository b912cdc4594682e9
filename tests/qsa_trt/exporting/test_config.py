"""What a config.json says: spellings, layers, rope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import InputError, RefusedError
from qsa_trt.exporting.config import (
    check_layers,
    geometry,
    hugging_face_config,
    load_source,
    parse_layers,
    rotary_embedding,
)
from qsa_trt.rope import rope_table
from tests.support import checkpoints
from tests.support.requirements import needs_oracle

#: The rotary module's own cosines against the table's: its fp32 cosine is off by one rounding, its angle by none.
COSINE_BOUND = 2e-7


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [(None, 4, range(4)), ("2", 4, range(2, 3)), ("0-3", 4, range(4)), ("1-1", 4, range(1, 2))],
)
def test_layers(text: str | None, count: int, expected: range) -> None:
    assert parse_layers(text, count) == expected


@pytest.mark.parametrize("text", ["", "-1", "4", "2-4", "3-2", "a", "1-", "1,2", "1-2-3", " 1"])
def test_impossible_layers(text: str) -> None:
    with pytest.raises(InputError, match="--layers"):
        parse_layers(text, 4)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "No such file"),
        ("[]", "JSON object"),
        ("{", "JSON file"),
        ("\xff", "JSON file"),
        ("{}", "model_type"),
        ('{"model_type": "qwen3"}', "qwen3"),
        ('{"model_type": "qwen4_exp", "text_config": 3}', "model_type"),
        ('{"model_type": "qwen4_exp_text", "layer_types": ["mamba"]}', "mamba"),
        ('{"model_type": "qwen4_exp_text", "layer_types": 3}', "layer_types"),
        ('{"model_type": "qwen4_exp_text", "layer_types": "full_attention"}', "layer_types"),
    ],
)
def test_what_is_no_config_of_this_model(tmp_path: Path, content: str | None, what: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=what):
        load_source(tmp_path)


def test_quantised_checkpoints_are_known(tmp_path: Path) -> None:
    text = {"model_type": "qwen4_exp_text", "quantization_config": {"quant_method": "fp8"}}
    for config in (text, {"model_type": "qwen4_exp", "text_config": text}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_source(tmp_path).quantised


class TestWithTransformers:
    pytestmark = needs_oracle

    @staticmethod
    def read(folder: Path, **changes: Any) -> Any:
        return hugging_face_config(load_source(checkpoints.config_file(folder, **changes)))

    @pytest.mark.parametrize("spelling", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
    def test_spellings_of_a_qsa_layer_are_the_same_thing(self, tmp_path: Path, spelling: str) -> None:
        types = ["linear_attention", spelling]
        expected = self.read(tmp_path, layer_types=["linear_attention", "indexed_attention"]).layer_types
        assert self.read(tmp_path, layer_types=types).layer_types == expected

    def test_multimodal_configs_hold_a_text_part(self, tmp_path: Path) -> None:
        alone = self.read(tmp_path)
        text = json.loads((tmp_path / "config.json").read_text())
        whole = {"model_type": "qwen4_exp", "text_config": text, "tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        source = load_source(tmp_path)
        assert source.tied
        assert hugging_face_config(source).to_dict() == alone.to_dict()

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"num_hidden_layers": 3}, "layer_types"),
            ({"indexer_budget": 63}, "indexer_budget"),
            ({"indexer_n_heads": None}, "indexer_n_heads"),
            ({"hidden_size": "big"}, "hidden_size"),
            (dict.fromkeys(("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget"))
             | {"indexer_compress_ratio": None}, "indexer_n_heads"),
        ],
    )  # fmt: skip
    def test_impossible_configs(self, tmp_path: Path, changes: dict[str, Any], what: str) -> None:
        with pytest.raises(InputError, match=what) as error:
            self.read(tmp_path, **changes)
        assert "\n" not in str(error.value)

    def test_a_geometry_that_no_node_can_have(self, tmp_path: Path) -> None:
        config = self.read(tmp_path, indexer_compress_ratio=3, indexer_budget=63)
        with pytest.raises(InputError, match="compress_ratio"):
            geometry(config, PoolIO.IN_PLACE)

    def test_linear_attention_layers_are_refused_and_their_neighbours_named(self, tmp_path: Path) -> None:
        config = self.read(tmp_path, layer_types=["linear_attention", "full_attention"])
        check_layers(config, range(1, 2), only_attention=False)
        for layers in (range(2), range(1)):
            with pytest.raises(RefusedError, match=r"^layer 0: linear attention .* traced length .* one of 1$"):
                check_layers(config, layers, only_attention=False)

    def test_attention_alone_is_of_one_layer(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="--only-attention"):
            check_layers(self.read(tmp_path), range(2), only_attention=True)

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
            {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
            {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 7, 7]},
            {"rope_type": "linear", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0},
            {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0},
        ],
    )
    def test_the_table_is_what_the_module_computes(self, tmp_path: Path, rope: dict[str, Any]) -> None:
        """For text: the three position streams of mrope are equal, whatever their sections."""
        import torch

        rotary = rotary_embedding(self.read(tmp_path, rope_parameters=rope))
        table = rope_table(500, rotary.inv_freq.numpy(), attention_scaling=rotary.attention_scaling)[0]
        half = table.shape[-1] // 2
        assert 2 * half == int(64 * rope["partial_rotary_factor"])
        cos, sin = rotary(torch.zeros(1), torch.arange(500).expand(3, 1, -1))
        for part, expected in ((table[:, :half], cos[0]), (table[:, half:], sin[0])):
            for tile in expected.split(half, dim=-1):
                assert np.abs(part - tile.numpy()).max() <= COSINE_BOUND * rotary.attention_scaling

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_rope_that_depends_on_the_length_is_refused(self, tmp_path: Path, kind: str) -> None:
        config = self.read(tmp_path)
        config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        with pytest.raises(RefusedError, match=kind):
            rotary_embedding(config)

    @pytest.mark.parametrize(
        "rope", [{"rope_type": "spiral"}, {"rope_theta": None}, {"partial_rotary_factor": 0.0}, {"rope_theta": "x"}]
    )
    def test_impossible_rope(self, tmp_path: Path, rope: dict[str, Any]) -> None:
        config = self.read(tmp_path)
        config.rope_parameters = {**config.rope_parameters, **rope}
        with pytest.raises(InputError, match=r"rope|partial_rotary_factor"):
            rotary_embedding(config)
