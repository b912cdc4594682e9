"""The part of a `qwen4_exp` text model that is exported: some of its decoder layers, and what stands at their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp

from qsa_plugin.contract import Geometry

from .attention import PagedCall
from .weights import Shape, Weights

hf: Any = modeling_qwen4_exp


S = TypeVar("S", bound="Stage")


class Parameter(NamedTuple):
    """A parameter that a checkpoint holds."""

    stored: str
    shape: Shape


class Stage(nn.Module):
    """Decoder layers of Hugging Face's code; parameters are called as in `Qwen4ExpForCausalLM`.

    The first layer brings the embedding along, the last one the output projection. A stage without the first layer
    takes hidden states, one without the last gives them: [B, S, hc_count * hidden], the residual streams side by side.

    Args:
        config: a `Qwen4ExpTextConfig`.
        layers: numbers of the layers, without a gap.
        only_attention: export the attention module of one layer alone, [B, S, hidden] to [B, S, hidden].
        tied: the output projection is the embedding.
    """

    def __init__(self, config: Any, layers: range, *, only_attention: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.config, self.only_attention = config, only_attention
        self.takes_ids = layers[0] == 0 and not only_attention
        self.gives_logits = layers[-1] == config.num_hidden_layers - 1 and not only_attention
        self.model = nn.Module()
        if self.takes_ids:
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleDict({str(n): self._layer(n) for n in layers})
        if self.gives_logits:
            self.model.hyper_connection_mixer = hf.Qwen4ExpTextGatedResidual(config, use_combine=False)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied = tied and self.gives_logits
        self.eval()

    @property
    def input_width(self) -> int:
        """Last dim of the hidden states that a stage without embedding takes."""
        streams = 1 if self.only_attention else self.config.hc_count
        return int(streams * self.config.hidden_size)

    def _layer(self, number: int) -> nn.Module:
        if self.only_attention:
            return nn.ModuleDict({"self_attn": hf.Qwen4ExpTextAttention(self.config, number)})
        layer: nn.Module = hf.Qwen4ExpTextDecoderLayer(self.config, number)
        return layer

    def run(self, tokens: Tensor, position_embeddings: Any, attention_mask: Tensor | None) -> Tensor:
        """Ids [B, S] or hidden states to logits or hidden states.

        Args:
            tokens: what the stage takes.
            position_embeddings: cosines and sines, or the `PagedCall` of traced nodes.
            attention_mask: bool [B, 1, S, S], True where a query sees a key; None for nodes.
        """
        hidden = self.model.embed_tokens(tokens).repeat(1, 1, self.config.hc_count) if self.takes_ids else tokens
        for layer in self.model.layers.values():
            if self.only_attention:
                hidden = layer["self_attn"](hidden, position_embeddings, attention_mask, None)[0]
            else:
                hidden = layer(hidden, position_embeddings, attention_mask=attention_mask)
        if self.gives_logits:
            hidden = self.lm_head(self.model.hyper_connection_mixer(hidden))
        return hidden


class PagedStage(Stage):
    """A stage whose attentions are QsaAttention nodes: prefill and decode over paged pools."""

    def __init__(self, geometry: Geometry, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.geometry = geometry

    def forward(
        self,
        tokens: Tensor,
        past_key_values: list[Tensor],
        context_lengths: Tensor,
        rope_rotary_cos_sin: Tensor,
        kvcache_start_index: Tensor,
        kv_page_table: Tensor,
    ) -> list[Tensor]:
        """Tokens [B, S] or [B, S, width], one pool an attention, and the contract's shared inputs; output and pools."""
        shared = {
            "context_lengths": context_lengths,
            "rope_rotary_cos_sin": rope_rotary_cos_sin,
            "kvcache_start_index": kvcache_start_index,
            "kv_page_table": kv_page_table,
        }
        call = PagedCall(self.geometry, past_key_values, shared)
        return [self.run(tokens, call, None), *call.present]


class PlainStage(Stage):
    """A stage in plain operators, without a cache: prefill of right-padded prompts."""

    def __init__(self, rotary: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_emb = rotary

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens [B, S] or [B, S, width] and int64 [B, S] (1 = token, 0 = padding on the right)."""
        seq_len = tokens.shape[1]
        positions = torch.arange(seq_len, device=tokens.device)
        causal = positions[:, None] >= positions  # [S, S]
        visible = causal & attention_mask.bool()[:, None, None]  # [B, 1, S, S]
        like = next(self.parameters())
        rope = self.rotary_emb(like, positions.expand(3, attention_mask.shape[0], -1))  # twice [B, S, rotary]
        return self.run(tokens, rope, visible)


def build(make: Callable[[], S], weights: Weights, dtype: torch.dtype) -> tuple[S, dict[str, Parameter]]:
    """A stage whose matrices are placeholders: they have a shape and one element of memory.

    Vectors (norm weights, biases) are read, since the exporter computes with them; there is little to them.

    Args:
        make: constructs the stage; called where modules take no memory.
        weights: where parameters come from; all of them are checked first.
        dtype: of all parameters.

    Returns:
        The stage, and by their names in it the matrices, which are still to be read.

    Raises:
        QsaError: as `weights.check` and `weights.read`.
    """
    with torch.device("meta"):
        stage = make()
    parameters = {name: Parameter(_stored_name(stage, name), tuple(p.shape)) for name, p in stage.named_parameters()}
    weights.check({parameter.stored: parameter.shape for parameter in parameters.values()})
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        if len(parameter.shape) == 1:
            value = weights.read(parameter.stored, parameter.shape, dtype)
        else:
            value = torch.zeros((), dtype=dtype).expand(parameter.shape)
        setattr(stage.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))
    return stage, {name: parameter for name, parameter in parameters.items() if len(parameter.shape) > 1}


def _stored_name(stage: Stage, name: str) -> str:
    return "model.embed_tokens.weight" if stage.tied and name == "lm_head.weight" else name
