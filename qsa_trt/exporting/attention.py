"""Makes Hugging Face's attention module trace as one `QsaAttention` node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp

from qsa_plugin.contract import (
    INPUTS,
    ONNX_DOMAIN,
    ONNX_OPSET,
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    Geometry,
)

hf: Any = modeling_qwen4_exp


@dataclass
class PagedCall:
    """What the nodes of one model share, and the pools that they leave behind.

    A decoder layer hands this on to its attention in place of the cosines and sines.

    Attributes:
        geometry: the attributes of every node.
        pools: `past_key_value` of every attention, in order, each [2, N, 128, Hkv, D+Id].
        shared: `context_lengths`, `rope_rotary_cos_sin`, `kvcache_start_index` and `kv_page_table` by name.
        present: `present_key_value` of the attentions that ran.
    """

    geometry: Geometry
    pools: list[Tensor]
    shared: dict[str, Tensor]
    present: list[Tensor] = field(default_factory=list)


def paged_attention(
    module: Any, hidden_states: Tensor, position_embeddings: PagedCall, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """`Qwen4ExpTextAttention.forward` with a node in place of everything between projections and output gate.

    Args:
        module: the `Qwen4ExpTextAttention` whose weights are used.
        hidden_states: [B, S, hidden].
        position_embeddings: what the nodes share.

    Returns:
        [B, S, hidden], and None where the module gives attention weights.
    """
    call, indexer = position_embeddings, module.indexer
    batch, seq_len, _hidden = hidden_states.shape
    heads = module.q_proj(hidden_states).view(batch, seq_len, -1, 2 * module.head_dim)
    query, gate = heads.chunk(2, dim=-1)  # each [B, S, Hq, D]
    packed = [query.reshape(batch, seq_len, -1), module.k_proj(hidden_states), module.v_proj(hidden_states)]
    pool = call.pools[len(call.present)]
    tensors = {
        "qkv": torch.cat(packed, dim=-1),
        "index_qk": indexer.index_qk_proj(hidden_states),
        "past_key_value": pool,
        **call.shared,
        "q_norm_gamma": _folded(module.q_norm.weight),
        "k_norm_gamma": _folded(module.k_norm.weight),
        "indexer_q_norm_gamma": indexer.q_layernorm.weight,
        "indexer_k_norm_gamma": indexer.k_layernorm.weight,
    }
    output, present = torch.onnx.ops.symbolic_multi_out(
        f"{ONNX_DOMAIN}::{PLUGIN_NAME}",
        [tensors[t.name] for t in INPUTS],
        {
            **call.geometry.to_attributes(),
            "plugin_namespace": PLUGIN_NAMESPACE,  # TensorRT looks for a plugin only where this attribute stands
            "plugin_version": PLUGIN_VERSION,
        },
        dtypes=(query.dtype, pool.dtype),
        shapes=(query.shape, pool.shape),
        version=ONNX_OPSET,
    )
    call.present.append(present)
    return module.o_proj((output * torch.sigmoid(gate)).flatten(2)), None


def _folded(weight: Tensor) -> Tensor:
    """1 + w, rounded once."""
    return (1.0 + weight.float()).to(weight.dtype)


@contextmanager
def qsa_nodes() -> Iterator[None]:
    """Every `Qwen4ExpTextAttention` runs `paged_attention` inside this context; classes and scopes keep their names."""
    with patch.object(hf.Qwen4ExpTextAttention, "forward", paged_attention):
        yield
