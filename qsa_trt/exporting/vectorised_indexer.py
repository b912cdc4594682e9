"""The QSA indexer without Python loops, so that exporters can trace it.

Hugging Face's indexer loops over the rows of the batch and the queries, and no ONNX exporter follows a loop that
depends on data. This forward computes the same selection mask from the same weights in whole tensors. It takes the
keys that a query may see to be a prefix of the sequence: a causal mask, with or without padding on the right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.qwen4_exp import modeling_qwen4_exp

hf: Any = modeling_qwen4_exp  # its functions have no types

# Notation: B batch, S queries, T keys, R tokens a block, G = ceil(T / R) blocks, Ih indexer heads, Id their size.


def select_tokens(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    """The tokens that each query attends to, as `Qwen4ExpTextQSAIndexer.forward` gives them.

    Args:
        indexer: the `Qwen4ExpTextQSAIndexer` whose weights are used (its type calls every size optional).
        hidden_states: [B, S, hidden].
        position_embeddings: cos and sin of all T positions, each [B, T, rotary].
        attention_mask: [B, 1, S, T], bool (True = visible) or float (0 = visible).
        cache: where earlier indexer keys are kept, or None in prefill.

    Returns:
        bool [B, 1, S, T].
    """
    ratio, head_dim = indexer.compress_ratio, indexer.index_head_dim
    cos, sin = position_embeddings
    queries, raw_keys = indexer.index_qk_proj(hidden_states).split([indexer.index_n_heads * head_dim, head_dim], dim=-1)
    if cache is not None:
        raw_keys = cache.update_indexer(raw_keys, indexer.layer_idx)  # [B, T, Id]

    batch, seq_len, _ = hidden_states.shape  # reshape, not unflatten: TorchScript would freeze the traced sizes
    queries = indexer.q_layernorm(queries.reshape(batch, seq_len, -1, head_dim))  # [B, S, Ih, Id]
    queries = hf.apply_rotary_pos_emb(queries, cos=cos[:, -seq_len:], sin=sin[:, -seq_len:], unsqueeze_dim=2)
    block_cos, block_sin = cos[:, ::ratio], sin[:, ::ratio]  # [B, G, rotary], at each block's first token
    keys = _block_keys(indexer, raw_keys, block_cos.shape[1]).unsqueeze(1)  # [B, 1, G, Id]
    keys = hf.apply_rotary_pos_emb(keys, cos=block_cos, sin=block_sin)

    scores: Tensor = queries.float().transpose(1, 2) @ keys.float().transpose(-1, -2)  # [B, Ih, S, G]
    scores = scores.relu().sum(dim=1) / math.sqrt(head_dim)  # [B, S, G]
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask.eq(0)
    visible = visible.squeeze(1)  # [B, S, T]
    block_ends = torch.arange(1, scores.shape[-1] + 1, device=keys.device) * ratio  # [G]
    incomplete: Tensor = block_ends > visible.sum(dim=-1, keepdim=True)  # [B, S, G]
    chosen = _top_blocks(scores.masked_fill(incomplete, -math.inf), indexer.block_topk)

    # Incomplete blocks hold the causal tail, which every query keeps, and tokens that it cannot see.
    kept: Tensor = (chosen | incomplete).unsqueeze(-1).expand(-1, -1, -1, ratio).flatten(2)[..., : visible.shape[-1]]
    return (kept & visible).unsqueeze(1)


def _block_keys(indexer: Any, raw_keys: Tensor, blocks: int) -> Tensor:
    """The normed mean of each block's raw keys, before RoPE: [B, T, Id] to [B, G, Id]; a last partial block is void."""
    ratio = indexer.compress_ratio
    padded = F.pad(raw_keys, (0, 0, 0, ratio - 1)).narrow(1, 0, blocks * ratio)  # [B, G * R, Id]
    pooled = padded.reshape(padded.shape[0], -1, ratio, indexer.index_head_dim).float().mean(dim=2)
    normed: Tensor = indexer.k_layernorm(pooled.to(raw_keys.dtype))
    return normed


def _top_blocks(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest scores of each row: [B, S, G] to bool [B, S, G]."""
    padded = F.pad(scores, (0, count), value=-math.inf)  # [B, S, G + count]: `count` stays a constant of the graph
    winners = padded.topk(count, dim=-1).indices
    # Ones into floats: TorchScript cannot export a scatter of bools.
    marked = torch.zeros_like(padded).scatter(-1, winners, 1.0)
    return marked[..., : scores.shape[-1]].gt(0)


@contextmanager
def vectorised_indexer() -> Iterator[None]:
    """Every `Qwen4ExpTextQSAIndexer` runs `select_tokens` inside this context; classes and scopes keep their names."""
    with patch.object(hf.Qwen4ExpTextQSAIndexer, "forward", select_tokens):
        yield
