"""What Python reserves for selection is what the kernels take: their constants, read from the source. No GPU."""

from __future__ import annotations

import re

import pytest

from qsa_plugin import jit
from qsa_plugin.prefill_tiles import score_tile
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, arch_of, shared_limit


def constants(file: str, index_heads: int = 4) -> dict[str, int]:
    """Names and values of the constants of a kernel file: numbers, and choices by `IH > 4`; the last of two forms."""
    text = (jit.kernel_folder() / file).read_text()
    found = re.findall(r"^constexpr int (\w+) = (?:IH > 4 \? (\d+) : )?(\d+);", text, re.MULTILINE)
    return {name: int(many if many and index_heads > 4 else few) for name, many, few in found}


@pytest.mark.parametrize(
    ("portable", "file"), [(False, "prefill_score_hopper.cuh"), (True, "prefill_score.cuh")], ids=["hopper", "portable"]
)
@pytest.mark.parametrize("name", list(SPECIALISATIONS))
def test_selection_gets_the_threads_and_the_memory_that_it_takes(name: str, portable: bool, file: str) -> None:
    spec = SPECIALISATIONS[name].on("sm_90a")
    tile, kernel = score_tile(spec, portable), constants(file, spec.indexer_n_heads)
    # as many thread blocks are launched as registers were kept for
    assert (tile.rows, tile.threads, tile.ctas) == tuple(kernel[n] for n in ("ROW_TILE", "SCORE_THREADS", "SCORE_CTAS"))
    histograms = tile.threads // 32 * constants("prefill_select.cuh")["BINS"] * 4
    assert tile.select_bytes == tile.query_bytes + histograms


@pytest.mark.parametrize("capability", ARCHES)
def test_selection_fits_every_device(capability: tuple[int, int]) -> None:
    for spec in SPECIALISATIONS.values():
        for portable in (False, True):
            tile = score_tile(spec.on(arch_of(capability)), portable)
            assert tile.select_bytes <= shared_limit(capability)
