"""Hugging Face's `qwen4_exp` attention as a test oracle: torch on any device, CPU by default.

Needs the `oracle` extra; torch and transformers are imported when an oracle is made. Their versions spell arguments
differently (`cache`, formerly `past_key_values`), so arguments are bound by signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry
from qsa_trt.rope import rope_table

from .cases import default_rotary

Array = NDArray[Any]
_ATTENTION = "qsa_oracle"
_CACHE_NAMES = ("cache", "past_key_values")


@dataclass(frozen=True)
class HfRows:
    """What the module computed for the rows of one call.

    Attributes:
        attn_output: `[B, S, Hq, D]`, before the output gate and the output projection.
        selected: bool `[B, S, kv]`, the tokens each row attends to. Padding rows hold what the module makes of them.
    """

    attn_output: Array
    selected: NDArray[np.bool_]

    def index_lists(self, width: int) -> NDArray[np.int32]:
        """`selected` as index lists int32 `[B, S, width]`, ascending, -1 to the right."""
        lists = np.full((*self.selected.shape[:-1], width), -1, np.int32)
        for row in np.ndindex(self.selected.shape[:-1]):
            tokens = np.flatnonzero(self.selected[row])
            lists[(*row, slice(tokens.size))] = tokens
        return lists


class HfAttention:
    """One attention layer with random weights and random norm weights.

    Args:
        geometry: head counts and sizes, budget, ratio, scale and epsilon.
        hidden_size: width of the hidden states; small keeps the projections cheap, and they are not under test.
        rotary_dims: default `cases.default_rotary(geometry)`.
        theta: rope base.
        max_positions: rows of the rope table that `contract_inputs` gives.
        seed: of the weights; the same on every machine.
        dtype: "float32", "float16" or "bfloat16".
        device: torch device.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        hidden_size: int = 32,
        rotary_dims: int | None = None,
        theta: float = 1e4,
        max_positions: int = 4096,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        import torch
        from transformers.models.qwen4_exp import modeling_qwen4_exp as hf
        from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

        rotary_dims = default_rotary(geometry) if rotary_dims is None else rotary_dims
        self.geometry = geometry
        self.max_positions = max_positions
        self.torch_dtype, self.device = getattr(torch, dtype), device
        self.numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        self.config = Qwen4ExpTextConfig(
            hidden_size=hidden_size,
            num_hidden_layers=1,
            layer_types=["full_attention"],  # every version turns this into its own word for QSA layers
            num_attention_heads=geometry.num_q_heads,
            num_key_value_heads=geometry.num_kv_heads,
            head_dim=geometry.head_size,
            max_position_embeddings=max_positions,
            rms_norm_eps=geometry.rms_norm_eps,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": rotary_dims / geometry.head_size,
            },
            indexer_n_heads=geometry.indexer_n_heads,
            indexer_kv_heads=1,
            indexer_head_dim=geometry.indexer_head_dim,
            indexer_budget=geometry.indexer_budget,
            indexer_compress_ratio=geometry.indexer_compress_ratio,
        )
        self.config._attn_implementation = _ATTENTION
        hf.ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _capturing_sdpa)
        self.rotary = hf.Qwen4ExpTextRotaryEmbedding(self.config).to(device)
        self.module = hf.Qwen4ExpTextAttention(self.config, layer_idx=0).eval()
        self.module.scaling = geometry.scale
        self.module.indexer.register_forward_hook(_capture_output)
        rng = np.random.default_rng(seed)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                scale = 0.25 if "norm" in name else hidden_size**-0.5
                parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape, np.float32) * scale))
        self.module.to(device, self.torch_dtype)

    def random_hidden(self, batch: int, seq_len: int, *, seed: int = 1) -> Array:
        """Hidden states `[batch, seq_len, hidden_size]` in the layer's dtype."""
        rng = np.random.default_rng(seed)
        return rng.standard_normal((batch, seq_len, self.config.hidden_size), np.float32).astype(self.numpy_dtype)

    def contract_inputs(self, hidden: Array) -> dict[str, Array]:
        """The inputs of QsaAttention that the layer determines: `qkv`, `index_qk`, the rope table and four gammas.

        The module's query projection holds each head's query and its output gate side by side; the main norms add
        1 to their weight, which the contract wants folded in.
        """
        import torch

        module, states = self.module, self._tensor(hidden)
        batch, seq_len, _ = hidden.shape
        with torch.no_grad():
            query_and_gate = module.q_proj(states).view(batch, seq_len, self.geometry.num_q_heads, 2, -1)
            qkv = [query_and_gate[:, :, :, 0].flatten(2), module.k_proj(states), module.v_proj(states)]
            return {
                "qkv": self._array(torch.cat(qkv, dim=-1)),
                "index_qk": self._array(module.indexer.index_qk_proj(states)),
                "rope_rotary_cos_sin": rope_table(self.max_positions, self.rotary.inv_freq.cpu().numpy()),
                "q_norm_gamma": self._array((1 + module.q_norm.weight.float()).to(self.torch_dtype)),
                "k_norm_gamma": self._array((1 + module.k_norm.weight.float()).to(self.torch_dtype)),
                "indexer_q_norm_gamma": self._array(module.indexer.q_layernorm.weight),
                "indexer_k_norm_gamma": self._array(module.indexer.k_layernorm.weight),
            }

    def new_cache(self) -> Any:
        """An empty cache for `run`."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def run(self, hidden: Array, *, lengths: Sequence[int] | None = None, cache: Any = None) -> HfRows:
        """Run the layer on new tokens, causal, after those that `cache` holds.

        Args:
            hidden: `[B, S, hidden_size]`.
            lengths: live lengths of a right-padded batch; not with a cache.
            cache: from `new_cache`, extended by this call.
        """
        import torch

        batch, seq_len, _ = hidden.shape
        total = seq_len + (cache.get_seq_length() if cache is not None else 0)
        positions = torch.arange(total, device=self.device)
        live = torch.tensor([total] * batch if lengths is None else list(lengths), device=self.device)
        causal = positions[-seq_len:, None] >= positions  # [S, kv]
        mask = causal & (positions < live[:, None, None, None])  # [B, 1, S, kv]
        states = self._tensor(hidden)
        parameters = inspect.signature(self.module.forward).parameters
        cache_name = next(name for name in _CACHE_NAMES if name in parameters)
        with torch.no_grad(), stable_topk():
            self.module(
                hidden_states=states,
                position_embeddings=self.rotary(states, positions.expand(3, batch, total)),
                attention_mask=mask,
                **{cache_name: cache},
            )
        selected = self.module.indexer.captured[:, 0] & mask[:, 0]
        return HfRows(self._array(self.module.captured), selected.cpu().numpy())

    def _tensor(self, array: Array) -> Any:
        import torch

        return torch.from_numpy(array.astype(np.float32)).to(self.device, self.torch_dtype)

    def _array(self, tensor: Any) -> Array:
        return np.asarray(tensor.detach().float().cpu().numpy().astype(self.numpy_dtype))


def _capturing_sdpa(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """SDPA that leaves its output, which is before the gate, on the module."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module.captured, weights = sdpa_attention_forward(module, *args, **kwargs)
    return module.captured, weights


def _capture_output(module: Any, inputs: Any, output: Any) -> None:
    module.captured = output


@contextmanager
def stable_topk() -> Iterator[None]:
    """Make `Tensor.topk` take the lower index of equal values, as the contract does; torch leaves it open."""
    import torch

    original = torch.Tensor.topk

    def topk(self: Any, k: int, dim: int = -1) -> Any:
        ranked = torch.sort(self, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((ranked.values.narrow(dim, 0, k), ranked.indices.narrow(dim, 0, k)))

    torch.Tensor.topk = topk  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]
