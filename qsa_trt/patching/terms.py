"""What the tensors of a cut may mean, and the words for it.

`q0 k0 v0 i0` raw heads; `im` block means of index keys; `q1 k1 iq1 ik1` normed; `q2 k2 iq2 ik2` rotated; `logits`,
`weights`, `out` of the attention; `products`, `rectified`, `scores` of the indexer; `mask` all that follows from TopK.
"""

from __future__ import annotations

from dataclasses import dataclass

VIEWS = frozenset({"Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Pad"})
PICKS = frozenset({"Slice", "Split", "Gather", "GatherND", "GatherElements"})
ROTATED = {"q1": "q2", "k1": "k2", "iq1": "iq2", "ik1": "ik2"}
#: Additive masks hold 0 and values that leave no weight; anything between is a bias.
HIDDEN = -1e4
#: Largest value that hides an element. Scores are never negative, so that -1 ranks last.
MASKED = {"logits": HIDDEN, "weights": 0.0, "out": 0.0, "products": 0.0, "rectified": 0.0, "scores": -1.0}

#: First dim and end of a part of a head; None where the graph computes it from shapes that are not known.
Part = tuple[int | None, int | None]


@dataclass(frozen=True)
class Meaning:
    """What a tensor is.

    Attributes:
        name: see the module.
        part: the part of the head it holds, of normed heads alone; None for all of it.
        factor: constants it was multiplied with.
        from_end: the axis of the head's own dims, of blocks in scores, counted from the last axis, which is 1.
        swaps: how often tokens and heads changed places: an odd number in front of the attention, and behind it.
    """

    name: str
    part: Part | None = None
    factor: float = 1.0
    swaps: int = 0
    from_end: int = 1

    def now(self, name: str) -> Meaning:
        """What a step makes of a whole head."""
        return Meaning(name, swaps=self.swaps)

    def holds(self, first: int, end: int) -> bool:
        """Whether the part may be this one: known bounds are equal."""
        return self.part is not None and all(a in (None, b) for a, b in zip(self.part, (first, end), strict=True))


def spell(name: str) -> str:
    """A meaning in words, for reasons."""
    words = {
        "q": "the query", "k": "the key", "v": "the value", "iq": "the index query", "ik": "the block key",
        "i0": "the raw index projection", "im": "the block mean", "out": "the output of the attention",
        "logits": "the attention scores", "weights": "the attention weights",
    }  # fmt: skip
    return words.get(name) or words.get(name.rstrip("012")) or name
