"""Views and parts of tensors with a meaning: what may reorder, repeat or take apart heads, keys and scores."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from qsa_plugin.contract import Geometry

from .graph_index import GraphIndex, Node
from .terms import MASKED, PICKS, ROTATED, Meaning

#: What may be padded to whole blocks, and what may be taken apart by rows, heads or blocks.
_PADDED = frozenset({"i0", "im", "scores"})
_PICKED = frozenset({"i0", "im", "iq2", "ik2", "products", "rectified", "scores"})
#: Slices that go to the end say so with a number like this or larger.
_PAST = 1 << 30


class Views:
    """The rules for views, in one graph."""

    def __init__(self, index: GraphIndex, geometry: Geometry) -> None:
        self.index, self.geometry = index, geometry

    def view(self, node: Node, m: Meaning) -> Meaning | None:
        """A view or a part: it may not reorder, repeat or take apart what QSA does not."""
        if node.op == "Pad":
            void = m.name != "scores" or (len(node.inputs) > 2 and self.hides(node.inputs[2], m))
            return m if m.name in _PADDED and void else None
        if node.op == "Transpose":
            perm = node.attribute("perm", ())
            mixed = len(perm) > 2 and perm[0] != 0  # the batch stays in front
            if m.name in ("logits", "weights") or mixed or len(perm) < m.from_end:
                return None
            moved = len(perm) - perm.index(len(perm) - m.from_end)
            m = replace(m, swaps=m.swaps + (len(perm) == 4 and perm[1] == 2), from_end=moved)
        if m.name.partition(" ")[0] in ROTATED:
            return self.view_of_head(node, m)
        if node.op in PICKS and (m.name not in _PICKED or not self.keeps_blocks(node, m)):
            return None
        return m if node.op != "Expand" or m.name not in ("k2", "v0") or self.repeats(node) else None

    def keeps_blocks(self, node: Node, m: Meaning) -> bool:
        """Whether a Gather of one element leaves all rotated block keys: it takes away an axis of size 1."""
        if node.op != "Gather" or m.name != "ik2" or self.index.scalar(node.inputs[1]) is None:
            return True
        shape, axis = self.index.shape(node.inputs[0]), node.attribute("axis", 0)
        if shape is None:
            return True
        return -len(shape) <= axis < len(shape) and (shape[axis] == 1 or (shape[axis] is None and 1 not in shape))

    def view_of_head(self, node: Node, m: Meaning) -> Meaning | None:
        """Between norm and rotation a head stays the last dim, or pairs could be others than (i, i + rotary/2)."""
        if node.op == "Slice":
            return self.sliced(node, m)
        if node.op == "Transpose":
            return m if m.from_end == 1 else None
        before, after = self.index.last_dim(node.inputs[0]), self.index.last_dim(node.output)
        return None if node.op == "Reshape" and None not in (before, after) and before != after else m

    def repeats(self, node: Node) -> bool:
        """Whether an Expand repeats every KV head in place: the new axis stands right behind the heads."""
        shape, heads = self.index.shape(node.inputs[0]), self.geometry.num_kv_heads
        if heads == 1:
            return True
        if shape is not None and None not in shape:
            return any(pair == (heads, 1) for pair in itertools.pairwise(shape))
        maker = self.index.producer(self.index.back(node.inputs[0], {"Cast", "Identity"}))  # [B, Hkv, S, D] before it
        return maker is not None and maker.op == "Unsqueeze" and self.index.integers(maker.inputs[1]) == (2,)

    def sliced(self, node: Node, m: Meaning) -> Meaning | None:
        """A Slice of a head; one along another axis (positions) leaves the part as it is."""
        starts, ends, axes, steps = (self.index.integers(t) for t in (*node.inputs[1:], "")[:4])
        shape = self.index.shape(node.inputs[0])
        if starts is None or ends is None or axes is None or shape is None or len(axes) != 1 or axes[0] is None:
            return None
        if axes[0] not in (-1, len(shape) - 1):
            return m
        if steps not in (None, (1,)):
            return None
        first, end = m.part or (0, self.width(m.name))
        return replace(m, part=(_bound(starts[0], first, end), _bound(ends[0], first, end)))

    def width(self, name: str) -> int:
        """Dims of a head."""
        return self.geometry.indexer_head_dim if name.startswith("i") else self.geometry.head_size

    def split(self, node: Node, m: Meaning, number: int) -> Meaning | None:
        """One output of a Split; None: the part of the head that it holds is not known."""
        if m.name not in ROTATED:
            return m
        widths = [self.index.last_dim(t) for t in node.outputs]
        first = m.part[0] if m.part else 0
        if None in widths or first is None:
            return None
        first += sum(w for w in widths[:number] if w is not None)
        return replace(m, part=(first, first + (widths[number] or 0)))

    def hides(self, tensor: str, m: Meaning) -> bool:
        """Whether a tensor is a constant that hides elements, repeated or not."""
        value = self.index.constant(self.index.back(tensor, {"Expand", "Reshape", "Cast", "Identity"}))
        return value is not None and bool(np.all(value <= MASKED[m.name]))


def _bound(bound: int | None, first: int | None, end: int | None) -> int | None:
    """One bound of a Slice of the part (first, end), counted from the head's first dim."""
    if bound is not None and bound > _PAST:
        return end
    base = end if bound is not None and bound < 0 else first
    if bound is None or base is None:
        return None
    return base + bound if end is None else min(base + bound, end)
