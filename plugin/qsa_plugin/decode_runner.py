"""Decode: one token per sequence, two kernels, one parameter struct.

score (the token's pool writes, and the score of every complete block), attend (the queries, exact best blocks, split-K
attention). Lengths and page tables are read on the device alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import jit
from .call_params import CallParams
from .contract import Call, Geometry
from .decode_plan import (
    LAYOUT,
    SCORE_WARPS,
    DecodePlan,
    DeviceLimits,
    attend_clusters,
    attend_shape,
    decode_tunings,
    plan_decode,
)
from .launch import Launch, ParamBlock, sm_count
from .specialisation import Specialisation, refusal


class DecodeParams(CallParams):
    """One decode call: S = 1, and `context_lengths` with the new token included."""

    __slots__ = ()


@dataclass(frozen=True)
class DecodeLaunches:
    """The loaded kernels.

    Attributes:
        score: decode_score, after all that is in front of it.
        score_early: decode_score, starting before what is in front of it ends, where the device can do that.
        attend: decode_attend without clusters.
        clustered: decode_attend by cluster size.
    """

    score: Launch
    score_early: Launch
    attend: Launch
    clustered: dict[int, Launch]


class QsaSparseDecodeRunner:
    """Runs decode calls of one specialisation. One runner serves one thread at a time.

    Args:
        specialisation: what to compile.
        geometry: gives the softmax scale and the epsilon.
        portable: use nothing that compute capability 8.0 lacks, whatever the device has.
    """

    def __init__(self, specialisation: Specialisation, geometry: Geometry, *, portable: bool = False) -> None:
        self.specialisation = specialisation
        self.launches: DecodeLaunches | None = None
        self.parameters = ParamBlock(LAYOUT)
        self._capability = (8, 0) if portable else specialisation.compute_capability
        self._geometry = geometry
        self._limits: DeviceLimits | None = None
        self._plan_of = functools.lru_cache(maxsize=64)(self._make_plan)
        self._planned: tuple[Call, DecodePlan] | None = None

    can_implement = staticmethod(refusal)

    def preflight(self) -> None:
        """Compile and load every kernel into the current context; call it before a graph capture."""
        if self.launches is None:
            self.launches = launches = self._load()
            at_a_time = {size: launch.clusters_at_a_time() for size, launch in launches.clustered.items()}
            self._limits = DeviceLimits(self._capability, sm_count(), at_a_time)

    def run(self, params: DecodeParams) -> None:
        """Enqueue the call on its stream: no allocation, synchronisation, module load or host copy.

        Raises:
            FailedError: a launch was refused.
        """
        launches = self.prepare(params)
        call, stream, parameters = params.call, params.stream, self.parameters
        plan = self.plan(call)
        score = launches.score_early if plan.dependent else launches.score
        score.grid(call.batch * (1 + plan.score_ctas))
        score(stream, parameters)
        attend = launches.clustered[plan.splits] if plan.clustered else launches.attend
        attend.grid(call.batch * self._geometry.num_kv_heads * plan.splits)
        attend(stream, parameters)

    def prepare(self, params: DecodeParams) -> DecodeLaunches:
        """Pack the parameters of a call, so that its stages can be launched one by one."""
        if self.launches is None:
            self.preflight()
        assert self.launches is not None
        call, geometry, workspace = params.call, self._geometry, params.workspace
        plan = self.plan(call)
        self.parameters.pack(
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
            0,
            *[workspace + offset for offset in plan.offsets],
            call.pages_per_seq,
            call.num_pages,
            call.max_positions,
            plan.score_stride,
            plan.score_ctas,
            plan.splits,
            geometry.rms_norm_eps,
            geometry.scale,
        )
        return self.launches

    def plan(self, call: Call) -> DecodePlan:
        """The plan of a call; one that comes again as the same object is not even hashed."""
        if self._planned is None or self._planned[0] is not call:
            self._planned = call, self._plan_of(call)
        return self._planned[1]

    def _make_plan(self, call: Call) -> DecodePlan:
        assert self._limits is not None
        return plan_decode(self.specialisation, call, self._limits)

    def _load(self) -> DecodeLaunches:
        spec, capability = self.specialisation, self._capability
        dependent = capability >= (9, 0)
        score, *attends = (
            jit.kernels(name, spec, [name], tuning)[0] for name, tuning in decode_tunings(spec, capability)
        )
        shape = attend_shape(spec, capability)
        return DecodeLaunches(
            score=Launch(score, SCORE_WARPS * 32),
            score_early=Launch(score, SCORE_WARPS * 32, dependent=dependent),
            attend=Launch(attends[0], shape.threads, shape.shared_bytes(spec, clustered=False), dependent=dependent),
            clustered={
                size: Launch(attends[1], shape.threads, shape.shared_bytes(spec, clustered=True), dependent, size)
                for size in attend_clusters(spec, capability)
            },
        )
