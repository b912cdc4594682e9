"""The vectorised indexer against Hugging Face's own loops, which stay the definition."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hf import stable_topk
from tests.support.requirements import needs_oracle

pytestmark = needs_oracle

#: Name to `text_config` arguments: the budget is small, so that short contexts pass it.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "lm": {"hidden_size": 32},
    "no-groups": {"heads": 4, "kv_heads": 4, "head_dim": 32, "rotary_dims": 8, "indexer_heads": 1, "budget": 16},
    "ratio-2": {"heads": 4, "kv_heads": 1, "indexer_heads": 3, "indexer_head_dim": 32, "budget": 10, "ratio": 2},
    "one-block": {"heads": 2, "kv_heads": 1, "indexer_heads": 4, "budget": 8, "ratio": 8},
}
LENGTHS = ([1], [2, 3], [7, 8], [64, 67, 68], [90, 1, 71])


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_same_output_as_the_loops(name: str, attn: Any) -> None:
    """0.0, not a bound: an equal selection mask makes everything after it the same computation."""
    import torch

    from qsa_trt.exporting.vectorised_indexer import vectorised_indexer
    from tools import hf_export

    config = hf_export.text_config(attn=attn, **GEOMETRIES[name])
    layer = hf_export.attention_layer(config, seed=5)
    for lengths in LENGTHS:
        inputs = hf_export.layer_inputs(config, lengths, seed=sum(lengths))
        with torch.no_grad(), stable_topk():
            expected = layer(**inputs)
            with vectorised_indexer():
                actual = layer(**inputs)
        assert (actual - expected).abs().max().item() == 0.0, lengths


@pytest.mark.parametrize("name", GEOMETRIES)
def test_selection_drops_blocks_beyond_the_budget(name: str) -> None:
    """Guards the test above: at its longest length every geometry's last query sees more than it may select."""
    import torch

    from qsa_trt.exporting.vectorised_indexer import select_tokens
    from tools import hf_export

    config = hf_export.text_config(**GEOMETRIES[name])
    layer = hf_export.attention_layer(config, seed=5)
    inputs = hf_export.layer_inputs(config, [90])
    with torch.no_grad():
        mask = select_tokens(
            layer.self_attn.indexer,
            inputs["hidden_states"],
            (inputs["cos"], inputs["sin"]),
            inputs["attention_mask"],
        )
    budget, ratio = config.indexer_budget, config.indexer_compress_ratio
    assert budget is not None and ratio is not None
    assert mask[0, 0, -1].sum().item() == budget + 90 % ratio < 90


def test_same_output_as_the_loops_with_a_cache() -> None:
    """Prefill of 60 tokens, then 20 steps across the budget of 64."""
    import torch
    from transformers import DynamicCache

    from qsa_trt.exporting.vectorised_indexer import vectorised_indexer
    from tools import hf_export

    config = hf_export.text_config(hidden_size=32)
    layer = hf_export.attention_layer(config, seed=5).self_attn
    inputs = hf_export.layer_inputs(config, [80])
    hidden, mask = inputs["hidden_states"], inputs["attention_mask"]

    def run() -> list[torch.Tensor]:
        cache, outputs = DynamicCache(config=config), []
        for start, end in [(0, 60), *((t, t + 1) for t in range(60, 80))]:
            rope = (inputs["cos"][:, :end], inputs["sin"][:, :end])
            outputs.append(layer(hidden[:, start:end], rope, mask[:, :, start:end, :end], cache)[0])
        return outputs

    with torch.no_grad(), stable_topk():
        expected = run()
        with vectorised_indexer():
            actual = run()
    assert len(actual) == 21
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max().item() == 0.0
