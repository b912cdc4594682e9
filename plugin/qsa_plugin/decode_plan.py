"""What decode launches, and how large: tile sizes, grids and splits, from shapes and the device's limits alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .contract import Call
from .specialisation import Specialisation, shared_limit
from .workspace import PARTIAL_ROWS, SCORE_TILE, layout, partial_tiles, score_stride, visible_blocks

#: The kernel files of the chain; each holds one entry of its own name.
DECODE_KERNELS = ("decode_score", "decode_attend")
#: `DecodeParams` of kernels/decode.cuh: 19 pointers, 6 int32, 2 fp32.
LAYOUT = "19Q6i2f"

#: The defines of decode_score as a stage of its own.
SCORE_STAGE = {"SCORE_STAGE": 1}
SCORE_WARPS = 8  # WARPS of decode_score.cu
SCORE_BLOCKS_AN_SM = 4  # so many warps that load; the one that appends a row's token is among them
#: Blocks of all rows up to which decode_score is let start early. Beside longer rows it delays decode_attend.
EARLY_BLOCKS = 1 << 17
#: Tiles a block at least. Fewer blocks leave processors to decode_attend, which starts beside them.
SCORE_TILES_A_BLOCK = 4
MAX_SPLITS = 16  # MAX_SPLITS of decode_attend.cu
_HISTOGRAM_BYTES = 8192  # of Histogram in decode_select.cuh
#: Costs of decode_attend in tiles: what a block does besides its tiles, and the two kinds of merge.
_BLOCK_COST, _CLUSTER_MERGE_COST, _WORKSPACE_MERGE_COST, _WORKSPACE_SPLIT_COST = 2.0, 1.0, 2.5, 0.15


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan depends on besides shapes.

    Attributes:
        capability: compute capability that the kernels may use.
        sm_count: multiprocessors.
        clusters: cluster size to the clusters of decode_attend that run at a time; empty where there are none.
    """

    capability: tuple[int, int]
    sm_count: int
    clusters: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodePlan:
    """Grids, splits and workspace offsets of one decode call.

    Attributes:
        score_ctas: blocks a row of decode_score that score; one more appends the token.
        score_stride: scores from one row to the next.
        splits: split-K splits of decode_attend.
        clustered: whether the splits of a (row, KV head) are one cluster.
        dependent: let decode_score start before what is in front of it ends.
        offsets: of live, scores, maxima, blocks, partials, stats, counters in the workspace.
    """

    score_ctas: int
    score_stride: int
    splits: int
    clustered: bool
    dependent: bool
    offsets: tuple[int, ...]


def cluster_sizes(capability: tuple[int, int]) -> tuple[int, ...]:
    """Cluster sizes to choose from; none below compute capability 9.0."""
    if capability < (9, 0):
        return ()
    return (2, 4, 8, 16) if capability in ((9, 0), (10, 0), (10, 3)) else (2, 4, 8)


