"""Drives the prefill runner with host arrays, and says what the contract expects of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import INPUTS, Call, Geometry, check_call
from qsa_plugin.prefill_runner import PrefillParams, QsaSparsePrefillRunner
from qsa_plugin.specialisation import Specialisation, arch_of
from qsa_plugin.workspace import layout, sparse_rows
from qsa_trt import device, reference
from qsa_trt.paging import SequencePages, flat_pages

Array = NDArray[Any]


@functools.cache
def runner(geometry: Geometry, surface: str, rotary_dims: int, portable: bool) -> QsaSparsePrefillRunner:
    """A loaded runner for device 0; `portable`: without what only compute capability 9.0 has."""
    device.activate()
    capability = device.compute_capability()
    assert capability is not None
    spec = Specialisation.of(geometry, surface, rotary_dims, arch_of(capability))
    made = QsaSparsePrefillRunner(spec, geometry, portable)
    made.preflight()
    return made


@dataclass(frozen=True)
class PrefillResult:
    """What one call left: output `[B, S, Hq, D]`, the pool, and the block lists of the rows from W on."""

    output: Array
    pool: Array
    lists: NDArray[np.int32]  # [B, S - W, K]

    def blocks(self, geometry: Geometry, b: int, t: int) -> NDArray[np.int64]:
        """The complete blocks that a row attended to, ascending."""
        if t < geometry.list_width:
            return np.arange((t + 1) // geometry.indexer_compress_ratio)
        return self.lists[b, t - geometry.list_width].astype(np.int64)


class PrefillHost:
    """One prefill call's tensors on the device; lengths and any input may be rewritten in place between runs."""

    def __init__(self, geometry: Geometry, inputs: dict[str, Array], portable: bool = False) -> None:
        device.activate()
        self.geometry, self.inputs = geometry, inputs
        self.dtype = inputs["qkv"].dtype
        self.call: Call = check_call(geometry, {name: inputs[name].shape for name in inputs})
        self.layout = layout(geometry, self.call)
        self.stream = device.Stream()
        self.buffers = {tensor.name: device.Buffer.of(inputs[tensor.name]) for tensor in INPUTS}
        self._shape = (self.call.batch, self.call.seq_len, geometry.num_q_heads, geometry.head_size)
        self.output = device.Buffer(int(np.prod(self._shape)) * self.dtype.itemsize)
        self.workspace = device.Buffer(self.layout.size)
        self.runner = runner(geometry, str(self.dtype), self.call.rotary_dims, portable)
        self.params = PrefillParams(
            call=self.call,
            **{t.name: self.buffers[t.name].address for t in INPUTS if t.name != "kvcache_start_index"},
            attn_output=self.output.address,
            workspace=self.workspace.address,
            stream=self.stream.handle,
        )

    def enqueue(self) -> None:
        """Enqueue one call; does not wait."""
        self.runner.run(self.params)

    def run(self) -> PrefillResult:
        """Restore the pool, poison output and workspace, run once, wait, read back; checks every canary."""
        self.prepare()
        self.enqueue()
        self.stream.synchronize()
        return self.result()

    def prepare(self) -> None:
        """The state before a run: the inputs' pool, output and workspace full of NaN."""
        self.buffers["past_key_value"].write(self.inputs["past_key_value"])
        self.output.poison()
        self.workspace.poison()
        device.check(self.output._driver.cuCtxSynchronize())

    def result(self) -> PrefillResult:
        """What lies on the device now."""
        g, call = self.geometry, self.call
        for name, buffer in {**self.buffers, "attn_output": self.output, "workspace": self.workspace}.items():
            assert buffer.intact(), f"something wrote outside {name}"
        lists = self.workspace.read(
            (call.batch, sparse_rows(g, call), g.budget_blocks), np.int32, self.layout.offsets["block_ids"]
        )
        pool = self.buffers["past_key_value"].read(self.inputs["past_key_value"].shape, self.dtype)
        return PrefillResult(self.output.read(self._shape, self.dtype), pool, lists)


@dataclass(frozen=True)
class Deviation:
    """How far one run was from the reference: the worst of all rows, in ulps of the row's largest value."""

    output_ulps: float
    pool_ulps: float
    rows_with_other_sets: int


