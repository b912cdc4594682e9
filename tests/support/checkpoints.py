"""Random `qwen4_exp` checkpoints as Hugging Face writes them. Needs the `oracle` extra; torch is imported when used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hf import stable_topk

Array = NDArray[Any]


def causal_lm(*, seed: int = 4, **sizes: Any) -> Any:
    """A `Qwen4ExpForCausalLM` of `tools.hf_export.text_config(**sizes)`, norm weights random too."""
    from tools import hf_export

    return hf_export.causal_lm(hf_export.text_config(**{"hidden_size": 32, "layers": 2} | sizes), seed=seed).lm


def save(lm: Any, folder: Path, *, shard: str = "200KB") -> Path:
    """Write a checkpoint folder, in shards of this size at most, without a progress bar."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    lm.save_pretrained(folder, max_shard_size=shard)
    return folder


def config_file(folder: Path, **changes: Any) -> Path:
    """The config.json of the tiny model with changes."""
    from tools import hf_export

    config = hf_export.text_config(hidden_size=32, layers=2).to_dict() | changes
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def logits(lm: Any, ids: Array, lengths: Sequence[int]) -> Array:
    """What the model makes of right-padded prompts, [B, S, vocab]."""
    import torch

    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    with torch.no_grad(), stable_topk():
        result = lm(input_ids=torch.from_numpy(ids), attention_mask=mask.long(), use_cache=False).logits
    return np.asarray(result.float().numpy())


def rope(lm: Any, positions: int) -> NDArray[np.float32]:
    """The rope table [1, positions, rotary] out of the cosines and sines of the model's own code."""
    import torch

    module = lm.model.rotary_emb
    cos, sin = module(torch.zeros(1), torch.arange(positions).expand(3, 1, -1))  # each [1, positions, rotary]
    half = cos.shape[-1] // 2
    return np.asarray(torch.cat([cos[..., :half], sin[..., :half]], dim=-1).numpy())
