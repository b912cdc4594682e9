"""Follows what every tensor of a cut means, step by step; a node that does something QSA does not is refused.

The cut replaces these nodes unseen, so an extra bias, scale, norm or rotation would be lost without a word.
What the mask means is not judged: only that it comes from the selection and from outside of the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np

from qsa_plugin.contract import Geometry

from .anchors import refuse
from .graph_index import GraphIndex, Node
from .norms import find_norms
from .terms import HIDDEN, MASKED, PICKS, ROTATED, VIEWS, Meaning, spell
from .verify import PlainCut, sources
from .views import Views

_NORMED = {"q0": "q1", "k0": "k1", "i0": "iq1", "im": "ik1"}
#: Scaling by a constant: counted where it makes the softmax scale, without effect on an order of scores.
_COUNTED = frozenset({"q2", "k2", "logits"})
_ORDERED = frozenset({"iq2", "ik2", "products", "rectified", "scores"})
#: What an exporter may keep in a cache and join with new entries, and what it may mask.
_CACHED = frozenset({"k0", "k1", "k2", "v0", "i0", "im", "ik1", "ik2", "scores"})
_PRODUCTS = {
    ("q2", "k2"): "logits",
    ("iq2", "ik2"): "products",
    ("ik2", "iq2"): "products",
    ("weights", "v0"): "out",
}


def check_meaning(index: GraphIndex, cut: PlainCut, geometry: Geometry, rotary: int) -> Mapping[str, Meaning]:
    """Walk through a layer's cut.

    Returns:
        What its tensors mean, those inside of a norm left out.

    Raises:
        RefusedError: a node does something that QSA does not, or that cannot be seen to be a step of QSA.
    """
    walk = _Walk(index, cut, geometry, rotary)
    walk.run()
    return walk.meanings


class _Walk:
    def __init__(self, index: GraphIndex, cut: PlainCut, geometry: Geometry, rotary: int) -> None:
        self.index, self.cut, self.geometry, self.rotary = index, cut, geometry, rotary
        ends = sources(cut.anchors)
        starts = zip(("q0", "k0", "v0", "i0"), ends.values(), strict=True)
        self.meanings: dict[str, Meaning] = {tensor: Meaning(name) for name, tensor in starts}
        self.views = Views(index, geometry)
        self.tables: dict[str, str] = {}  # "cos" and "sin" -> the one tensor behind all of its uses
        found = find_norms(index, among=cut.nodes)
        self.norms = {norm.output: norm.source for norm in found}
        self.inside_norms = {
            node for norm in found for node in index.ancestors([norm.output], stop=[norm.source]) & cut.nodes
        }

    def run(self) -> None:
        for node in sorted(self.cut.nodes, key=lambda n: n.position):
            if node.output in self.norms:
                source = self.meanings.get(self.norms[node.output])
                name = None if source is None or source.part else _NORMED.get(source.name)
                if source is None or name is None or source.from_end != 1:
                    self.fail(node, "it norms something else than QSA does")
                self.meanings[node.output] = source.now(name)
            elif node not in self.inside_norms:
                self.visit(node)
        attention = self.meanings.get(self.cut.anchors.gate.attention)
        if attention is None or attention.name != "out" or not self.swapped(attention):
            self.fail(self.cut.anchors.gate.multiply, "the gate does not multiply the output of the attention")

    def swapped(self, *heads: Meaning) -> bool:
        """Whether tokens and heads are in each other's place; with one token a Reshape does it too."""
        tokens = (self.index.shape(self.cut.anchors.projections["k_proj"]) or (None, None))[1]
        return tokens == 1 or all(m.swaps % 2 == 1 for m in heads)

    def fail(self, node: Node, reason: str) -> NoReturn:
        refuse(self.cut.anchors.layer, node, reason)

    def visit(self, node: Node) -> None:
        """Give the outputs of a node their meaning."""
        captured = [t for t in node.reads if t not in node.inputs and t in self.meanings]
        if captured:
            self.fail(node, f"its body reads {captured[0]}, which the cut would remove")
        operands = [self.meanings.get(t) for t in node.inputs]
        known = [m for m in operands if m is not None]
        if not known or node.op in ("Shape", "Size"):
            return
        unmasked = [m for m in known if m.name != "mask"]
        result = self.step(node, unmasked) if unmasked else Meaning("mask")
        if result is None:
            names = " and ".join(dict.fromkeys(m.name for m in known))
            self.fail(node, f"QSA has no such step on {spell(names)}")
        for i, output in enumerate(node.outputs):
            held = self.views.split(node, result, i) if node.op == "Split" else result
            if held is None:
                self.fail(node, "the parts that it splits a head into are not known")
            self.meanings[output] = held

    def step(self, node: Node, known: list[Meaning]) -> Meaning | None:
        """The meaning of a node's output from those of its operands, masks left out; None: QSA has no such step."""
        first = known[0]
        if node.op in VIEWS or node.op in PICKS:
            return self.views.view(node, first) if self.meanings.get(node.inputs[0]) is first else None
        rules: dict[str, Callable[[Node, Meaning, list[Meaning]], Meaning | None]] = {
            "MatMul": self.product,
            "Mul": self.scaled,
            "Div": self.scaled,
            "Add": self.added,
            "Concat": self.joined,
            "Where": self.chosen,
            "Softmax": self.softmax,
            "Attention": self.attention,
            "TopK": self.top_k,
            "ReduceSum": self.reduced,
            "ReduceMean": self.reduced,
        }
        if node.op in rules:
            return rules[node.op](node, first, known)
        if node.op == "Neg" and first.name in ROTATED and first.holds(self.rotary // 2, self.rotary):
            return first.now(first.name + " negated")
        if node.op == "Relu" and first.name == "products":
            return replace(first, name="rectified")
        if node.op == "IsNaN" and first.name in ("weights", "logits"):
            return Meaning("mask")
        return None

    # One method a kind of step. None: QSA has no such step.

    def product(self, node: Node, first: Meaning, known: list[Meaning]) -> Meaning | None:
        name = _PRODUCTS.get((known[0].name, known[1].name)) if len(known) == 2 else None
        main = [m for m in known if m.name in ("q2", "k2", "v0")]
        if name is None or not self.swapped(*main):
            return None
        left, right = known
        if left.from_end != 1 or right.from_end != (1 if name == "out" else 2):
            return None
        blocks = 2 if left.name == "ik2" else 1  # keys by queries: [.., G, S]
        return Meaning(name, factor=left.factor * right.factor, from_end=blocks)

    def scaled(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        other = next((t for t in node.inputs if self.meanings.get(t) is not m), None)
        if other is None or len(known) > 1:
            return None
        factor = self.index.scalar(other)
        if factor is None:
            return self.turned(node, m, other)
        if node.op == "Div":
            factor = 1 / factor if factor and node.inputs[1] == other else None
        if factor is None or not (m.name in _COUNTED or (m.name in _ORDERED and factor > 0)):
            return None
        return replace(m, factor=m.factor * factor) if m.name in _COUNTED else m

    def turned(self, node: Node, m: Meaning, table: str) -> Meaning | None:
        """A head times cosines, or its turned half times sines; one table of each serves all heads."""
        name, _, turned = m.name.partition(" ")
        whole = turned == "turned" or (m.holds(0, self.rotary) if m.part else self.rotary == self.views.width(name))
        if node.op != "Mul" or name not in ROTATED or turned not in ("", "turned") or not whole:
            return None
        kind, forbidden = ("sin", "Cos") if turned else ("cos", "Sin")
        root = self.index.back(table, VIEWS | PICKS)
        if self.tables.setdefault(kind, root) != root:
            self.fail(node, f"it rotates {spell(name)} by other {kind} values than {self.tables[kind]}")
        makers = {n.op for n in self.index.ancestors([root])}
        if forbidden in makers and kind.title() not in makers:
            self.fail(node, "it rotates with cosines and sines swapped")
        self.check_positions(node, name, table)
        return m.now(f"{name} {kind}")

    def check_positions(self, node: Node, name: str, table: str) -> None:
        """Block keys are rotated at the first token of their block: a slice of the table with a step starts at 0."""
        maker = self.index.producer(table)
        while maker is not None and maker.op in VIEWS | PICKS:
            steps = self.index.integers(maker.inputs[4]) if maker.op == "Slice" and len(maker.inputs) > 4 else None
            if steps is not None and any(s not in (None, 1) for s in steps):
                starts = self.index.integers(maker.inputs[1])
                if name != "ik1" or starts != (0,) or steps != (self.geometry.indexer_compress_ratio,):
                    self.fail(maker, f"it picks other positions for {spell(name)} than the first of every block")
            maker = self.index.producer(maker.inputs[0])

    def added(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        if len(known) == 2:
            name = m.name.partition(" ")[0]
            if name in ROTATED and {k.name for k in known} == {f"{name} cos", f"{name} sin"}:
                return m.now(f"{name} rotated" if self.rotary < self.views.width(name) else ROTATED[name])
            return None
        others = [t for t in node.inputs if self.meanings.get(t) is not m]
        return m if m.name in ("logits", "scores") and all(map(self.is_mask, others)) else None

    def is_mask(self, tensor: str) -> bool:
        value = self.index.constant(tensor)
        return value is None or bool(np.all((value == 0) | (value <= HIDDEN)))

    def joined(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        name = m.name.partition(" ")[0]
        if len(known) == 2 == len(node.inputs) and name in ROTATED:
            first, second = known
            if first.name == f"{name} negated" and second.name == name and second.holds(0, self.rotary // 2):
                return m.now(f"{name} turned")
            if (
                first.name == f"{name} rotated"
                and second.name == name
                and second.holds(self.rotary, self.views.width(name))
            ):
                return m.now(ROTATED[name])
        if len(known) != 1 or m.name not in _CACHED or len(node.inputs) != 2:
            return None
        leads = self.meanings.get(node.inputs[0]) is m
        other = node.inputs[int(leads)]
        if m.name == "scores":  # void blocks stand behind the others
            return m if leads and self.views.hides(other, m) and self.on_last_axis(node) else None
        return m if leads == self.index.is_constant(other) else None  # padding behind, or a cache in front

    def chosen(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        if len(known) != 1 or m.name not in MASKED:
            return None
        fills = [self.index.constant(t) for t in node.inputs[1:] if self.meanings.get(t) is not m]
        return m if all(v is None or bool(np.all(v <= MASKED[m.name])) for v in fills) else None

    def softmax(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        if m.name != "logits" or not self.on_last_axis(node):
            return None
        self.check_scale(node, m.factor)
        return Meaning("weights")

    def attention(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        if [k.name for k in known[:3]] != ["q2", "k2", "v0"] or any(k.from_end != 1 for k in known[:3]):
            return None
        if len(self.index.shape(node.inputs[0]) or ()) == 4 and not self.swapped(*known[:3]):
            return None
        own = node.attribute("scale", 1 / math.sqrt(self.geometry.head_size))
        self.check_scale(node, own * known[0].factor * known[1].factor)
        return Meaning("out", swaps=0 if len(self.index.shape(node.inputs[0]) or ()) == 4 else 1)

    def check_scale(self, node: Node, factor: float) -> None:
        if not math.isclose(factor, self.geometry.scale, rel_tol=2e-3):  # as exact as attributes.py reads it
            self.fail(node, f"its scores are scaled by {factor:g} in all, not by {self.geometry.scale:g}")

    def top_k(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        largest = node.attribute("largest", 1) == 1
        last = m.from_end == 1 and self.on_last_axis(node)
        return Meaning("mask") if m.name == "scores" and largest and last else None

    def on_last_axis(self, node: Node) -> bool:
        axis, shape = node.attribute("axis", -1), self.index.shape(node.inputs[0])
        return axis == -1 or (shape is not None and axis == len(shape) - 1)

    def reduced(self, node: Node, m: Meaning, known: list[Meaning]) -> Meaning | None:
        """Over the heads of the indexer, where a mean keeps the order too; over the keys of a block."""
        if m.name == "i0" and node.op == "ReduceMean":
            return Meaning("im")
        if m.name != "rectified":
            return None
        rank, axes = len(self.index.shape(node.inputs[0]) or ()), node.attribute("axes")
        if axes is None and len(node.inputs) > 1:
            axes = self.index.integers(node.inputs[1])
        if not rank or not axes or None in axes:
            return Meaning("scores", from_end=m.from_end)
        behind = [rank - a % rank for a in axes if rank - a % rank <= m.from_end]  # axes, counted from the end
        if m.from_end in behind:
            return None
        return Meaning("scores", from_end=m.from_end - (0 if node.attribute("keepdims", 1) else len(behind)))
