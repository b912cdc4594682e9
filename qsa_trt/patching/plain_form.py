"""Brings a model into the one form in which layers are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from .functions import inline_functions
from .fused_ops import Rewritten, to_plain
from .graph_index import GraphIndex


@dataclass(frozen=True)
class PlainForm:
    """A model in plain form.

    Attributes:
        index: its index.
        rewritten: nodes that get their own form back if they stay (`fused_ops.restore`).
        inlined: names of the local functions that were inlined.
    """

    index: GraphIndex
    rewritten: list[Rewritten]
    inlined: tuple[str, ...]


def to_plain_form(model: onnx.ModelProto, folder: Path | None) -> PlainForm:
    """Inline local functions and write fused operators as plain ones, in place.

    Args:
        model: the model.
        folder: where its external data lies.

    Raises:
        RefusedError: a local function cannot be inlined.
    """
    inlined = inline_functions(model)
    index = GraphIndex(model, folder)
    rewritten = to_plain(model, index)
    return PlainForm(GraphIndex(model, folder) if rewritten else index, rewritten, inlined)
