"""Draws docs/pictures/: the paged pool, and what one row attends to. Both follow the code, for one small example.

python tools/draw_pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from qsa_plugin.contract import Geometry
from qsa_trt.reference import index_list

ROOT = Path(__file__).parents[1]
#: R = 4, budget 16 tokens: small enough to draw.
GEOMETRY = Geometry(2, 1, 16, 1, 8, 16, 4)
#: A page of the drawing; the real one holds 128 tokens.
PAGE = 8
LENGTH = 22
K_PAGES, V_PAGES = (3, 0, 2), (1, 3, 0)
INK, QUIET, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
KEY, VALUE, RAW, POOLED, TAIL = "#4c78a8", "#59a14f", "#f28e2b", "#b07aa1", "#edc948"


class Picture:
    """An SVG that is built up shape by shape; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="sans-serif" font-size="13" fill="{INK}">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str = "none", stroke: str = QUIET) -> None:
        """A rectangle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(self, x: float, y: float, words: object, anchor: str = "start", colour: str = INK, size: int = 13) -> None:
        """A line of text."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'
        )

    def svg(self) -> str:
        """The file's content."""
        return "\n".join([*self._parts, "</svg>", ""])


def legend(picture: Picture, x: float, y: float, entries: list[tuple[str, str]]) -> None:
    for i, (colour, words) in enumerate(entries):
        picture.box(x, y + 22 * i, 14, 14, colour)
        picture.text(x + 22, y + 22 * i + 12, words)


def draw_pool() -> str:
    """The page table of one sequence of `LENGTH` tokens, and both planes of its pool."""
    picture = Picture(900, 470, "The paged pool of one sequence")
    picture.text(20, 28, f"one sequence of {LENGTH} tokens, blocks of R = 4, pages of {PAGE} (really 128)", size=15)
    picture.text(20, 58, "kv_page_table")
    pages = max(*K_PAGES, *V_PAGES) + 1
    for plane, (ids, offset) in enumerate(((K_PAGES, 0), (V_PAGES, pages))):
        for slot, page in enumerate([*ids, None]):
            picture.box(130 + 62 * slot, 44 + 26 * plane, 58, 22)
            content = -1 if page is None else page + offset
            picture.text(159 + 62 * slot, 60 + 26 * plane, content, "middle", QUIET if page is None else INK)
        picture.text(390, 60 + 26 * plane, ("K page ids, 0 .. N-1", "V page ids, N .. 2N-1")[plane])
    for plane, ids in enumerate((K_PAGES, V_PAGES)):
        top = 120 + 170 * plane
        picture.text(20, top + 14, ("K plane", "V plane")[plane], size=15)
        for page in range(pages):
            _draw_page(picture, 130 + 150 * page, top, plane, page, ids)
    legend(
        picture,
        740,
        130,
        [(KEY, "normed, roped key"), (RAW, "raw indexer key"), (VALUE, "raw value"), (POOLED, "pooled block key")],
    )
    picture.text(740, 240, "white: never written,", colour=QUIET)
    picture.text(740, 258, "may hold anything", colour=QUIET)
    picture.text(
        130, 462, "columns [0, D): every KV head. Columns [D, D+Id), the narrow ones: head 0 only.", colour=INK
    )
    return picture.svg()


def _draw_page(picture: Picture, x: float, top: float, plane: int, page: int, ids: tuple[int, ...]) -> None:
    """One page of one plane: a wide column for the head, a narrow one for the indexer state."""
    ratio = GEOMETRY.indexer_compress_ratio
    picture.text(x, top + 12, f"page {page + plane * (max(*K_PAGES, *V_PAGES) + 1)}", colour=INK)
    for row in range(PAGE):
        y = top + 20 + 15 * row
        token = ids.index(page) * PAGE + row if page in ids else LENGTH
        live = token < LENGTH
        open_block = live and token >= LENGTH // ratio * ratio
        pooled = live and token % ratio == 0 and not open_block
        picture.box(x, y, 62, 15, (KEY, VALUE)[plane] if live else PAPER)
        picture.box(x + 62, y, 30, 15, (RAW if open_block else PAPER, POOLED if pooled else PAPER)[plane])
        if live:
            picture.text(x + 31, y + 12, f"t = {token}", "middle", PAPER, 11)


def draw_index_list() -> str:
    """Scores of one row's complete blocks, the selected ones, and the list they make with the causal tail."""
    position, ratio = LENGTH + 12, GEOMETRY.indexer_compress_ratio
    scores = np.array([0.9, 0.1, 0.5, 0.0, 0.7, 0.2, 0.4, 0.3])[: (position + 1) // ratio]
    tokens = index_list(GEOMETRY, scores, position)
    chosen = {int(t) // ratio for t in tokens if t < scores.size * ratio}
    picture = Picture(900, 260, "What one row attends to")
    picture.text(
        20,
        28,
        f"row t = {position}: {scores.size} complete blocks of R = {ratio}, budget {GEOMETRY.indexer_budget} tokens = "
        f"{GEOMETRY.budget_blocks} blocks",
        size=15,
    )
    step = 24
    for block, score in enumerate(scores):
        x = 20 + step * ratio * block
        picture.box(x, 120 - 70 * score, step * ratio - 3, 70 * score + 0.5, POOLED if block in chosen else QUIET)
        picture.text(x + step * ratio / 2, 114 - 70 * score, f"{score:g}", "middle", size=11)
    for token in range(position + 1):
        x, complete = 20 + step * token, token < scores.size * ratio
        colour = (KEY if token // ratio in chosen else PAPER) if complete else TAIL
        picture.box(x, 128, step, 24, colour)
        picture.text(x + step / 2, 145, token, "middle", PAPER if colour == KEY else INK, 10)
    picture.text(20, 186, f"index list, W = budget + R - 1 = {GEOMETRY.list_width} wide")
    for place in range(GEOMETRY.list_width):
        x = 20 + 30 * place
        held = place < tokens.size
        picture.box(x, 196, 30, 24)
        picture.text(x + 15, 213, tokens[place] if held else -1, "middle", INK if held else QUIET, 11)
    legend_y = 232
    for x, colour, words in (
        (20, KEY, "selected blocks, best score first"),
        (300, TAIL, "causal tail: always"),
    ):
        picture.box(x, legend_y, 14, 14, colour)
        picture.text(x + 22, legend_y + 12, words)
    return picture.svg()


def pictures() -> dict[str, str]:
    """File name to content."""
    return {"pool.svg": draw_pool(), "index-list.svg": draw_index_list()}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    for name, content in pictures().items():
        (folder / name).write_text(content)


if __name__ == "__main__":
    main()
