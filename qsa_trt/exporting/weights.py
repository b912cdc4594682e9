"""Weights one at a time: from the safetensors files of a checkpoint, or random.

Names are those of `Qwen4ExpForCausalLM` (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`). Checkpoints of
multimodal models spell them `model.language_model.layers...`, and most store each expert by itself.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qsa_plugin.errors import InputError, RefusedError

Shape = tuple[int, ...]
_FLOATS = ("F32", "F16", "BF16")
#: How a stored name begins -> how the module's name begins; the first that fits counts.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.": "model.",
    "lm_head.": "lm_head.",
    "layers.": "model.layers.",
    "embed_tokens.": "model.embed_tokens.",
    "hyper_connection_mixer.": "model.hyper_connection_mixer.",
}
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")
_DOWNLOAD = "download the checkpoint again"


class Weights(Protocol):
    """Where parameters come from."""

    @property
    def files(self) -> list[Path]:
        """The files that are read."""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Make sure that all parameters of these names and shapes can be read, without reading them."""

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """One parameter, contiguous, on the CPU."""

    def __str__(self) -> str:
        """For the report."""


@dataclass(frozen=True)
class RandomWeights:
    """Random weights, the same on every machine and for every choice of layers: each name has its own generator.

    Matrices keep a signal's variance; the weights of norms are far from 0, where their defaults hide mistakes.
    """

    seed: int

    @property
    def files(self) -> list[Path]:
        """None."""
        return []

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Every shape can be made."""

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Uniform numbers, made a row of the first axis at a time."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        bound = uniform_bound(name, shape)
        result = torch.empty(shape, dtype=dtype)
        for row in result if len(shape) > 1 else result[None]:
            row.copy_(torch.from_numpy((2 * rng.random(tuple(row.shape), np.float32) - 1) * np.float32(bound)))
        return result

    def __str__(self) -> str:
        return f"random, seed {self.seed}"


def uniform_bound(name: str, shape: Shape) -> float:
    """Bound of the uniform distribution of a random parameter."""
    if len(shape) == 1:
        return 0.5
    return math.sqrt(3 / (1 if name.endswith("embed_tokens.weight") else shape[-1]))


class Checkpoint:
    """The safetensors files of a checkpoint folder.

    Args:
        folder: holds `model.safetensors.index.json` and the files that it names, or safetensors files alone.

    Raises:
        InputError: there are none, or the index is damaged or names a file that is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = _places(folder)

    @property
    def files(self) -> list[Path]:
        """All files with weights, by name."""
        return sorted({path for path, _ in self._places.values()})

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Compare with what the files' headers say.

        Raises:
            InputError: a tensor is missing or has another shape, or a file is damaged.
            RefusedError: a tensor is quantised.
        """
        parts = {name: self._parts(name, shape) for name, shape in shapes.items()}
        missing = [part for wanted in parts.values() for part in wanted if part not in self._places]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InputError(
                f"checkpoint {self.folder}", f"no tensor {missing[0]}{more}", "all tensors of these layers", _DOWNLOAD
            )
        headers = {
            path: _header(path) for path in {self._places[part][0] for wanted in parts.values() for part in wanted}
        }
        for wanted in parts.values():
            for part, shape in wanted.items():
                path, stored = self._places[part]
                _check_tensor(path, stored, shape, headers[path].get(stored))

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Read one parameter; experts that are stored one by one are put together.

        Raises:
            RefusedError: a value is too large for `dtype`.
        """
        places = [self._places[part] for part in self._parts(name, shape)]
        with ExitStack() as stack:  # files are closed at once: what was read does not stay mapped
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {p for p, _ in places}}
            if len(places) == 1:
                ((path, stored),) = places
                return _converted(files[path].get_tensor(stored), dtype, f"{path}, tensor {stored}")
            result = torch.empty(shape, dtype=dtype)  # [experts, ...]
            for row, (path, stored) in zip(result.view(len(places), -1, shape[-1]), places, strict=True):
                row.copy_(_converted(files[path].get_tensor(stored), dtype, f"{path}, tensor {stored}"))
            return result

    def _parts(self, name: str, shape: Shape) -> dict[str, Shape]:
        """The stored tensors that make up one parameter, in order, and their shapes."""
        match = _EXPERTS.fullmatch(name)
        if match is None or name in self._places:
            return {name: shape}
        prefix, kind = match.groups()
        experts, rows, columns = shape
        pieces = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
        part = (rows // len(pieces), columns)
        return {f"{prefix}{e}.{piece}.weight": part for e in range(experts) for piece in pieces}

    def __str__(self) -> str:
        return f"{len(self.files)} safetensors files"


def _converted(tensor: Tensor, dtype: torch.dtype, label: str) -> Tensor:
    """A contiguous copy in another element type."""
    result = tensor.to(dtype, copy=True).contiguous()
    lowest, highest = (value.item() for value in result.aminmax())
    if math.inf in (-lowest, highest) and torch.stack(tensor.aminmax()).isfinite().all():
        raise RefusedError(
            f"{label}: values up to {tensor.abs().max().item():g} do not fit {dtype}; export with --dtype bf16 or fp32;"
            " nothing was written"
        )
    return result


def _places(folder: Path) -> dict[str, tuple[Path, str]]:
    """Parameter name -> (file, stored name)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError("checkpoint index", index, "a JSON object with a weight_map", _DOWNLOAD) from error
    else:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise InputError(
                f"checkpoint {folder}",
                "no safetensors file",
                "model.safetensors, or an index and its files",
                "download the weights, or add --random-init SEED",
            )
        files = {name: path for path in paths for name in _header(path)}
    for path in dict.fromkeys(files.values()):
        if path.parent != folder or not path.is_file():
            raise InputError("checkpoint file", path, f"a file in {folder}, since the index names it", _DOWNLOAD)
    return {_parameter_name(name): (path, name) for name, path in files.items()}


def _parameter_name(stored: str) -> str:
    for prefix, replacement in _PREFIXES.items():
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def _header(path: Path) -> dict[str, tuple[Shape, str]]:
    """Name -> (shape, element type) of every tensor of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise InputError("checkpoint file", f"{path} ({error})", "a complete safetensors file", _DOWNLOAD) from error


def _check_tensor(path: Path, stored: str, shape: Shape, found: tuple[Shape, str] | None) -> None:
    if found is None:
        raise InputError(f"checkpoint file {path}", f"no tensor {stored}", "what the index says", _DOWNLOAD)
    if found[1] not in _FLOATS:
        raise RefusedError(f"{path}, tensor {stored}: element type {found[1]}; only {', '.join(_FLOATS)} are exported")
    if found[0] != shape:
        raise InputError(
            f"{path}, tensor {stored}",
            f"shape {list(found[0])}",
            f"{list(shape)}, which config.json asks for",
            "give a config.json and weights that belong together",
        )
