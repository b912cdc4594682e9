"""Reads a `qwen4_exp` config.json: what to export, and what of it can be exported."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qsa_plugin.contract import Geometry, PoolIO
from qsa_plugin.errors import InputError, RefusedError

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
LINEAR = "linear_attention"
#: Spellings of a QSA layer in configs; every version of transformers understands the first one.
QSA_SPELLINGS = ("full_attention", "indexed_attention", "qwen_sparse_attention")
#: Rope types whose frequencies depend on the length of the sequence: neither a table nor a traced graph holds them.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_SOURCE = "CHECKPOINT_OR_CONFIG"
_FIX = "correct config.json, or give the right checkpoint"


@dataclass(frozen=True)
class Source:
    """A config.json and where it lies.

    Attributes:
        path: what the user gave.
        file: the config.json.
        folder: the checkpoint folder; None when a config alone was given.
        text: the text part of the config, QSA layers spelled so that every transformers understands them.
        tied: the output projection is the embedding.
        quantised: the checkpoint's weights are not plain floats.
    """

    path: Path
    file: Path
    folder: Path | None
    text: Mapping[str, Any]
    tied: bool
    quantised: bool


def load_source(path: str | os.PathLike[str]) -> Source:
    """Read the config of a checkpoint folder, or a config file.

    Raises:
        InputError: nothing readable lies there, or it is not a `qwen4_exp` config.
    """
    path = Path(path)
    folder = path if path.is_dir() else None
    file = path if folder is None else folder / "config.json"
    content = _read_json(file)
    text = content.get("text_config") or content
    if content.get("model_type") not in MODEL_TYPES or not isinstance(text, Mapping):
        raise InputError(
            f"{_SOURCE} {path}, model_type",
            content.get("model_type", "nothing"),
            " or ".join(MODEL_TYPES),
            "give a checkpoint of a Qwen model with sparse attention",
        )
    text = {**text, "layer_types": _layer_types(text.get("layer_types"))}
    tied = content.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    quantised = any(part.get("quantization_config") for part in (content, text))
    return Source(path, file, folder, text, bool(tied), quantised)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        expected = f"a checkpoint folder with a config.json, or a config file ({error.strerror})"
        raise InputError(_SOURCE, path, expected, "check the path") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise InputError(_SOURCE, path, "a JSON file", "give a checkpoint folder or its config.json") from error
    if not isinstance(content, Mapping):
        raise InputError(_SOURCE, path, "a JSON object", "give a checkpoint folder or its config.json")
    return content


def _layer_types(names: object) -> list[str] | None:
    if names is None:
        return None
    known = dict.fromkeys(QSA_SPELLINGS, QSA_SPELLINGS[0]) | {LINEAR: LINEAR}
    if not isinstance(names, list) or not all(isinstance(name, str) and name in known for name in names):
        raise InputError("config layer_types", names, f"a list of {', '.join(known)}", _FIX)
    return [known[name] for name in names]


def hugging_face_config(source: Source) -> Any:
    """The `Qwen4ExpTextConfig` of a source, for attention over a bool mask and experts without loops over data.

    Raises:
        InputError: transformers rejects the config, or it has no indexer.
        RefusedError: its rope depends on the length of the sequence.
    """
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    try:
        config: Any = Qwen4ExpTextConfig.from_dict(dict(source.text))
    except Exception as error:  # transformers and huggingface_hub have no common base for these
        reason = " ".join(str(error).split())
        raise InputError(f"config of {source.path}", reason, "one that transformers accepts", _FIX) from error
    if len(config.layer_types) != config.num_hidden_layers:
        raise InputError(
            "config layer_types", f"{len(config.layer_types)} layers", f"{config.num_hidden_layers} layers", _FIX
        )
    if config.indexer_n_heads is None:
        raise InputError("config indexer_n_heads", "nothing", "the sizes of the indexer", _FIX)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "batched_mm"
    return config


def geometry(config: Any, pool_io: PoolIO) -> Geometry:
    """The attributes of the QsaAttention nodes.

    Raises:
        ContractError: no node can have them.
    """
    return Geometry(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        indexer_n_heads=config.indexer_n_heads,
        indexer_head_dim=config.indexer_head_dim,
        indexer_budget=config.indexer_budget,
        indexer_compress_ratio=config.indexer_compress_ratio,
        attention_scale=float(np.float32(1 / math.sqrt(config.head_dim))),  # as the node will hold it
        rms_norm_eps=float(np.float32(config.rms_norm_eps)),
        pool_io=int(pool_io),
    )


def rotary_embedding(config: Any) -> Any:
    """Hugging Face's rotary module of a config: inverse frequencies and the factor of the cosines, as buffers.

    mrope sections need nothing more: they deal the pairs out to three position streams, which are equal for text.

    Raises:
        InputError: the rope parameters are incomplete, or do not fit the heads.
        RefusedError: the rope type depends on the length of the sequence.
    """
    from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind in LENGTH_DEPENDENT_ROPE:
        raise RefusedError(
            f"rope type {kind}: its frequencies change with the length of the sequence; no graph has that"
        )
    try:
        rotary: Any = hf.Qwen4ExpTextRotaryEmbedding(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(
            "config rope_parameters", dict(rope), f"a complete set ({error!r} is at fault)", _FIX
        ) from error
    rotary_dims, limit = 2 * rotary.inv_freq.numel(), min(config.head_dim, config.indexer_head_dim)
    if not 2 <= rotary_dims <= limit:
        raise InputError("config partial_rotary_factor", rope.get("partial_rotary_factor"), f"2 to {limit} dims", _FIX)
    return rotary


def parse_layers(layers: str | None, count: int) -> range:
    """`N` or `N-M` (both included) as a range of layer numbers; None means all `count` layers.

    Raises:
        InputError: it is not of that form, or names a layer that the model does not have.
    """
    if layers is None:
        return range(count)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", layers)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last < count:
        raise InputError("--layers", layers, f"N or N-M within 0-{count - 1}", "correct the option")
    return range(first, last + 1)


def check_layers(config: Any, layers: range, only_attention: bool) -> None:
    """Make sure that these layers can be exported.

    Raises:
        InputError: attention alone is asked of several layers.
        RefusedError: one of them is a linear-attention layer.
    """
    if only_attention and len(layers) != 1:
        raise InputError("--only-attention", f"{len(layers)} layers", "one layer", "add --layers N")
    linear = [n for n in layers if config.layer_types[n] == LINEAR]
    if linear:
        qsa = [n for n, kind in enumerate(config.layer_types) if kind != LINEAR]
        raise RefusedError(
            f"layer {linear[0]}: linear attention loops over chunks of the sequence, so that its export is right at the"
            f" traced length only; QSA layers can be exported alone, with --layers N and N one of"
            f" {', '.join(map(str, qsa)) or '(none)'}"
        )
