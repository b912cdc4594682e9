"""What every form of the attention comes down to: the tensors that feed the new node, and what it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph_index import Node


@dataclass(frozen=True)
class Cut:
    """One layer, ready to be replaced.

    Attributes:
        layer: its module path, or the node that it was found around.
        strategy: how it was found.
        qkv: tensors `[B, S, ...]` that make up the node's `qkv` one after another; heads may stand apart.
        index_qk: the same for `index_qk`.
        gammas: constant weight of each norm in `anchors.NORMS`, 1+w.
        attention: the tensor that the new node's output takes the place of, [B, S, Hq*D] or [B, S, Hq, D].
        reader: its one reader.
        nodes: what computes attention and selection from the sources; all of it goes.
        sides: what else these nodes depend on (mask, positions, cos and sin, shapes); it goes where nobody else reads.
        rope: tensors of cosines and sines by position, [maxPos, rotary/2] each, where the layer reads such tables.
    """

    layer: str
    strategy: str
    qkv: tuple[str, ...]
    index_qk: tuple[str, ...]
    gammas: Mapping[str, str]
    attention: str
    reader: Node
    nodes: frozenset[Node]
    sides: frozenset[Node]
    rope: tuple[str, str] | None
