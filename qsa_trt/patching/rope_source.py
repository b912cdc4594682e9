"""The rope table to bake in: from the model's own inverse frequencies, or from its config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.errors import InputError

from ..rope import rope_from_config, rope_table
from .anchors import refuse
from .config import Config
from .cut import Cut
from .external_data import read_tensor
from .graph_index import GraphIndex

_PROTOBUF_LIMIT = (1 << 31) - 1


def baked_table(
    index: GraphIndex, cuts: Sequence[Cut], rotary_dims: int, max_positions: int, config: Config
) -> tuple[NDArray[np.float32], str]:
    """The table fp32 `[1, max_positions, rotary_dims]`, and where its frequencies come from.

    Raises:
        InputError: the table does not fit an ONNX file, neither the model nor the config holds inverse frequencies, or
            the config's rope type cannot be baked (dynamic, longrope); or the model's own table has fewer positions.
        RefusedError: the model scales its cosines or holds several sets of frequencies (dynamic, longrope), or the
            config disagrees with it.
    """
    most = _PROTOBUF_LIMIT // (4 * rotary_dims)
    if max_positions > most:
        raise InputError(
            "--max-positions",
            max_positions,
            f"at most {most}, since an ONNX file holds 2 GB",
            "lower it, or leave the rope table a graph input",
        )
    if cuts[0].rope is not None and all(t in index.initializers for t in cuts[0].rope):
        return _stored_table(index, cuts[0].rope, max_positions), f"the model's {' and '.join(cuts[0].rope)}"
    found = _inv_freq(index, cuts, rotary_dims)
    wanted = rope_from_config(config) if config else None
    if found is None and wanted is None:
        raise InputError(
            "--rope-table",
            "initializer",
            "a model with an inv_freq weight, or --config",
            "give the model's config.json, or leave the rope table a graph input",
        )
    if found is None:
        assert wanted is not None
        if wanted.size != rotary_dims // 2:
            refuse(cuts[0].layer, "rotary_dims", f"{rotary_dims} in the graph, {2 * wanted.size} in the config")
        return rope_table(max_positions, wanted), "the config's rope parameters"
    name, inv_freq = found
    if wanted is not None and (wanted.shape != inv_freq.shape or not np.allclose(wanted, inv_freq, rtol=1e-5)):
        refuse(cuts[0].layer, name, "its inverse frequencies are not those of the config's rope parameters")
    return rope_table(max_positions, inv_freq), f"the model's {name}"


def _stored_table(index: GraphIndex, names: tuple[str, str], max_positions: int) -> NDArray[np.float32]:
    """The first rows of the table of cosines and sines that all layers share."""
    cos, sin = (read_tensor(index.initializers[name], index.folder).astype(np.float32) for name in names)
    if max_positions > len(cos):
        most = f"at most {len(cos)}, the rows of {names[0]}"
        raise InputError("--max-positions", max_positions, most, "lower it, or export a longer table")
    return np.concatenate([cos[:max_positions], sin[:max_positions]], axis=-1)[None]


def check_one_rope(index: GraphIndex, cuts: Sequence[Cut], rotary_dims: int) -> None:
    """All nodes read one rope table, baked or not.

    Raises:
        RefusedError: a layer rotates by other frequencies than the first one.
    """
    first = _frequencies(index, cuts[0], rotary_dims)
    for cut in cuts[1:]:
        own = _frequencies(index, cut, rotary_dims)
        if own.keys() != first.keys():
            names = ", ".join(name for name, _ in own.values()) or "rope"
            refuse(cut.layer, names, "it rotates by other frequencies than the first layer; a model has one rope table")


def _inv_freq(index: GraphIndex, cuts: Sequence[Cut], rotary_dims: int) -> tuple[str, NDArray[np.float32]] | None:
    """The constant behind the cosines that the cuts read."""
    layer = cuts[0].layer
    for cosine in {node for cut in cuts for node in cut.sides if node.op == "Cos"}:
        for reader in index.readers(cosine.output):
            factors = [s for t in reader.inputs if reader.op in ("Mul", "Div") and (s := index.scalar(t)) is not None]
            if any(f != 1 for f in factors):
                refuse(
                    layer, reader, f"the cosines are scaled by {factors[0]:g} (longrope or yarn); a table is not baked"
                )
    found = _frequencies(index, cuts[0], rotary_dims)
    if len(found) > 1:
        names = ", ".join(name for name, _ in found.values())
        refuse(layer, names, "several sets of inverse frequencies (dynamic rope or longrope); a table is not baked")
    return next(iter(found.values()), None)


def _frequencies(index: GraphIndex, cut: Cut, rotary_dims: int) -> dict[bytes, tuple[str, NDArray[np.float32]]]:
    """The inverse frequencies behind a layer's cosines, by their bytes: names and values."""
    found: dict[bytes, tuple[str, NDArray[np.float32]]] = {}
    cosines = [node.output for node in sorted(cut.sides, key=lambda n: n.position) if node.op == "Cos"]
    for tensor in {t for node in index.ancestors(cosines) for t in node.reads}:
        value = index.constant(tensor)
        if value is not None and value.size == rotary_dims // 2 and np.issubdtype(value.dtype, np.floating):
            frequencies = value.astype(np.float32).ravel()
            found.setdefault(frequencies.tobytes(), (tensor, frequencies))
    return found