@dataclass(frozen=True)
class AttendShape:
    """Tile sizes of decode_attend: 8 tokens a warp, `stages` tiles in shared memory."""

    warps: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.warps * 32

    @property
    def tile(self) -> int:
        """Tokens a tile."""
        return self.warps * 8

    def shared_bytes(self, spec: Specialisation, clustered: bool) -> int:
        """The `Shared` struct of the kernel."""
        ring = 2 * self.stages * self.tile * spec.head_size * 2
        budget = spec.geometry.budget_blocks
        quads = 8 if 32 * self.threads >= 2 * budget else 16
        select = 16 * quads * (self.threads + 1) + 8 * budget + 12 * self.warps + 300
        query = PARTIAL_ROWS * spec.head_size * 2
        received = MAX_SPLITS * PARTIAL_ROWS * 8 + max(spec.head_size // 8, MAX_SPLITS) * spec.geometry.group_size * 32
        prob = PARTIAL_ROWS * (self.tile + 8) * 2
        stats = (2 * self.warps + MAX_SPLITS) * PARTIAL_ROWS * 4
        ids = max(4 * (budget + 1), _HISTOGRAM_BYTES) + 32
        return max(ring, select) + max(query, received if clustered else 0) + prob + stats + ids

    def tuning(self, spec: Specialisation, clustered: bool) -> dict[str, int]:
        """The defines of the kernel file."""
        return {
            "ATTEND_WARPS": self.warps,
            "ATTEND_STAGES": self.stages,
            "ATTEND_CLUSTER": int(clustered),
            "ATTEND_SHARED": self.shared_bytes(spec, clustered),
        }


def attend_shape(spec: Specialisation, capability: tuple[int, int]) -> AttendShape:
    """The largest tile that shared memory holds twice; a warp needs 8 value columns of its own."""
    for clustered in (True, False):
        for warps in (8, 4):
            shape = AttendShape(min(warps, spec.head_size // 8), 2)
            if shape.shared_bytes(spec, clustered) <= shared_limit(capability):
                return shape
    raise AssertionError("every head size fits the smallest shared memory")


def attend_clusters(spec: Specialisation, capability: tuple[int, int]) -> tuple[int, ...]:
    """Cluster sizes of decode_attend; none where what clusters exchange does not fit shared memory either."""
    needed = attend_shape(spec, capability).shared_bytes(spec, clustered=True)
    return cluster_sizes(capability) if needed <= shared_limit(capability) else ()


def decode_tunings(spec: Specialisation, capability: tuple[int, int]) -> list[tuple[str, dict[str, int]]]:
    """(kernel, defines) of every cubin that this capability loads; decode_attend comes last, once or twice."""
    shape = attend_shape(spec, capability)
    return [
        ("decode_score", {}),
        ("decode_attend", shape.tuning(spec, clustered=False)),
        *([("decode_attend", shape.tuning(spec, clustered=True))] if attend_clusters(spec, capability) else []),
    ]


def plan_decode(spec: Specialisation, call: Call, limits: DeviceLimits) -> DecodePlan:
    """The plan of one call."""
    geometry = spec.geometry
    blocks = visible_blocks(geometry, call)
    scored = blocks > geometry.budget_blocks  # some length needs scores
    most = max(1, SCORE_BLOCKS_AN_SM * limits.sm_count // call.batch - 1) if call.batch > 1 else limits.sm_count
    score_ctas = min(most, math.ceil(blocks / (SCORE_TILE * SCORE_TILES_A_BLOCK))) if scored else 0
    splits, clustered = _choose_splits(spec, call, limits)
    offsets = layout(geometry, call).offsets
    slots = ("live", "scores", "maxima", "blocks", "partials", "stats", "counters")
    return DecodePlan(
        score_ctas=score_ctas,
        score_stride=score_stride(geometry, call),
        splits=splits,
        clustered=clustered,
        # beside decode_attend of the step before: worth it where the launch is what scoring mostly costs
        dependent=call.batch * (geometry.num_kv_heads * splits + (1 + score_ctas) / 2) <= limits.sm_count
        or (splits > 1 and call.batch * blocks <= EARLY_BLOCKS),
        offsets=tuple(offsets[slot] for slot in slots),
    )


def _choose_splits(spec: Specialisation, call: Call, limits: DeviceLimits) -> tuple[int, bool]:
    """(splits, clustered) of least cost: rounds over the device times the tiles of a block, and the merge.

    Clusters merge faster, but do not fill a device whose processors are no multiple of the cluster in every group.
    """
    geometry = spec.geometry
    pairs = call.batch * geometry.num_kv_heads
    tokens = min(geometry.list_width, call.max_kv_len)
    tiles = math.ceil(tokens / attend_shape(spec, limits.capability).tile)
    most = min(MAX_SPLITS, tiles, partial_tiles(geometry, call) // pairs)
    costs: dict[tuple[int, bool], float] = {}
    for splits in range(1, max(most, 1) + 1):
        block = math.ceil(tiles / splits) + _BLOCK_COST
        merge = _WORKSPACE_MERGE_COST + _WORKSPACE_SPLIT_COST * splits if splits > 1 else 0.0
        costs[splits, False] = math.ceil(pairs * splits / limits.sm_count) * block + merge
        if at_a_time := limits.clusters.get(splits, 0):
            costs[splits, True] = math.ceil(pairs / at_a_time) * (block + _CLUSTER_MERGE_COST)
    return min(costs, key=lambda key: (costs[key], key))
