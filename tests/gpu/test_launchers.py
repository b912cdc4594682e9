"""The stage launchers that decode adds, on raw addresses, against the reference's own functions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_plugin.launchers import StageLaunchers
from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_trt import device
from qsa_trt.paging import SequencePages, flat_pages
from qsa_trt.reference import block_scores, rms_norm, rotate
from tests.support.cases import random_inputs
from tests.support.requirements import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("name", ["real-fp16", "head-64", "ratio-8"])
def test_one_query_is_prepared_and_scored(name: str) -> None:
    """Below the budget and above it, and an inactive row."""
    capability = device.compute_capability()
    assert capability is not None
    device.activate()
    spec = SPECIALISATIONS[name].on(arch_of(capability))
    g = spec.geometry
    lengths = [300, g.indexer_budget * 2 + 9, 0]
    dtype = np.dtype(np.float16 if spec.surface == "float16" else ml_dtypes.bfloat16)
    inputs = random_inputs(
        g,
        lengths,
        Mode.DECODE,
        dtype=dtype,
        rng=np.random.default_rng(5),
        rotary_dims=spec.rotary_dims,
        poison=True,
    )
    stages, stream = StageLaunchers(spec, g), device.Stream()
    held = {key: device.Buffer.of(array) for key, array in inputs.items()}
    past = np.maximum(np.array(lengths, np.int32) - 1, 0)
    held["past"] = device.Buffer.of(past)
    held["live"] = device.Buffer.of((np.array(lengths) > 0).astype(np.int32))
    pages = inputs["kv_page_table"].shape[2]
    stride = pages * 128 // g.indexer_compress_ratio
    batch = len(lengths)
    queries = held["queries"] = device.Buffer(batch * g.indexer_n_heads * g.indexer_head_dim * 2)
    scores = held["scores"] = device.Buffer(batch * stride * 4)
    device.synchronize()
    stages.qprep(
        stream.handle,
        index_qk=held["index_qk"].address,
        out=queries.address,
        rope=held["rope_rotary_cos_sin"].address,
        weight=held["indexer_q_norm_gamma"].address,
        live=held["live"].address,
        past=held["past"].address,
        batch=batch,
    )
    stages.score(
        stream.handle,
        queries=queries.address,
        pool=held["past_key_value"].address,
        page_table=held["kv_page_table"].address,
        context_lengths=held["context_lengths"].address,
        scores=scores.address,
        batch=batch,
        pages_per_seq=pages,
        num_pages=inputs["past_key_value"].shape[1],
        stride=stride,
    )
    stream.synchronize()
    assert all(buffer.intact() for buffer in held.values())
    got_queries = queries.read((batch, g.indexer_n_heads, g.indexer_head_dim), dtype).astype(np.float32)
    got_scores = scores.read((batch, stride), np.float32)
    eps = 2.0**-10 if spec.surface == "float16" else 2.0**-7
    table = inputs["rope_rotary_cos_sin"][0]
    for row, length in enumerate(lengths):
        blocks = length // g.indexer_compress_ratio
        assert np.isnan(got_scores[row, blocks:]).all(), "a score behind the complete blocks was written"
        if not length:
            continue
        raw = inputs["index_qk"][row, 0].astype(np.float32).reshape(-1, g.indexer_head_dim)[:-1]
        cos, sin = np.split(table[length - 1], 2)
        weight = 1 + inputs["indexer_q_norm_gamma"].astype(np.float32)
        expected = rotate(rms_norm(raw, g.rms_norm_eps) * weight, cos, sin)
        worst = np.abs(got_queries[row] - expected).max(-1) / np.abs(expected).max(-1)
        assert worst.max() <= 0.51 * eps  # one rounding to nearest, and fp32's own
        positions = np.arange(blocks) * g.indexer_compress_ratio
        pages_of_row = SequencePages.of(inputs["kv_page_table"], row, g.head_size)
        keys = flat_pages(inputs["past_key_value"])[pages_of_row.block_key(positions)].astype(np.float32)
        if length % g.indexer_compress_ratio == 0:
            keys = keys[:-1]  # this token's own block is not complete before its state is written
        reference = block_scores(got_queries[row][None], keys)[0]
        difference = np.abs(got_scores[row, : len(reference)] - reference)
        assert difference.max() <= 1e-5 * reference.max()  # fp32 sums of 128 products in another order
