"""The rope table of the contract, computed in fp32 as Hugging Face's rotary module does, for text positions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.errors import InputError

Float32 = NDArray[np.float32]


def default_inv_freq(rotary_dims: int, theta: float) -> Float32:
    """Inverse frequencies theta ** (-2i / rotary_dims), fp32 `[rotary_dims / 2]`, of the default rope type."""
    exponents = np.arange(0, rotary_dims, 2, dtype=np.float32) / np.float32(rotary_dims)
    powers = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)  # rounded once, unlike NumPy's fp32
    return np.asarray(np.float32(1) / powers, np.float32)


def rope_table(max_positions: int, inv_freq: NDArray[Any], *, attention_scaling: float = 1.0) -> Float32:
    """Input `rope_rotary_cos_sin`: fp32 `[1, max_positions, 2 * len(inv_freq)]`, cosines first, then sines.

    `attention_scaling` multiplies both, as Hugging Face's rotary module does for the rope types that have one.

    The angle is position * inv_freq in fp32, as the model was trained with; its cosine and sine are rounded once from
    fp64, so that the table has the same bytes on every machine.
    """
    positions = np.arange(max_positions, dtype=np.float32)[:, None]
    angles = positions * np.asarray(inv_freq, np.float32)  # [max_positions, rotary/2]
    table = np.empty((1, max_positions, 2 * angles.shape[1]), np.float32)
    table[0, :, : angles.shape[1]] = np.cos(angles, dtype=np.float64)
    table[0, :, angles.shape[1] :] = np.sin(angles, dtype=np.float64)
    return table * np.float32(attention_scaling)


def rope_from_config(config: Mapping[str, Any]) -> Float32:
    """Inverse frequencies that a Hugging Face `config.json` of a Qwen model asks for.

    Reads `text_config` where there is one, then `rope_parameters` (or the older `rope_scaling` with top-level
    `rope_theta` and `partial_rotary_factor`). `mrope_section` and `mrope_interleaved` are allowed: for text all three
    position streams are equal.

    Raises:
        InputError: a rope type other than `default` and `linear`, or a value that is missing or impossible.
    """
    text = config.get("text_config") or config
    rope = {
        **{name: text[name] for name in ("rope_theta", "partial_rotary_factor") if text.get(name)},
        **(text.get("rope_scaling") or {}),
        **(text.get("rope_parameters") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise InputError(
            "config rope_type",
            kind,
            "default or linear",
            "leave the rope table a graph input and bind one made by the model's own code",
        )
    theta, head_dim = _positive(rope, "rope_theta"), _head_dim(text)
    factor = _positive({"partial_rotary_factor": 1.0, **rope}, "partial_rotary_factor")
    rotary_dims = int(head_dim * factor)
    if rotary_dims % 2 or not 2 <= rotary_dims <= head_dim:
        raise InputError(
            "config partial_rotary_factor", factor, f"an even number of rotary dims of {head_dim}", "correct the config"
        )
    inv_freq = default_inv_freq(rotary_dims, theta)
    return inv_freq / np.float32(_positive(rope, "factor")) if kind == "linear" else inv_freq


def _head_dim(text: Mapping[str, Any]) -> int:
    if text.get("head_dim"):
        return int(_positive(text, "head_dim"))
    return int(_positive(text, "hidden_size")) // int(_positive(text, "num_attention_heads"))


def _positive(mapping: Mapping[str, Any], name: str) -> float:
    value = mapping.get(name)
    if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise InputError(f"config {name}", value, "a positive number", "correct the config, or give the right file")
    return float(value)
