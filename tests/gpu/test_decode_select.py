"""The selection inside decode_attend on given scores: exact in every distribution, lowest ids on ties, NaN lowest."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin import jit
from qsa_plugin.decode_plan import LAYOUT, attend_shape
from qsa_plugin.launch import Launch, ParamBlock
from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_plugin.workspace import SCORE_TILE
from qsa_trt import device
from qsa_trt.reference import select_blocks
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu
#: Below and above what the registers hold (8192), and past twice as many groups.
SIZES = [513, 2048, 4097, 8192, 8193, 16_448, 30_938, 32_769, 65_504, 262_144]
#: Budgets of 4096, 1024, 9 and 1 blocks: those that are too many for groups are selected piece by piece.
OTHERS = [("budget-8192", 20_001), ("budget-8192", 70_000), ("ratio-2", 30_938), ("budget-odd-blocks", 9001),
          ("smallest", 5000)]  # fmt: skip
KINDS = (
    "normal", "tiny steps", "one coarse bin", "all equal", "all zero", "400 high, the rest tied", "few distinct",
    "some NaN and inf", "nearly all NaN", "negative too", "denormal", "all best in one place", "all negative",
    "sixty decades",
)  # fmt: skip


def sort_keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Larger score, larger key; -0 equals +0; NaN is 0, any other value above it."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(np.isnan(scores), 0, np.where(bits >> 31, ~bits, bits | 0x8000_0000)).astype(np.uint32)


def select(name: str, scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """Ids that the kernel selects among `scores` [n]; every other byte of them that it could read is poison.

    All tokens lie in one page, and only the last row of the rotary table exists, since nothing else of it is read.
    """
    device.activate()
    capability = device.compute_capability()
    assert capability is not None
    spec = SPECIALISATIONS[name].on(arch_of(capability))
    g, shape = spec.geometry, attend_shape(spec, capability)
    (kernel,) = jit.kernels("decode_attend", spec, ["decode_attend"], shape.tuning(spec, clustered=False))
    launch = Launch(kernel, shape.threads, shape.shared_bytes(spec, clustered=False))
    n, ratio = len(scores), g.indexer_compress_ratio
    length = n * ratio
    stride, pages = -(-n // 4) * 4, -(-length // 128)
    keys = sort_keys(scores)
    tiles = np.zeros(-(-n // SCORE_TILE) * SCORE_TILE, np.uint32)
    tiles[:n] = keys
    zeros = np.zeros(2 * 128 * g.num_kv_heads * g.pool_width + g.qkv_width, np.float16)
    table = np.repeat(np.array([[[0], [1]]], np.int32), pages, axis=2)
    held = {
        "zeros": device.Buffer.of(zeros),
        "rope": device.Buffer.of(np.zeros(spec.rotary_dims, np.float32)),
        "page_table": device.Buffer.of(table),
        "length": device.Buffer.of(np.array([length], np.int32)),
        "scores": device.Buffer(stride * 4),
        "maxima": device.Buffer(-(-stride // (4 * SCORE_TILE)) * 16),
        "blocks": device.Buffer((g.budget_blocks + 1) * 4),
        "output": device.Buffer(g.num_q_heads * g.head_size * 2),
    }
    for slot, values in (("scores", keys), ("maxima", tiles.reshape(-1, SCORE_TILE).max(1))):
        held[slot].write(np.pad(values, (0, -len(values) % 4)))
    at = {key: buffer.address for key, buffer in held.items()}
    pointers = [0] * 19
    pointers[0] = pointers[2] = pointers[6] = at["zeros"]
    pointers[3] = pointers[12] = at["length"]
    pointers[4] = at["rope"] - (length - 1) * spec.rotary_dims * 4
    pointers[5], pointers[10] = at["page_table"], at["output"]
    pointers[13], pointers[14], pointers[15] = at["scores"], at["maxima"], at["blocks"]
    parameters = ParamBlock(LAYOUT)
    parameters.pack(*pointers, pages, 1, length, stride, 1, 1, 1e-6, 1.0)
    stream = device.Stream()
    device.synchronize()
    launch.grid(g.num_kv_heads)
    launch(stream.handle, parameters)
    stream.synchronize()
    assert all(buffer.intact() for buffer in held.values())
    return held["blocks"].read((g.budget_blocks,), np.int32)


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
        "sixty decades": lambda: 10.0 ** rng.uniform(-30, 30, n),
    }[kind]()
    return np.asarray(x, np.float32)


@pytest.mark.pitfall(1, 3, 5, 6)
@pytest.mark.parametrize(("name", "n"), [*(("real-fp16", n) for n in SIZES), *OTHERS])
def test_exact_for_every_distribution(name: str, n: int) -> None:
    """Kinds 1, 3, 5, 6."""
    budget = SPECIALISATIONS[name].geometry.budget_blocks
    for kind in KINDS:
        scores = spread(n, kind)
        with np.errstate(all="ignore"):
            wanted = np.sort(select_blocks(scores, budget))
        assert np.array_equal(select(name, scores), wanted), f"{kind}, {n} blocks"
