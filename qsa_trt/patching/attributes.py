"""Reads a layer's attributes from what the graph holds: weights' widths, gammas, constants; never from a default."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qsa_plugin.contract import Geometry
from qsa_plugin.errors import ContractError, InputError

from .anchors import last_axis_slice, refuse
from .graph_index import GraphIndex, Node
from .verify import Cut

Config = Mapping[str, Any]
_VIEWS = frozenset({"Transpose", "Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Expand"})
#: Keys of a `qwen4_exp` config.json, by attribute.
_CONFIG_KEYS = {
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "indexer_n_heads": "indexer_n_heads",
    "indexer_head_dim": "indexer_head_dim",
    "indexer_budget": "indexer_budget",
    "indexer_compress_ratio": "indexer_compress_ratio",
    "rms_norm_eps": "rms_norm_eps",
}
#: Exporters write a scale as a float of the graph's dtype, or its square root twice: fp16 is off by up to 1e-3.
_TOLERANCE = {"rms_norm_eps": 1e-3, "attention_scale": 2e-3}


@dataclass(frozen=True)
class Finding:
    """One value and where it stands."""

    value: float
    where: str


@dataclass(frozen=True)
class Attributes:
    """A layer's attributes, and the rotary dims that the rope table needs."""

    geometry: Geometry
    rotary_dims: int
    where: Mapping[str, str]  # attribute -> where it was found


