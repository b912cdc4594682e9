"""Builds small random Hugging Face `qwen4_exp` modules and exports them to ONNX.

Needs the `oracle` extra (torch, transformers). `make_models.py` writes the files in `models/` with it, and tests make
further variants: other geometries, opsets, exporters and attention forms.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen4ExpForCausalLM,
    Qwen4ExpTextConfig,
)
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from qsa_trt.exporting.trace import strip_metadata
from qsa_trt.exporting.vectorised_indexer import vectorised_indexer
from qsa_trt.exporting.weights import uniform_bound

Exporter = Literal["dynamo", "torchscript"]
Attn = Literal["eager", "sdpa"]
M = TypeVar("M", bound=nn.Module)


def text_config(
    *,
    hidden_size: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    rotary_dims: int = 32,
    rope_theta: float = 1e7,
    indexer_heads: int = 2,
    indexer_head_dim: int = 64,
    budget: int = 64,
    ratio: int = 4,
    layers: int = 1,
    max_positions: int = 32768,
    attn: Attn = "sdpa",
) -> Qwen4ExpTextConfig:
    """A configuration whose layers all use QSA, with a tiny vocabulary and a mixture of experts that uses all of them.

    Args:
        budget: tokens selected a query in complete blocks.
        ratio: tokens a block.
        attn: `eager` takes a float mask, `sdpa` a bool mask.
    """
    pairs = rotary_dims // 2
    config = Qwen4ExpTextConfig(
        vocab_size=128,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        layer_types=["indexed_attention"] * layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rope_theta,
            "partial_rotary_factor": rotary_dims / head_dim,
            "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
        },
        indexer_n_heads=indexer_heads,
        indexer_kv_heads=1,
        indexer_head_dim=indexer_head_dim,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        # Both experts always run, so that no rounding can switch an expert.
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        hc_count=2,
        hc_lowrank=16,
    )
    config._attn_implementation = attn
    return config


def randomise(module: nn.Module, seed: int) -> None:
    """Fill all parameters, the same on every machine: weights keep a signal's variance, norm gammas are far from 0."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            bound = uniform_bound(name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, parameter.shape)))


class AttentionLayer(nn.Module):
    """One attention module; cos, sin and the mask are inputs."""

    def __init__(self, config: Qwen4ExpTextConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn = hf.Qwen4ExpTextAttention(config, layer_idx=0)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, S, hidden], twice [B, S, rotary] and [B, 1, S, S] to [B, S, hidden]."""
        output: Tensor = self.self_attn(hidden_states, (cos, sin), attention_mask)[0]
        return output


class CausalLM(nn.Module):
    """A language model without its cache: token ids to logits."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.config = lm.config
        self.lm = lm

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, S] and int64 [B, S] (1 = token, 0 = padding on the right) to [B, S, vocab]."""
        logits: Tensor = self.lm(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


def attention_layer(config: Qwen4ExpTextConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> AttentionLayer:
    """One random attention layer of Hugging Face's own code."""
    return _finish(AttentionLayer(config), seed, dtype)


def causal_lm(config: Qwen4ExpTextConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A random QSA language model of Hugging Face's own code."""
    lm = Qwen4ExpForCausalLM(config)
    lm.set_experts_implementation("batched_mm")  # the default loops over the experts that data choose
    return _finish(CausalLM(lm), seed, dtype)


def _finish(module: M, seed: int, dtype: torch.dtype) -> M:
    randomise(module, seed)
    return module.to(dtype).eval()


def real_layer_fp16() -> AttentionLayer:
    """The model of `models/real_layer_fp16.onnx`: the head geometry of Qwen3.8-Flash-Next on a small hidden size."""
    config = text_config(
        heads=24, kv_heads=2, head_dim=256, rotary_dims=64, indexer_heads=4, indexer_head_dim=128, budget=2048
    )
    return attention_layer(config, seed=1, dtype=torch.float16)


def qsa_lm() -> CausalLM:
    """The model of `models/qsa_lm.onnx`: two layers, both QSA, of a geometry that the CUDA kernels run."""
    return causal_lm(text_config(hidden_size=32, layers=2), seed=2)


def plain_qwen3() -> CausalLM:
    """The model of `models/plain_qwen3.onnx`: one dense-attention layer, no QSA to be found."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    return _finish(CausalLM(Qwen3ForCausalLM(config)), seed=3, dtype=torch.float32)


def layer_inputs(
    config: Qwen4ExpTextConfig, lengths: Sequence[int], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random inputs of an `AttentionLayer`: a batch of right-padded sequences of these lengths."""
    batch, seq_len = len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(batch, seq_len, config.hidden_size, generator=generator).to(dtype)
    positions = torch.arange(seq_len).expand(batch, -1)
    cos, sin = hf.Qwen4ExpTextRotaryEmbedding(config)(hidden_states, positions[None])
    visible = (
        torch.ones(seq_len, seq_len, dtype=torch.bool).tril() & (positions < torch.tensor(lengths)[:, None])[:, None]
    )
    mask = visible[:, None]  # [B, 1, S, S]
    if config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return {"hidden_states": hidden_states, "cos": cos, "sin": sin, "attention_mask": mask}


def lm_inputs(config: PreTrainedConfig, lengths: Sequence[int], *, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of a `CausalLM`: a batch of right-padded sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    attention_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def export_layer(layer: AttentionLayer, *, opset: int = 20, exporter: Exporter = "dynamo") -> onnx.ModelProto:
    """Export an attention layer with dynamic batch and sequence; `text_config(attn=...)` chose the mask's type."""
    example = layer_inputs(layer.config, [13, 10], dtype=layer.self_attn.o_proj.weight.dtype)
    axes = {name: {0: "batch", 1: "seq"} for name in ("hidden_states", "cos", "sin")}
    axes["attention_mask"] = {0: "batch", 2: "seq", 3: "seq"}
    return export(layer, example, axes, "out", opset=opset, exporter=exporter)


def export_lm(lm: CausalLM, *, opset: int = 20, exporter: Exporter = "dynamo") -> onnx.ModelProto:
    """Export a language model's prefill with dynamic batch and sequence."""
    axes = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "attention_mask")}
    return export(lm, lm_inputs(lm.config, [13, 10]), axes, "logits", opset=opset, exporter=exporter)


def export(
    module: nn.Module,
    example: dict[str, Tensor],
    axes: dict[str, dict[int, str]],
    output: str,
    *,
    opset: int,
    exporter: Exporter,
) -> onnx.ModelProto:
    """Export with the vectorised indexer, then remove what tells of the machine.

    Args:
        example: the traced inputs by name, in the order of the module's arguments.
        axes: the names of the dynamic axes of each input.
        output: the name of the output.
    """
    buffer = io.BytesIO()
    options: dict[str, Any] = {"f": buffer, "opset_version": opset, "dynamo": exporter == "dynamo"}
    options |= {"input_names": list(example), "output_names": [output]}
    if exporter == "dynamo":
        options |= {"dynamic_shapes": axes, "external_data": False, "verbose": False}
    else:
        options |= {"dynamic_axes": axes}
    with vectorised_indexer(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn of their own internals; tests compare the outputs
        torch.onnx.export(module, tuple(example.values()), **options)
    model = onnx.load_from_string(buffer.getvalue())
    strip_metadata(model)
    return model
