"""Decode: one token per sequence, four kernels, one parameter struct.

append (norm, RoPE, pool writes), score (every complete block), select (exact best blocks), attend (split-K). The grids
depend on shapes, the SM count and the compute capability alone; lengths and page tables are read on the device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from . import jit
from .contract import Call, Geometry
from .errors import QsaError
from .launch import Launch, ParamBlock
from .specialisation import Specialisation
from .workspace import PARTIAL_ROWS, layout, partial_tiles, score_stride, visible_blocks

#: `DecodeParams` of kernels/decode.cuh: 19 pointers, 7 int32, 2 fp32.
LAYOUT = "19Q7i2f"
#: Dynamic shared memory a block may have, by compute capability; 99 KiB where it is not listed.
SHARED_LIMITS = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}

_HEAD_WARPS = 8  # WARPS of decode_append.cu
_SCORE_TILE = 16  # TILE of decode_score.cu
_SCORE_WARPS = 8
_SCORE_BLOCKS_AN_SM = 2
_SELECT_THREADS = 1024
_ATTEND_THREADS = 128
_ATTEND_TILE = 32  # TILE of decode_attend.cu


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """One decode call. Device addresses carry the names of the contract; all lie on the device of the current context.

    Attributes:
        call: sizes, as `contract.check_call` returns them, with mode decode.
        qkv: surface `[B, 1, (Hq+2*Hkv)*D]`.
        index_qk: surface `[B, 1, (Ih+1)*Id]`.
        past_key_value: surface `[2, N, P, Hkv, D+Id]`, updated in place.
        context_lengths: int32 `[B]`, the new token included.
        rope_rotary_cos_sin: fp32 `[1, maxPos, rotary]`.
        kv_page_table: int32 `[B, 2, M]`.
        q_norm_gamma: surface `[D]`.
        k_norm_gamma: surface `[D]`.
        indexer_q_norm_gamma: surface `[Id]`.
        indexer_k_norm_gamma: surface `[Id]`.
        attn_output: surface `[B, 1, Hq, D]`.
        workspace: `workspace.layout(geometry, call).size` bytes at a multiple of 256; its content is garbage.
        stream: raw CUstream handle.
    """

    call: Call
    qkv: int
    index_qk: int
    past_key_value: int
    context_lengths: int
    rope_rotary_cos_sin: int
    kv_page_table: int
    q_norm_gamma: int
    k_norm_gamma: int
    indexer_q_norm_gamma: int
    indexer_k_norm_gamma: int
    attn_output: int
    workspace: int
    stream: int


@dataclass(frozen=True)
class DecodePlan:
    """What follows from the shapes: grids, splits and workspace offsets of one decode call."""

    append_ctas: int
    score_ctas: int  # a row
    score_stride: int
    splits: int
    offsets: tuple[int, ...]  # query, index_query, live, scores, blocks, partials, stats, counters


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of dynamic shared memory that a thread block may use."""
    return SHARED_LIMITS.get(capability, 99) * 1024