def load_config(config: str | os.PathLike[str] | Config | None) -> Config:
    """The text part of a Hugging Face `config.json`; empty when none is given.

    Raises:
        InputError: the file is missing or no JSON object.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(
                "--config", config, f"a readable JSON file ({_short(error)})", "give the model's config.json"
            ) from error
        if not isinstance(config, Mapping):
            raise InputError("--config", type(config).__name__, "a JSON object", "give the model's config.json")
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def read_attributes(index: GraphIndex, cut: Cut, config: Config, pool_io: int) -> Attributes:
    """Read one layer's attributes and check them against each other.

    Raises:
        RefusedError: an attribute is nowhere, contradicts itself or the config, or describes an impossible layer.
    """
    layer = cut.anchors.layer
    reader = _Reader(index, cut, config)
    values: dict[str, float] = {}
    where: dict[str, str] = {}
    for name, findings in reader.findings().items():
        values[name], where[name] = _resolve(layer, name, list(findings), config)
    rotary, where["rotary_dims"] = _resolve(layer, "rotary_dims", list(reader.rotary_dims()), config)
    values["indexer_budget"], where["indexer_budget"] = _resolve(
        layer, "indexer_budget", list(reader.budget(int(values["indexer_compress_ratio"]))), config
    )
    for name in ("rms_norm_eps", "attention_scale"):
        values[name] = float(np.float32(values[name]))  # as the node will hold it
    try:
        geometry = Geometry.from_attributes({**values, "pool_io": pool_io})
    except ContractError as error:
        refuse(layer, error.what, f"the graph says {error.value}, which cannot be ({error.expected})")
    _check_widths(index, cut, geometry)
    return Attributes(geometry, int(rotary), where)


def _check_widths(index: GraphIndex, cut: Cut, g: Geometry) -> None:
    """The projections must be exactly as wide as the contract packs them.

    Raises:
        RefusedError: a width differs or is not known.
    """
    widths = {
        "q_proj": 2 * g.num_q_heads * g.head_size,
        "k_proj": g.num_kv_heads * g.head_size,
        "v_proj": g.num_kv_heads * g.head_size,
        "index_qk_proj": g.index_width,
    }
    for name, tensor in cut.anchors.projections.items():
        shape = index.shape(tensor)
        if shape is None or len(shape) != 3 or shape[-1] != widths[name]:
            spelled = "unknown" if shape is None else "[" + ", ".join(str(d or "?") for d in shape) + "]"
            node = index.producer(tensor) or tensor
            refuse(cut.anchors.layer, node, f"the shape of {name} is {spelled}; [B, S, {widths[name]}] was expected")


def _resolve(layer: str, name: str, findings: list[Finding], config: Config) -> tuple[float, str]:
    """One value out of what the graph and the config say."""
    wanted = _from_config(name, config)
    distinct = [f for i, f in enumerate(findings) if not any(_same(name, f, g) for g in findings[:i])]
    if wanted is None:
        if len(distinct) == 1:
            return distinct[0].value, distinct[0].where
        seen = ", ".join(f"{f.value:g} ({f.where})" for f in distinct) or "nothing"
        refuse(layer, name, f"the graph says {seen}; give --config with the model's config.json")
    agreeing = [f for f in distinct if _same(name, f, wanted)]
    if distinct and not agreeing:
        seen = ", ".join(f"{f.value:g} ({f.where})" for f in distinct)
        refuse(layer, name, f"the graph says {seen}, but the config says {wanted.value:g} ({wanted.where})")
    return (agreeing[0].value, agreeing[0].where) if agreeing else (wanted.value, wanted.where)


def _same(name: str, a: Finding, b: Finding) -> bool:
    return math.isclose(a.value, b.value, rel_tol=_TOLERANCE.get(name, 0.0))


def _from_config(name: str, config: Config) -> Finding | None:
    if name == "attention_scale" and "head_dim" in config:
        return Finding(1 / math.sqrt(config["head_dim"]), "config head_dim")
    if name == "rotary_dims" and "head_dim" in config:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        return Finding(int(config["head_dim"] * factor), "config partial_rotary_factor")
    key = _CONFIG_KEYS.get(name)
    value = config.get(key) if key else None
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise InputError(f"config {key}", value, "a number", "correct the config, or give the right file")
    return Finding(value, f"config {key}")


class _Reader:
    """Looks for each attribute in every place that can hold it."""

    def __init__(self, index: GraphIndex, cut: Cut, config: Config) -> None:
        self.index, self.cut, self.config = index, cut, config
        self.norms = cut.anchors.norms
        self.projections = cut.anchors.projections

    def findings(self) -> dict[str, Iterator[Finding]]:
        """Findings of every attribute that depends on no other."""
        head_size = self._gamma_sizes("q_norm", "k_norm")
        head_dim = self._gamma_sizes("indexer_q_norm", "indexer_k_norm")
        return {
            "head_size": iter(head_size),
            "num_q_heads": self._heads("q_proj", 2 * int(head_size[0].value)),
            "num_kv_heads": self._heads("k_proj", int(head_size[0].value), "v_proj"),
            "indexer_head_dim": iter(head_dim),
            "indexer_n_heads": self._index_heads(int(head_dim[0].value)),
            "indexer_compress_ratio": self._ratio(),
            "rms_norm_eps": (Finding(n.eps, f"epsilon at {n.node.label}") for n in self.norms.values()),
            "attention_scale": self._scale(int(head_size[0].value)),
        }

    def _gamma_sizes(self, *names: str) -> list[Finding]:
        found = []
        for name in names:
            gamma = self.index.constant(self.norms[name].gamma)
            if gamma is None:
                refuse(self.cut.anchors.layer, self.norms[name].node, f"the weight of {name} is not a constant")
            found.append(Finding(gamma.size, f"size of the {name} weight"))
        return found

    def _heads(self, projection: str, size: int, *more: str) -> Iterator[Finding]:
        for name in (projection, *more):
            width = self.index.last_dim(self.projections[name])
            if width is not None:
                yield Finding(width / size, f"width {width} of {name}")

    def _index_heads(self, head_dim: int) -> Iterator[Finding]:
        for finding in self._heads("index_qk_proj", head_dim):
            yield Finding(finding.value - 1, finding.where)

    def _ratio(self) -> Iterator[Finding]:
        """The block axis that the indexer averages over, and the floor divisions that turn tokens into blocks."""
        source = self.norms["indexer_k_norm"].source
        mean = self.index.producer(self.index.back(source, _VIEWS))
        if mean is not None and mean.op == "ReduceMean":
            shape = self.index.shape(mean.inputs[0])
            axes = mean.attribute("axes") or (self.index.integers(mean.inputs[1]) if len(mean.inputs) > 1 else None)
            if shape and axes and isinstance(ratio := shape[axes[0] or 0], int):
                yield Finding(ratio, f"block axis of {mean.label}")
        for node in self.cut.sides | self.cut.nodes:
            if node.op == "Div" and any(r.op == "Floor" for r in self.index.readers(node.output)):
                divisor = self.index.scalar(node.inputs[1])
                if divisor is not None and divisor > 1:
                    yield Finding(divisor, f"divisor of {node.label}")

    def budget(self, ratio: int) -> Iterator[Finding]:
        """The number of blocks that TopK keeps, in tokens."""
        for node in self.cut.topks:
            count = self.index.integers(node.inputs[1])
            if count is not None and count[0] is not None:
                yield Finding(count[0] * ratio, f"K {count[0]} of {node.label} times the ratio {ratio}")

    def rotary_dims(self) -> Iterator[Finding]:
        """The width of the cosines that the normed query, key and index query are multiplied with."""
        ops = _VIEWS | {"Slice", "Split"}
        for name in ("q_norm", "k_norm", "indexer_q_norm"):
            for tensor, node in self.index.forward(self.norms[name].output, ops):
                if node.op == "Mul":
                    other = node.inputs[1] if node.inputs[0] == tensor else node.inputs[0]
                    width = self.index.last_dim(other)
                    if width is not None and width > 1:
                        yield Finding(width, f"cosines at {node.label}")
            for node in self.index.readers(self.norms[name].output):
                bounds = last_axis_slice(self.index, node) if node.op == "Slice" else None
                if bounds is not None and bounds[0] == 0:
                    yield Finding(bounds[1], f"end of {node.label}")

    def _scale(self, head_size: int) -> Iterator[Finding]:
        """The factor between q.k and softmax; the exact 1/sqrt(D) where the graph's constant is a rounded one."""
        softmax = self.cut.softmax
        if softmax.op == "Attention":
            found = softmax.attribute("scale")
            scale = 1 / math.sqrt(head_size) if found is None else float(found)
        else:
            product = self._factor(softmax.inputs[0], through={"Add", "Where"})
            if product is None:
                return
            scale = product
        exact = 1 / math.sqrt(head_size)
        near = math.isclose(scale, exact, rel_tol=_TOLERANCE["attention_scale"])
        yield Finding(exact if near else scale, f"factor {scale:g} at {softmax.label}")

    def _factor(self, tensor: str, through: set[str]) -> float | None:
        """The product of the scalar factors between a tensor and the MatMul behind it, and those of its operands."""
        node = self.index.producer(tensor)
        if node is None or node not in self.cut.nodes:
            return None
        if node.op == "MatMul":
            return self._operand_factor(node.inputs[0]) * self._operand_factor(node.inputs[1])
        own = self._own_factor(node)
        if own is not None:
            factor, rest = own
            behind = self._factor(rest, through)
            return None if behind is None else factor * behind
        if node.op in _VIEWS or node.op in through:
            behinds = (self._factor(t, through) for t in node.inputs if t)
            return next((b for b in behinds if b is not None), None)
        return None

    def _operand_factor(self, tensor: str) -> float:
        tensor = self.index.back(tensor, _VIEWS)
        node = self.index.producer(tensor)
        own = self._own_factor(node) if node is not None else None
        return own[0] * self._operand_factor(own[1]) if own is not None else 1.0

    def _own_factor(self, node: Node) -> tuple[float, str] | None:
        """(factor, other operand) of a Mul or Div by a scalar constant."""
        if node.op not in ("Mul", "Div"):
            return None
        first, second = node.inputs
        scalar = self.index.scalar(second)
        if scalar is not None and scalar != 0:
            return (1 / scalar if node.op == "Div" else scalar), first
        scalar = self.index.scalar(first)
        return (scalar, second) if scalar is not None and node.op == "Mul" else None


def _short(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
