"""Reads what a Hugging Face `config.json` of a `qwen4_exp` model says about its attention layers."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsa_plugin.errors import InputError

Config = Mapping[str, Any]
#: Keys of the config by node attribute.
KEYS = {
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "indexer_n_heads": "indexer_n_heads",
    "indexer_head_dim": "indexer_head_dim",
    "indexer_budget": "indexer_budget",
    "indexer_compress_ratio": "indexer_compress_ratio",
    "rms_norm_eps": "rms_norm_eps",
    "attention_scale": "head_dim",
    "rotary_dims": "head_dim",
}
_ROPE = ("rope_parameters", "rope_scaling")  # sections
#: What a model's config has at least one of.
_KNOWN = {"model_type", "max_position_embeddings", "rope_theta", "partial_rotary_factor", *_ROPE, *KEYS.values()}


def load_config(config: str | os.PathLike[str] | Config | None) -> Config:
    """The text part of a config; empty when none is given.

    Raises:
        InputError: the file is missing, no JSON object or no model's config, or a section of it is no object.
    """
    if config is None:
        return {}
    path = None
    if not isinstance(config, Mapping):
        path = Path(config)
        config = _read_json(path)
    text = _section(config, "text_config") or config
    if path is not None and not _KNOWN & text.keys():
        raise InputError("--config", f"{path} (nothing about a model)", "a config.json", "give the model's config.json")
    for name in _ROPE:
        _section(text, name)
    return text


def _section(config: Config, name: str) -> Config | None:
    section = config.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise InputError(f"config {name}", section, "a JSON object", "correct the config, or give the right file")
    return section


def _read_json(path: Path) -> Config:
    fix = "give the model's config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("--config", path, f"a readable file ({error.strerror})", fix) from error
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise InputError("--config", path, "a JSON file", fix) from error
    if not isinstance(content, Mapping):
        raise InputError("--config", path, "a JSON object", fix)
    return content


def config_value(config: Config, attribute: str) -> float | None:
    """What the config says about a node attribute or the rotary dims; None where it says nothing.

    Raises:
        InputError: the value is not a number.
    """
    value = _number(config, KEYS[attribute])
    if value is None or attribute not in ("attention_scale", "rotary_dims"):
        return value
    if attribute == "attention_scale":
        return 1 / math.sqrt(value)
    rope = config.get(_ROPE[0]) or config.get(_ROPE[1]) or {}
    factor = _number({**config, **rope}, "partial_rotary_factor")
    return int(value * (1.0 if factor is None else factor))


def _number(config: Config, key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise InputError(f"config {key}", value, "a positive number", "correct the config, or give the right file")
    return value
