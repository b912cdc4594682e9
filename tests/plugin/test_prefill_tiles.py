"""What Python reserves for selection is what the kernels take: their constants, read from the source. No GPU."""

from __future__ import annotations

import re

import pytest

from qsa_plugin import jit
from qsa_plugin.prefill_tiles import score_tile
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, arch_of, shared_limit


def constants(file: str) -> dict[str, str]:
    """Names and values of the plain constants of a kernel file; of two forms in one file the last."""
    text = (jit.kernel_folder() / file).read_text()
    return dict(re.findall(r"^constexpr (?:int|bool) (\w+) = (\w+);", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("portable", "file"), [(False, "prefill_score_hopper.cuh"), (True, "prefill_score.cuh")], ids=["hopper", "portable"]
)
@pytest.mark.parametrize("name", list(SPECIALISATIONS))
def test_selection_gets_the_threads_and_the_memory_that_it_takes(name: str, portable: bool, file: str) -> None:
    tile, kernel = score_tile(SPECIALISATIONS[name].on("sm_90a"), portable), constants(file)
    assert (tile.rows, tile.threads) == (int(kernel["ROW_TILE"]), int(kernel["SCORE_THREADS"]))
    histograms = tile.threads // 32 * int(constants("prefill_select.cuh")["BINS"]) * 4
    assert tile.select_bytes == tile.query_bytes + histograms


@pytest.mark.parametrize("capability", ARCHES)
def test_selection_fits_every_device(capability: tuple[int, int]) -> None:
    for spec in SPECIALISATIONS.values():
        for portable in (False, True):
            tile = score_tile(spec.on(arch_of(capability)), portable)
            assert tile.select_bytes <= shared_limit(capability)


def test_as_many_portable_ctas_are_launched_as_registers_were_kept_for() -> None:
    """SCORE_CTAS of prefill_score.cuh: two where up to four indexer heads leave the registers."""
    assert "SCORE_CTAS = IH > 4 ? 1 : 2;" in (jit.kernel_folder() / "prefill_score.cuh").read_text()
    for spec in SPECIALISATIONS.values():
        assert score_tile(spec, portable=True).ctas == (1 if spec.indexer_n_heads > 4 else 2)