def compare(geometry: Geometry, inputs: dict[str, Array], result: PrefillResult, band: float) -> Deviation:
    """Compare one run with the reference; asserts what must hold exactly.

    Norms, RoPE and pool come from `qsa_trt.reference`; scores and attention are its formulas in torch, all rows at
    once, on the GPU. Sets may differ from the reference's best blocks only in blocks whose scores lie within `band`
    times the row's largest score of the k-th. Outputs are compared with attention over the row's own blocks.
    """
    call = check_call(geometry, {name: inputs[name].shape for name in inputs})
    arithmetic = reference.Arithmetic(np.dtype(np.float32), np.dtype(inputs["qkv"].dtype))
    layer = reference._layer(inputs, geometry, arithmetic)
    pool = inputs["past_key_value"].copy()
    eps = 2.0**-10 if result.output.dtype == np.float16 else 2.0**-7
    worst, others = 0.0, 0
    with np.errstate(all="ignore"):
        for b in range(call.batch):
            positions = reference.live_positions(call, int(inputs["context_lengths"][b]))
            pages = SequencePages.of(inputs["kv_page_table"], b, geometry.head_size)
            length = positions.size
            if not pages.in_range(length, call.num_pages):
                length = 0
            assert not result.output[b, length:].astype(np.float32).any(), f"padding of sequence {b} must be zeros"
            if length == 0:
                continue
            tokens = reference.prepare(layer, inputs["qkv"][b, :length], inputs["index_qk"][b, :length], positions)
            reference.write_pool(layer, pool, pages, tokens)
            blocks = flat_pages(pool)[
                pages.block_key(np.arange(length // geometry.indexer_compress_ratio) * geometry.indexer_compress_ratio)
            ]
            allowed, differing = _allowed_blocks(geometry, result, b, tokens, blocks.astype(np.float32), band)
            others += differing
            expected = _attention(geometry, tokens, allowed)  # [T, Hq, D]
            actual = result.output[b, :length].astype(np.float64)
            assert np.isfinite(actual).all(), f"sequence {b} is not finite"
            worst = max(worst, float((np.abs(actual - expected).max(-1) / np.abs(expected).max(-1)).max()) / eps)
        return Deviation(worst, _pool_ulps(pool, result.pool, eps), others)


def _allowed_blocks(
    geometry: Geometry, result: PrefillResult, b: int, tokens: reference.Tokens, keys: Array, band: float
) -> tuple[Array, int]:
    """bool `[T, G + 1]`: the blocks each row attends to, its tail included; and how many rows chose otherwise."""
    import torch

    ratio, count, rows = geometry.indexer_compress_ratio, geometry.budget_blocks, tokens.positions.size
    allowed = np.zeros((rows, keys.shape[0] + 1), bool)
    dense = min(rows, geometry.list_width)
    ids = np.arange(keys.shape[0] + 1)
    allowed[:dense] = ids <= tokens.positions[:dense, None] // ratio
    if rows == dense:
        return allowed, 0
    lists = result.lists[b, : rows - dense].astype(np.int64)
    visible = (tokens.positions[dense:] + 1) // ratio
    assert (lists >= 0).all() and (lists < visible[:, None]).all() and (np.diff(lists, axis=1) > 0).all()
    np.put_along_axis(allowed[dense:], lists, True, axis=1)
    query = torch.from_numpy(tokens.index_q[dense:]).cuda()
    key = torch.from_numpy(keys).cuda()
    scores = torch.zeros(rows - dense, keys.shape[0], device="cuda")
    for head in range(query.shape[1]):
        scores += (query[:, head] @ key.T).relu()
    scores /= np.float32(np.sqrt(geometry.indexer_head_dim))
    hidden = torch.arange(keys.shape[0], device="cuda") >= torch.from_numpy(visible).cuda()[:, None]
    scores.masked_fill_(hidden, -torch.inf)
    kth = scores.topk(count, dim=1).values[:, -1:]
    margin = band * scores.amax(1, keepdim=True)
    chosen = torch.from_numpy(allowed[dense:, :-1]).cuda()
    assert not (chosen & (scores < kth - margin)).any(), "a block far below the k-th was selected"
    assert not (~chosen & (scores > kth + margin)).any(), "a block far above the k-th was left out"
    differing = int((chosen & (scores < kth)).any(1).sum())
    open_rows = (tokens.positions + 1) % ratio != 0
    allowed[open_rows, tokens.positions[open_rows] // ratio] = True
    return allowed, differing


def _attention(geometry: Geometry, tokens: reference.Tokens, allowed: Array) -> Array:
    """fp32 attention of all rows, `[T, Hq, D]`; a row attends to the tokens of its blocks up to itself."""
    import torch

    assert not torch.backends.cuda.matmul.allow_tf32
    group, rows = geometry.group_size, tokens.positions.size
    q = torch.from_numpy(tokens.q).cuda().transpose(0, 1)  # [Hq, T, D]
    k = torch.from_numpy(tokens.k).cuda().transpose(0, 1)  # [Hkv, T, D]
    v = torch.from_numpy(tokens.v).cuda().transpose(0, 1)
    blocks = torch.from_numpy(allowed).cuda()
    t = torch.arange(rows, device="cuda")
    out = torch.empty_like(q)
    for first in range(0, rows, 512):
        part = slice(first, min(first + 512, rows))
        mask = blocks[part][:, t // geometry.indexer_compress_ratio] & (t <= t[part, None])
        for head in range(geometry.num_q_heads):
            logits = q[head, part] @ k[head // group].T * geometry.scale
            out[head, part] = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v[head // group]
    return out.transpose(0, 1).cpu().numpy().astype(np.float64)


def _pool_ulps(expected: Array, actual: Array, eps: float) -> float:
    """Largest difference in ulps of the head row's largest value; where NaN was and stays, nothing was written."""
    expected64, actual64 = expected.astype(np.float64), actual.astype(np.float64)
    assert np.array_equal(np.isnan(expected64), np.isnan(actual64)), "the pool was written where it must not be"
    expected64, actual64 = np.nan_to_num(expected64), np.nan_to_num(actual64)
    size = np.abs(expected64).max(-1, keepdims=True)
    return float((np.abs(actual64 - expected64) / np.where(size == 0, 1, size)).max()) / eps
