"""Every kind of fault that others shipped has a named case here: a test marked `pitfall(number)`."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
#: Number of the kind, and the right outcome in short.
KINDS = {
    1: "spread or packed scores over many blocks: exactly the best, repeatable",
    2: "selection time by distribution: concentrated at most twice normal",
    3: "all scores equal or zero, or many tied: the lowest ids",
    4: "prefill and decode select the same set, ties included",
    5: "-0.0 equals +0.0; NaN ranks lowest and never gives an id out of range",
    6: "garbage in score scratch changes nothing",
    7: "the rounding chain; no other block outside the tie band against the module in half precision",
    8: "launches do not depend on rows; grids hold 70,000 rows and a million tokens",
    9: "contexts of 1 to 3 tokens: the tail alone",
    10: "no tail; the block that this token completes is selectable",
    11: "around the budget: dense up to W tokens, 512 of 513 blocks after",
    12: "page ends, independent K and V pages",
    13: "block key: mean rounded before the norm, rotated at the first token",
    14: "batches of unlike lengths equal the rows alone; length 0 leaves the pool alone",
    15: "a single token attends to itself; padding never touches the pool",
    16: "NaN in all that is not live: finite outputs, zero padding, everything written",
    17: "dead page ids never followed; live ids and lengths out of range write nothing",
    18: "raw dots beyond 65,504 stay finite; errors against fp64 within bounds",
    19: "split merge with poisoned partials and counters, from any stream",
    20: "pools and score rows beyond 2^31 elements",
    21: "the reported workspace holds every smaller call; no square of the prompt",
    22: "pages used again, copied, shared by requests in turn",
    23: "prefill under the budget leaves what decode past it needs",
    24: "pools at wrong addresses are an error; copy is right",
    25: "graphs replayed with lengths changed in place",
    26: "the first call in a capture; nothing but launches on the given stream",
    27: "two contexts on two threads; 10,000 enqueues leave nothing behind",
    28: "a fresh process deserializes; names agree",
    29: "fields survive gc, clone, attach and serialisation",
    30: "formats look at no dims and no later position; -1 in configure",
    31: "an exception in a callback becomes the user's message",
    32: "serialised fields carry a format version",
    33: "external data is kept without loading the weights",
    34: "shared initialisers and tables; names that are taken",
    35: "readers inside If, Loop, Scan and functions",
    36: "patched input and models without QSA",
    37: "the patched file passes the checker and keeps what was not touched",
    38: "no K/V copy in scratch; launch tables know no device name",
    39: "cost follows the live length",
}


@functools.cache
def marked() -> dict[int, list[str]]:
    """Kind to `file:line` of its marks, read from the source, so that skipped and deselected tests count."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(FOLDER.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.pitfall":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path}: a number, so that this test can read it"
                    found[argument.value].append(f"{path.relative_to(FOLDER)}:{node.lineno}")
    return found


def test_every_kind_has_a_named_case() -> None:
    assert list(KINDS) == list(range(1, 40))
    missing = {kind: KINDS[kind] for kind in KINDS.keys() - marked().keys()}
    assert not missing


def test_no_mark_names_a_kind_that_does_not_exist() -> None:
    assert marked().keys() <= KINDS.keys()


@pytest.mark.parametrize("kind", [*range(1, 28), 39])
def test_kinds_of_kernels_have_a_case_on_the_gpu(kind: int) -> None:
    assert any(place.startswith("gpu/") for place in marked()[kind])
