"""decode_select on given scores: exact in every distribution, lowest ids on ties, NaN lowest."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin import jit
from qsa_plugin.decode_plan import LAYOUT, decode_tunings, select_shared
from qsa_plugin.launch import Launch, ParamBlock
from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_trt import device
from qsa_trt.reference import select_blocks
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu
SPEC = SPECIALISATIONS["real-fp16"]
BUDGET = SPEC.geometry.budget_blocks
SIZES = [513, 2048, 4097, 16_448, 30_938, 32_768, 32_769, 65_504, 262_144]


def select(scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """Ids that the kernel selects among `scores` [n]; every other byte that it could read is poison."""
    device.activate()
    capability = device.compute_capability()
    assert capability is not None
    spec = SPEC.on(arch_of(capability))
    tuning = dict(decode_tunings(spec, capability))["decode_select"]
    (kernel,) = jit.kernels("decode_select", spec, ["decode_select"], tuning)
    launch = Launch(kernel, 1024, select_shared(capability))
    n, stride = len(scores), -(-len(scores) // 4) * 4
    pages = -(-n * SPEC.indexer_compress_ratio // 128)
    table = np.stack([np.arange(pages), np.arange(pages) + pages]).astype(np.int32)[None]
    held = {
        "page_table": device.Buffer.of(table),
        "live": device.Buffer.of(np.array([n * SPEC.indexer_compress_ratio], np.int32)),
        "scores": device.Buffer(stride * 4),
        "blocks": device.Buffer((BUDGET + 1) * 16),
    }
    held["scores"].write(scores)
    pointers = [0] * 19
    pointers[5], pointers[13], pointers[14], pointers[15] = (buffer.address for buffer in held.values())
    pointers[3] = held["live"].address  # context_lengths
    parameters = ParamBlock(LAYOUT)
    parameters.pack(*pointers, 1, pages, pages, pages * 128, stride, 1, 1, 1e-6, 1.0)
    stream = device.Stream()
    device.synchronize()
    launch(stream.handle, parameters)
    stream.synchronize()
    assert all(buffer.intact() for buffer in held.values())
    blocks = held["blocks"].read((BUDGET, 4), np.int32)
    ids = blocks[:, 0] // SPEC.indexer_compress_ratio
    assert np.array_equal(blocks[:, 1], blocks[:, 0] // 128)
    assert np.array_equal(blocks[:, 2], blocks[:, 0] // 128 + pages)
    return ids


def spread(n: int, kind: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(n)
    x = {
        "normal": lambda: np.abs(rng.standard_normal(n)),
        "tiny steps": lambda: 1.0 + rng.permutation(n) * 2.0**-23,
        "one coarse bin": lambda: 3.0 + rng.random(n) * 1e-4,
        "all equal": lambda: np.full(n, 2.5),
        "all zero": lambda: np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "400 high, the rest tied": lambda: np.where(rng.permutation(n) < 400, 9.0, 4.0),
        "few distinct": lambda: rng.integers(0, 5, n),
        "some NaN and inf": lambda: np.where(
            rng.random(n) < 0.3, np.nan, np.where(rng.random(n) < 0.001, np.inf, rng.random(n))
        ),
        "nearly all NaN": lambda: np.where(rng.permutation(n) < 100, rng.random(n), np.nan),
        "negative too": lambda: rng.standard_normal(n),
        "denormal": lambda: rng.integers(0, 2000, n) * 1.4e-45,
        "all best in one place": lambda: np.where(np.arange(n) // 600 == 3, 5.0 + rng.random(n), rng.random(n)),
        "all negative": lambda: -1.0 - rng.random(n),
    }[kind]()
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("n", SIZES)
def test_exact_for_every_distribution(n: int) -> None:
    """Kinds 1, 3, 5, 6."""
    for kind in (
        "normal", "tiny steps", "one coarse bin", "all equal", "all zero", "400 high, the rest tied", "few distinct",
        "some NaN and inf", "nearly all NaN", "negative too", "denormal", "all best in one place", "all negative",
    ):  # fmt: skip
        scores = spread(n, kind)
        ids = select(scores)
        assert np.array_equal(ids, np.sort(select_blocks(scores, BUDGET))), f"{kind}, {n} blocks"