def decode_splits(geometry: Geometry, call: Call, sm_count: int, capability: tuple[int, int]) -> int:
    """Split-K splits: about two thread blocks an SM over all rows and KV heads, and no more than there are tiles.

    Where the device has clusters, the splits of a (row, KV head) are one, and their number a power of two.
    """
    pairs = call.batch * geometry.num_kv_heads
    tiles = math.ceil(min(geometry.list_width, call.max_kv_len) / _ATTEND_TILE)
    splits = max(1, min(2 * sm_count // pairs, max_splits(capability), tiles, partial_tiles(geometry, call) // pairs))
    return 1 << (splits.bit_length() - 1) if has_clusters(capability) else splits


def has_clusters(capability: tuple[int, int]) -> bool:
    """Whether thread blocks can form clusters with distributed shared memory."""
    return capability >= (9, 0)


def max_splits(capability: tuple[int, int]) -> int:
    """Splits at most: the largest cluster, or what one thread block merges in reasonable time."""
    return 16 if capability in ((9, 0), (10, 0), (10, 3)) else 8


def plan_decode(geometry: Geometry, call: Call, sm_count: int, capability: tuple[int, int]) -> DecodePlan:
    """The plan of one call; a function of shapes, SM count and compute capability alone."""
    tiles = math.ceil(max(visible_blocks(geometry, call), 1) / _SCORE_TILE)
    query_heads = geometry.num_q_heads + geometry.indexer_n_heads
    offsets = layout(geometry, call).offsets
    slots = ("query", "index_query", "live", "scores", "blocks", "partials", "stats", "counters")
    return DecodePlan(
        append_ctas=1 + math.ceil(query_heads / _HEAD_WARPS),
        score_ctas=max(1, min(_SCORE_BLOCKS_AN_SM * sm_count // call.batch, tiles)),
        score_stride=score_stride(geometry, call),
        splits=decode_splits(geometry, call, sm_count, capability),
        offsets=tuple(offsets[slot] for slot in slots),
    )


class QsaSparseDecodeRunner:
    """Runs decode calls of one specialisation. One runner serves one thread at a time.

    Args:
        specialisation: what to compile.
        geometry: gives the softmax scale and the epsilon.
        portable: use nothing that compute capability 8.0 lacks, whatever the device has.
    """

    def __init__(self, specialisation: Specialisation, geometry: Geometry, *, portable: bool = False) -> None:
        self.specialisation = specialisation
        self._capability = (8, 0) if portable else specialisation.compute_capability
        self._geometry = geometry
        self._parameters = ParamBlock(LAYOUT)
        self._launches: tuple[Launch, Launch, Launch, dict[int, Launch]] | None = None
        self._sm_count = 0
        self._plan = functools.lru_cache(maxsize=64)(self._make_plan)

    @staticmethod
    def can_implement(geometry: Geometry, surface: str, rotary_dims: int, arch: str) -> str | None:
        """Why the kernels refuse this node on this target; None when they run it."""
        try:
            Specialisation.of(geometry, surface, rotary_dims, arch)
        except QsaError as error:
            return str(error)
        return None

    def preflight(self) -> None:
        """Compile and load every kernel into the current context; call it before a graph capture."""
        if self._launches is None:
            self._sm_count = _sm_count()
            self._launches = self._load()

    def run(self, params: DecodeParams) -> None:
        """Enqueue the call on its stream: no allocation, synchronisation, module load or host copy.

        Raises:
            FailedError: a launch was refused.
        """
        if self._launches is None:
            self.preflight()
        assert self._launches is not None
        append, score, select, attends = self._launches
        call = params.call
        plan, geometry, stream, parameters = self._plan(call), self._geometry, params.stream, self._parameters
        workspace = params.workspace
        query, index_query, live, scores, blocks, partials, stats, counters = plan.offsets
        parameters.pack(
            params.qkv,
            params.index_qk,
            params.past_key_value,
            params.context_lengths,
            params.rope_rotary_cos_sin,
            params.kv_page_table,
            params.q_norm_gamma,
            params.k_norm_gamma,
            params.indexer_q_norm_gamma,
            params.indexer_k_norm_gamma,
            params.attn_output,
            workspace + query,
            workspace + index_query,
            workspace + live,
            workspace + scores,
            workspace + blocks,
            workspace + partials,
            workspace + stats,
            workspace + counters,
            call.batch,
            call.pages_per_seq,
            call.num_pages,
            call.max_positions,
            plan.score_stride,
            plan.score_ctas,
            plan.splits,
            geometry.rms_norm_eps,
            geometry.scale,
        )
        append.grid(call.batch * plan.append_ctas)
        append(stream, parameters)
        if call.max_kv_len // geometry.indexer_compress_ratio > geometry.budget_blocks:  # some length needs scores
            score.grid(call.batch * plan.score_ctas)
            score(stream, parameters)
        select.grid(call.batch)
        select(stream, parameters)
        attend = attends[plan.splits] if len(attends) > 1 else attends[1]
        attend.grid(call.batch * geometry.num_kv_heads * plan.splits)
        attend(stream, parameters)

    def _make_plan(self, call: Call) -> DecodePlan:
        return plan_decode(self._geometry, call, self._sm_count, self._capability)

    def _load(self) -> tuple[Launch, Launch, Launch, dict[int, Launch]]:
        """The kernels in the order of the chain; each but the first may start before the one in front ends.

        decode_attend has one launch for every cluster size; without clusters one launch (size 1) serves all splits.
        """
        spec, capability = self.specialisation, self._capability
        dependent = capability >= (9, 0)
        tuning = {name: decode_tuning(name, spec, capability) for name in DECODE_KERNELS}
        append, score, select, attend = (jit.kernels(name, spec, [name], tuning[name])[0] for name in DECODE_KERNELS)
        clusters = [1, 2, 4, 8, 16] if has_clusters(capability) else [1]
        return (
            Launch(append, _HEAD_WARPS * 32),
            Launch(score, _SCORE_WARPS * 32, dependent=dependent),
            Launch(select, _SELECT_THREADS, 4 * tuning["decode_select"]["SELECT_SHARED_KEYS"], dependent=dependent),
            {
                size: Launch(
                    attend, _ATTEND_THREADS, tuning["decode_attend"]["ATTEND_SHARED"], dependent=dependent, cluster=size
                )
                for size in clusters
                if size <= max_splits(capability)
            },
        )


#: The kernel files of the chain; each holds one entry of its own name.
DECODE_KERNELS = ("decode_append", "decode_score", "decode_select", "decode_attend")


def decode_tuning(name: str, spec: Specialisation, capability: tuple[int, int]) -> dict[str, int]:
    """The defines of one decode kernel that depend on what a compute capability offers."""
    small = shared_limit(capability) < 150 * 1024
    if name == "decode_select":
        return {"SELECT_SHARED_KEYS": 16384 if small else 32768}
    if name == "decode_attend":
        stages, clusters = 2 if small else 3, has_clusters(capability)
        shared = attend_shared(spec, stages, clusters)
        return {"ATTEND_STAGES": stages, "ATTEND_CLUSTER": int(clusters), "ATTEND_SHARED": shared}
    return {}


def attend_shared(spec: Specialisation, stages: int, clusters: bool) -> int:
    """Dynamic shared bytes of decode_attend: its `Shared` struct."""
    ring = 2 * stages * _ATTEND_TILE * spec.head_size * 2
    query = PARTIAL_ROWS * spec.head_size * 2
    statistics = 16 * PARTIAL_ROWS * 4  # of 16 splits
    received = 2 * statistics + max(spec.head_size // 8, 16) * spec.geometry.group_size * 32
    scores = PARTIAL_ROWS * (_ATTEND_TILE + 4) * 4
    return ring + max(query, received if clusters else statistics) + scores + PARTIAL_ROWS * 4 + 16


def _sm_count() -> int:
    from cuda.core import Device

    return int(Device().properties.multiprocessor_count)


__all__ = [
    "DECODE_KERNELS",
    "LAYOUT",
    "DecodeParams",
    "DecodePlan",
    "QsaSparseDecodeRunner",
    "attend_shared",
    "decode_splits",
    "decode_tuning",
    "plan_decode",
]
