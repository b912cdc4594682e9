"""The pools of a model, one a layer: their tensors, shapes and bytes, from nodes or from ENGINE.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE, Geometry
from qsa_plugin.errors import InputError

from ..paging import empty_pool
from .pages import PagePool


@dataclass(frozen=True)
class LayerPool:
    """One layer's pool: the tensors it is bound to and the attributes of the layer."""

    layer: str
    past: str
    present: str
    geometry: Geometry

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        """`[2, N, P, Hkv, D+Id]`."""
        return (2, num_pages, PAGE_SIZE, self.geometry.num_kv_heads, self.geometry.pool_width)


@dataclass(frozen=True)
class PoolLayout:
    """All pools of a model and their size.

    Attributes:
        layers: the pools in graph order.
        dtype: their element type; NumPy's float16, `ml_dtypes.bfloat16`, or float32 in onnxruntime alone.
        num_pages: pages a plane of every pool, N.
        max_kv_len: tokens of the longest sequence.
        pages_per_seq: width of the page table, M; None is what `max_kv_len` needs.
    """

    layers: tuple[LayerPool, ...]
    dtype: np.dtype[Any]
    num_pages: int
    max_kv_len: int
    pages_per_seq: int | None = None

    @classmethod
    def of_engine(cls, manifest: str | os.PathLike[str]) -> PoolLayout:
        """The layout that ENGINE.json describes.

        Raises:
            InputError: the file cannot be read or is no manifest.
        """
        return cls.of_manifest(load_manifest(manifest))

    @classmethod
    def of_manifest(cls, manifest: dict[str, Any]) -> PoolLayout:
        """The layout in the content of an ENGINE.json."""
        layers = tuple(
            LayerPool(layer["name"], layer["past"], layer["present"], Geometry.from_attributes(layer["attributes"]))
            for layer in manifest["layers"]
        )
        sizes, pool = manifest["sizes"], manifest["pool"]
        longest = min(sizes["max_kv_len"], pool["pages_per_seq"] * pool["page_size"])
        dtype = surface_dtype(manifest["surface_dtype"])
        return cls(layers, dtype, pool["num_pages"], longest, pool["pages_per_seq"])

    def pages(self, rng: np.random.Generator | None = None) -> PagePool:
        """New books for these pools; `rng` shuffles the page ids."""
        return PagePool(self.num_pages, self.max_kv_len, pages_per_seq=self.pages_per_seq, rng=rng)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(math.prod(layer.shape(self.num_pages)) for layer in self.layers) * self.dtype.itemsize


def surface_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a surface: "float16", "bfloat16", or "float32", which only onnxruntime runs."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def load_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of an ENGINE.json.

    Raises:
        InputError: it cannot be read, is no manifest, or has a newer format than this version knows.
    """
    from ..building.manifest import FORMAT_VERSION

    try:
        manifest: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        found = int(manifest["format"])
    except OSError as error:
        raise InputError(
            "ENGINE.json", path, f"a readable file ({error.strerror})", "give the file that build-engine wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("ENGINE.json", path, "what build-engine wrote", "build the engine again") from error
    if found != FORMAT_VERSION:
        raise InputError("ENGINE.json", f"format {found}", f"format {FORMAT_VERSION}", "use the qsa-trt that wrote it")
    return manifest


def single_layer(geometry: Geometry, surface: str, num_pages: int, max_kv_len: int) -> PoolLayout:
    """The layout of one layer on its own, whose tensors have the contract's names.

    Args:
        geometry: the layer's attributes.
        surface: "float16" or "bfloat16".
        num_pages: pages a plane, N.
        max_kv_len: tokens of the longest sequence.
    """
    layer = LayerPool("layer", "past_key_value", "present_key_value", geometry)
    return PoolLayout((layer,), surface_dtype(surface), num_pages, max_kv_len)


def pools_in_memory(layout: PoolLayout, fill: float = 0.0) -> dict[str, NDArray[Any]]:
    """NumPy pools that hold `fill` everywhere, by the name of the input they are bound to."""
    return {layer.past: empty_pool(layer.geometry, layout.num_pages, layout.dtype, fill) for layer in layout.layers}


def names(layers: Sequence[LayerPool]) -> set[str]:
    """The inputs and outputs that are pools."""
    return {name for layer in layers for name in (layer.past, layer.present)}
