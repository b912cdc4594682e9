"""The stages of prefill on their own, and in two parts with a past, against whole runs of the runner."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from qsa_plugin.prefill_launchers import PrefillLaunchers, score_stride
from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_plugin.workspace import SELECT_ROWS, select_sizes, sparse_rows, visible_blocks
from qsa_trt import device
from tests.gpu.test_prefill import host_of
from tests.support.prefill import PrefillHost
from tests.support.requirements import needs_gpu, needs_oracle

pytestmark = [*needs_gpu, *needs_oracle]
LENGTHS = [700, 531]


def launchers(name: str, portable: bool = False) -> PrefillLaunchers:
    device.activate()
    capability = device.compute_capability()
    assert capability is not None
    spec = SPECIALISATIONS[name].on(arch_of(capability))
    return PrefillLaunchers(spec, spec.geometry, portable)


def sparse_arguments(host: PrefillHost) -> dict[str, int]:
    """What the stages of the sparse rows have in common."""
    live = host.workspace.address + host.layout.offsets["rows"]
    return {
        "live": live,
        "past": live + 4 * host.call.batch,
        "batch": host.call.batch,
        "seq_len": host.call.seq_len,
        "row_begin": host.geometry.list_width,
        "rows": sparse_rows(host.geometry, host.call),
    }


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("lengths", [LENGTHS, [8700, 8200]], ids=["one-chunk", "two-chunks"])
def test_scores_select_what_the_runner_selected(lengths: list[int], portable: bool) -> None:
    """score_rows_tc and select_rows repeat the runner's lists bit for bit; score_rows agrees; -inf past each row.

    The longer rows see more blocks than the runner scores at a time.
    """
    _, host = host_of("head-64", lengths, portable=portable)
    result, stages, g = host.run(), launchers("head-64", portable), host.geometry
    common = sparse_arguments(host)
    blocks, rows = visible_blocks(g, host.call), common["rows"]
    stride = score_stride(blocks)
    shape = (host.call.batch, rows, stride)
    tensor_core, scalar = device.Buffer(int(np.prod(shape)) * 4), device.Buffer(int(np.prod(shape)) * 4)
    for launch, scores in ((stages.score_rows_tc, tensor_core), (stages.score_rows, scalar)):
        launch(
            host.stream.handle,
            queries=host.workspace.address + host.layout.offsets["index_rows"],
            pool=host.params.past_key_value,
            page_table=host.params.kv_page_table,
            pages_per_seq=host.call.pages_per_seq,
            scores=scores.address,
            stride=stride,
            **common,
        )
    visible = np.zeros(shape[:2], np.int32)
    for b, length in enumerate(lengths):
        positions = np.arange(g.list_width, length)
        visible[b, : positions.size] = (positions + 1) // g.indexer_compress_ratio
    counts, lists = device.Buffer.of(visible), device.Buffer(visible.size * g.budget_blocks * 4)
    stages.select_rows(
        host.stream.handle,
        scores=tensor_core.address,
        counts=counts.address,
        lists=lists.address,
        rows=visible.size,
        stride=stride,
    )
    host.stream.synchronize()
    assert tensor_core.intact() and scalar.intact() and lists.intact()
    one, other = tensor_core.read(shape, np.float32), scalar.read(shape, np.float32)
    hidden = np.arange(stride) >= visible[..., None]
    assert (one[hidden] == -np.inf).all() and (other[hidden] == -np.inf).all()
    # fp32 sums of 32 products in two orders, partial sums up to about 30: 32 * 30 * 2^-23
    assert np.allclose(one[~hidden], other[~hidden], rtol=1e-5, atol=1.2e-4)
    again = lists.read(result.lists.shape, np.int32)
    for b, length in enumerate(lengths):
        assert np.array_equal(again[b, : length - g.list_width], result.lists[b, : length - g.list_width])


@pytest.mark.parametrize("name", ["real-fp16", "real-bf16", "head-64", "ratio-8", "budget-odd-blocks", "index-heads-1"])
def test_both_forms_of_scoring_give_the_same_bits(name: str) -> None:
    """Warpgroup products (compute capability 9.0) and mma.sync, for 1, 4, 5 and 8 heads of 32, 64 and 128."""
    budget = SPECIALISATIONS[name].indexer_budget
    _, host = host_of(name, [budget + 603, budget + 100])
    host.run()
    common = sparse_arguments(host)
    stride = score_stride(visible_blocks(host.geometry, host.call))
    shape = (host.call.batch, common["rows"], stride)
    scores = []
    for portable in (False, True):
        buffer = device.Buffer(int(np.prod(shape)) * 4)
        launchers(name, portable).score_rows_tc(
            host.stream.handle,
            queries=host.workspace.address + host.layout.offsets["index_rows"],
            pool=host.params.past_key_value,
            page_table=host.params.kv_page_table,
            pages_per_seq=host.call.pages_per_seq,
            scores=buffer.address,
            stride=stride,
            **common,
        )
        host.stream.synchronize()
        assert buffer.intact()
        scores.append(buffer.read(shape, np.float32))
    assert np.isfinite(scores[0]).sum() > common["rows"] * budget // host.geometry.indexer_compress_ratio
    assert np.array_equal(scores[0].view(np.uint32), scores[1].view(np.uint32))


def test_expand_and_gather() -> None:
    """Token lists of the contract's form, and the rows of K and V that they name; zeros for -1."""
    _, host = host_of("group-7", LENGTHS)
    result, stages, g = host.run(), launchers("group-7"), host.geometry
    common = sparse_arguments(host)
    shape = (host.call.batch, common["rows"], g.list_width)
    tokens = device.Buffer(int(np.prod(shape)) * 4)
    stages.expand(
        host.stream.handle,
        lists=host.workspace.address + host.layout.offsets["block_ids"],
        tokens=tokens.address,
        **common,
    )
    packed_shape = (*shape, g.num_kv_heads, g.head_size)
    keys, values = (device.Buffer(int(np.prod(packed_shape)) * 2) for _ in range(2))
    stages.gather(
        host.stream.handle,
        tokens=tokens.address,
        pool=host.params.past_key_value,
        page_table=host.params.kv_page_table,
        keys=keys.address,
        values=values.address,
        batch=shape[0],
        rows=shape[1],
        width=shape[2],
        pages_per_seq=host.call.pages_per_seq,
    )
    host.stream.synchronize()
    assert tokens.intact() and keys.intact() and values.intact()
    listed = tokens.read(shape, np.int32)
    ratio, pool = g.indexer_compress_ratio, result.pool.reshape(-1, *result.pool.shape[2:])
    packed = [buffer.read(packed_shape, host.dtype) for buffer in (keys, values)]
    for b, length in enumerate(LENGTHS):
        for row in range(shape[1]):
            t = g.list_width + row
            expected = np.full(g.list_width, -1)
            if t < length:
                selected = (result.lists[b, row][:, None] * ratio + np.arange(ratio)).ravel()
                attended = np.concatenate([selected, np.arange((t + 1) // ratio * ratio, t + 1)])
                expected[: attended.size] = attended
            assert np.array_equal(listed[b, row], expected)
        for plane in (0, 1):
            row_tokens = listed[b, length - g.list_width - 1]  # of the last real row
            pages = host.inputs["kv_page_table"][b, plane][row_tokens // 128]
            stored = pool[pages, row_tokens % 128, :, : g.head_size]
            stored = np.where((row_tokens < 0)[:, None, None], np.zeros_like(stored), stored)
            actual = packed[plane][b, length - g.list_width - 1]
            assert np.array_equal(actual.view(np.uint16), stored.view(np.uint16))


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
@pytest.mark.parametrize("name", ["head-64", "group-16"])
@pytest.mark.parametrize("first", [301, 128, 4])
def test_two_parts_equal_the_whole(name: str, portable: bool, first: int) -> None:
    """A past length a sequence: pool and selections bit for bit as in one call, outputs within rounding."""
    budget = SPECIALISATIONS[name].indexer_budget
    lengths = [budget + 203, budget + 86]
    _, host = host_of(name, lengths, portable=portable)
    whole, stages, g, dtype = host.run(), launchers(name, portable), host.geometry, host.dtype
    host.prepare()
    outputs, lists = [], []
    for begin, end in ((0, first), (first, max(lengths))):
        seq_len = end - begin
        output, part_lists = run_part(stages, host, lengths, begin, end)
        outputs.append(output.read((2, seq_len, g.num_q_heads, g.head_size), dtype))
        lists.append(part_lists.read((2, seq_len, g.budget_blocks), np.int32))
        assert output.intact() and part_lists.intact()
    pool = host.buffers["past_key_value"].read(whole.pool.shape, dtype)
    for b, length in enumerate(lengths):
        chosen = np.concatenate(lists, axis=1)[b, g.list_width : length]
        assert np.array_equal(chosen, whole.lists[b, : length - g.list_width])
        actual = np.concatenate(outputs, axis=1)[b, :length].astype(np.float32)
        expected = whole.output[b, :length].astype(np.float32)
        eps = 2.0**-10 if dtype == np.float16 else 2.0**-7
        # rows stand in other tiles, so sums have another order
        assert (np.abs(actual - expected).max(-1) <= 2 * eps * np.abs(expected).max(-1)).all()
    # the raw keys that the first part left in a block which the second completed stay behind, as after decode
    d = g.head_size
    assert same_bits(pool[..., :d], whole.pool[..., :d])
    assert same_bits(pool[1], whole.pool[1])


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(one).view(np.uint16), np.ascontiguousarray(other).view(np.uint16))


def run_part(
    stages: PrefillLaunchers, host: PrefillHost, lengths: list[int], begin: int, end: int
) -> tuple[device.Buffer, device.Buffer]:
    """Tokens [begin, end) of every sequence as a call of its own; its output and block lists."""
    g, call, stream, inputs = host.geometry, host.call, host.stream.handle, host.inputs
    seq_len, batch = end - begin, call.batch

    def upload(array: np.ndarray) -> device.Buffer:
        return device.Buffer.of(np.ascontiguousarray(array))

    qkv, index_qk = upload(inputs["qkv"][:, begin:end]), upload(inputs["index_qk"][:, begin:end])
    totals = upload(np.minimum(np.array(lengths), end).astype(np.int32))
    pasts = upload(np.full(batch, begin, np.int32))
    live, past = device.Buffer(4 * batch), device.Buffer(4 * batch)
    output = device.Buffer(batch * seq_len * g.num_q_heads * g.head_size * 2)
    queries = device.Buffer(batch * seq_len * g.indexer_n_heads * g.indexer_head_dim * 2)
    scratch = device.Buffer(SELECT_ROWS * sum(select_sizes(g, end // g.indexer_compress_ratio)) * 2 * 4)
    lists = device.Buffer(batch * seq_len * g.budget_blocks * 4)
    entries = device.Buffer(batch * (seq_len + 10) * (2 * g.budget_blocks + 70) * 4)
    counts = device.Buffer(batch * seq_len * 16)
    shape: Mapping[str, int] = {"batch": batch, "seq_len": seq_len}
    rows: Mapping[str, int] = {"live": live.address, "past": past.address}
    pages: Mapping[str, int] = {"page_table": host.params.kv_page_table, "pages_per_seq": call.pages_per_seq}
    pool: Mapping[str, int] = {"pool": host.params.past_key_value}
    span: Mapping[str, int] = {"row_begin": 0, "rows": seq_len}
    union: Mapping[str, int] = {"entries": entries.address, "counts": counts.address}
    p, rope = host.params, host.params.rope_rotary_cos_sin
    stages.plan(
        stream,
        context_lengths=totals.address,
        past_lengths=pasts.address,
        num_pages=call.num_pages,
        max_kv_len=call.max_kv_len,
        **pages,
        **rows,
        **shape,
    )
    stages.write(
        stream,
        qkv=qkv.address,
        q_out=output.address,
        rope=rope,
        q_gamma=p.q_norm_gamma,
        k_gamma=p.k_norm_gamma,
        **pool,
        **pages,
        **rows,
        **shape,
    )
    weight = p.indexer_k_norm_gamma
    stages.block_pool(stream, index_qk=index_qk.address, rope=rope, weight=weight, **pool, **pages, **rows, **shape)
    stages.prefill_attn_dense(stream, q=output.address, out=output.address, **pool, **pages, **rows, **shape)
    weight = p.indexer_q_norm_gamma
    stages.qprep_rows(
        stream, index_qk=index_qk.address, out=queries.address, rope=rope, weight=weight, **rows, **shape, **span
    )
    stages.select_tiles(
        stream,
        queries=queries.address,
        scratch=scratch.address,
        lists=lists.address,
        blocks=end // g.indexer_compress_ratio,
        **pool,
        **pages,
        **rows,
        **shape,
        **span,
    )
    stages.union(stream, lists=lists.address, **union, **rows, **shape, **span)
    stages.prefill_attn(stream, q=output.address, out=output.address, **union, **pool, **pages, **rows, **shape, **span)
    host.stream.synchronize()
    return output, lists
