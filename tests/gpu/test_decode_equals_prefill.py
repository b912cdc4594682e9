"""Decode equals the prefill row of the same token: index sets, outputs, and the pool that both leave."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_plugin.specialisation import SPECIALISATIONS
from qsa_trt import device
from qsa_trt.paging import SequencePages, flat_pages
from tests.support.cases import decode_step, random_inputs
from tests.support.decode import DecodeHost
from tests.support.prefill import PrefillHost
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu
#: Both round the same fp32 result once, and may sum its terms in another order.
OUTPUT_ULPS = 1.01


@pytest.mark.parametrize(
    ("name", "start", "steps"),
    [
        ("real-fp16", 1, 300),
        ("real-fp16", 1900, 310),  # across 2047 .. 2053 and the page ends at 2048 and 2176
        ("real-bf16", 2040, 300),
        ("real-fp16", 4099, 300),
        ("ratio-8", 2047, 300),
        ("budget-odd-blocks", 20, 300),
        ("group-7", 505, 300),
    ],
)
def test_steps_equal_rows(name: str, start: int, steps: int) -> None:
    """Kinds 4, 23 and 7 of the contract's arithmetic."""
    spec = SPECIALISATIONS[name]
    g, total = spec.geometry, start + steps
    dtype = np.dtype(np.float16 if spec.surface == "float16" else ml_dtypes.bfloat16)
    whole = random_inputs(
        g,
        [total],
        Mode.PREFILL,
        dtype=dtype,
        rng=np.random.default_rng(start),
        rotary_dims=spec.rotary_dims,
        poison=True,
    )
    at_once = PrefillHost(g, whole).run()
    prompt = whole | {key: whole[key][:, :start] for key in ("qkv", "index_qk")}
    prompt["context_lengths"] = np.array([start], np.int32)
    pool = PrefillHost(g, prompt).run().pool
    step = decode_step(whole, pool, [start + 1], whole["qkv"][:, :1], whole["index_qk"][:, :1])
    host = DecodeHost(g, step)
    eps = 2.0**-10 if spec.surface == "float16" else 2.0**-7
    for t in range(start, total):
        host.buffers["qkv"].write(whole["qkv"][:, t])
        host.buffers["index_qk"].write(whole["index_qk"][:, t])
        host.buffers["context_lengths"].write(np.array([t + 1], np.int32))
        host.output.poison()
        device.synchronize()
        host.enqueue()
        host.stream.synchronize()
        chosen = min((t + 1) // g.indexer_compress_ratio, g.budget_blocks)
        blocks = host.workspace.read((chosen,), np.int32, host.layout.offsets["blocks"])
        assert np.array_equal(blocks, at_once.blocks(g, 0, t)), f"other blocks at token {t}"
        output = host.output.read((g.num_q_heads, g.head_size), dtype).astype(np.float64)
        row = at_once.output[0, t].astype(np.float64)
        worst = np.abs(output - row).max(-1) / np.abs(row).max(-1)
        assert worst.max() <= OUTPUT_ULPS * eps, f"token {t}: {worst.max() / eps} ulps"
    one_by_one = host.result().pool
    pages, tokens = SequencePages.of(whole["kv_page_table"], 0, g.head_size), np.arange(total)
    ratio = g.indexer_compress_ratio
    first_tokens = np.arange(total // ratio) * ratio
    open_tokens = np.arange(total // ratio * ratio, total)
    for index in (
        pages.key(tokens),
        pages.value(tokens),
        pages.block_key(first_tokens),
        pages.raw_index_key(open_tokens),
    ):
        same = flat_pages(one_by_one)[index].view(np.uint16) == flat_pages(at_once.pool)[index].view(np.uint16)
        assert same.all()
