"""Selection of prefill rows alone: exact in every distribution, ties, zeros, NaN, scratch full of garbage."""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_trt import device
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu
BUDGET = 512


def launchers():
    from qsa_plugin.prefill_launchers import PrefillLaunchers

    device.activate()
    capability = device.compute_capability()
    assert capability is not None
    spec = SPECIALISATIONS["real-fp16"].on(arch_of(capability))
    return PrefillLaunchers(spec, spec.geometry)


def select(rows: list[np.ndarray]) -> np.ndarray:
    """Lists `[rows, 512]` of rows of scores; what lies behind a row's scores is NaN."""
    device.activate()
    stride = -(-max(len(row) for row in rows) // 4) * 4
    scores = np.full((len(rows), stride), np.nan, np.float32)
    for row, values in enumerate(rows):
        scores[row, : len(values)] = values
    counts = np.array([len(row) for row in rows], np.int32)
    buffers = [device.Buffer.of(scores), device.Buffer.of(counts), device.Buffer(len(rows) * BUDGET * 4)]
    stream = device.Stream()
    device_scores, device_counts, lists = (buffer.address for buffer in buffers)
    device.check(buffers[0]._driver.cuCtxSynchronize())
    launchers().select_rows(
        stream.handle, scores=device_scores, counts=device_counts, lists=lists, rows=len(rows), stride=stride
    )
    stream.synchronize()
    assert all(buffer.intact() for buffer in buffers)
    return buffers[2].read((len(rows), BUDGET), np.int32)


def expected(values: np.ndarray) -> np.ndarray:
    """By definition: larger first, then lower id; NaN last."""
    best = np.sort(np.argsort(-values, kind="stable")[:BUDGET])
    return np.pad(best, (0, BUDGET - best.size), constant_values=-1)


def distributions(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    step = np.float32(1.0) + np.arange(n, dtype=np.float32) * np.float32(2.0**-23)
    mixed = rng.standard_normal(n).astype(np.float32)
    with_nan = mixed.copy()
    with_nan[rng.random(n) < 0.3] = np.nan
    high = np.full(n, 1.0, np.float32)
    high[rng.permutation(n)[:400]] = 2.0
    return {
        "normal": np.maximum(mixed, 0),
        "signed": mixed,
        "tiny steps": rng.permutation(step),
        "one coarse bin": (1 + rng.random(n) * 1e-5).astype(np.float32),
        "all equal": np.full(n, 3.25, np.float32),
        "all zero, both signs": np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32),
        "400 high, the others tied": high,
        "NaN": with_nan,
        "all NaN": np.full(n, np.nan, np.float32),
        "infinities": np.where(rng.random(n) < 0.2, np.inf, -np.inf).astype(np.float32),
        "few distinct": rng.integers(0, 7, n).astype(np.float32),
        "subnormal": (rng.integers(0, 2000, n) * 1.4e-45).astype(np.float32),
        "all of the range": rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
        "ascending": np.arange(n, dtype=np.float32),
    }


@pytest.mark.pitfall(1, 3, 5, 6)
@pytest.mark.parametrize("n", [513, 516, 1000, 8192, 16448, 30938, 65504, 262144])
def test_exact_in_every_distribution(n: int) -> None:
    """Kinds 1, 3, 5, 6: two runs, all rows of one launch."""
    rows = list(distributions(n).values())
    first, second = select(rows), select(rows)
    assert np.array_equal(first, second)
    for row, name in enumerate(distributions(n)):
        assert np.array_equal(first[row], expected(rows[row])), f"{name}, {n} blocks"


def test_rows_within_the_budget_take_everything() -> None:
    rows = [np.full(n, np.nan, np.float32) for n in (1, 4, 31, 511, 512)]
    lists = select(rows)
    for row, values in enumerate(rows):
        assert np.array_equal(lists[row], expected(values))


@pytest.mark.pitfall(8)
def test_seventy_thousand_rows() -> None:
    """Kind 8: grids beyond 65,535."""
    base = np.random.default_rng(0).random(600).astype(np.float32)
    lists = select([base] * 70000)
    assert (lists == expected(base)).all()
