"""Plans of decode: functions of shapes and device limits, inside the workspace and the grid limits."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import pytest

from qsa_plugin import decode_plan, jit
from qsa_plugin.contract import Call, Mode
from qsa_plugin.decode_plan import (
    LAYOUT,
    MAX_SPLITS,
    SCORE_BLOCKS_AN_SM,
    DeviceLimits,
    attend_clusters,
    attend_shape,
    cluster_sizes,
    plan_decode,
)
from qsa_plugin.decode_runner import QsaSparseDecodeRunner
from qsa_plugin.kernel_limits import HEAD_SIZES, MAX_GROUP_SIZE
from qsa_plugin.launch import ParamBlock
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, shared_limit
from qsa_plugin.workspace import layout, partial_tiles

HOPPER = DeviceLimits((9, 0), 132, {2: 66, 4: 32, 8: 15, 16: 7})
SMALL = DeviceLimits((8, 6), 28)
SPEC = SPECIALISATIONS["real-fp16"]


def call_of(batch: int, pages: int) -> Call:
    return Call(Mode.DECODE, batch, 1, batch * pages, pages, pages * 128, 64)


@pytest.mark.parametrize("limits", [HOPPER, SMALL])
@pytest.mark.parametrize("batch", [1, 2, 3, 16, 17, 64, 65, 300, 4096])
@pytest.mark.parametrize("pages", [1, 16, 17, 1024, 8192])
def test_splits_fit_workspace_and_device(limits: DeviceLimits, batch: int, pages: int) -> None:
    for spec in SPECIALISATIONS.values():
        plan = plan_decode(spec, call_of(batch, pages), limits)
        pairs = batch * spec.num_kv_heads
        assert 1 <= plan.splits <= MAX_SPLITS
        assert plan.splits * pairs <= partial_tiles(spec.geometry, call_of(batch, pages))
        assert plan.splits == 1 or not plan.clustered or plan.splits in limits.clusters
        assert plan.score_stride % 4 == 0
        assert (plan.score_ctas > 0) == (pages * 128 // spec.indexer_compress_ratio > spec.geometry.budget_blocks)
        assert pairs * plan.splits < 2**31  # one-dimensional grids


@pytest.mark.parametrize("capability", ARCHES)
def test_every_legal_geometry_fits_shared_memory(capability: tuple[int, int]) -> None:
    """The largest budget, every head size and group; clusters only where what they exchange fits too."""
    widest = replace(SPEC, indexer_budget=8192, indexer_compress_ratio=2, rotary_dims=32)
    for head_size in HEAD_SIZES:
        for group in range(1, MAX_GROUP_SIZE + 1):
            spec = replace(widest, head_size=head_size, num_q_heads=group * widest.num_kv_heads)
            shape = attend_shape(spec, capability)
            for clustered in {False, bool(attend_clusters(spec, capability))}:
                assert shape.shared_bytes(spec, clustered) <= shared_limit(capability)


def test_a_small_batch_is_split_and_a_large_one_is_not() -> None:
    assert plan_decode(SPEC, call_of(1, 64), HOPPER).splits == 16
    assert plan_decode(SPEC, call_of(64, 64), HOPPER).splits == 1


def test_scoring_starts_early_only_where_it_is_short() -> None:
    assert plan_decode(SPEC, call_of(1, 64), HOPPER).dependent
    assert plan_decode(SPEC, call_of(16, 256), HOPPER).dependent
    assert not plan_decode(SPEC, call_of(16, 1024), HOPPER).dependent
    assert not plan_decode(SPEC, call_of(64, 64), HOPPER).dependent
    assert not plan_decode(SPEC, call_of(64, 1024), HOPPER).dependent


@pytest.mark.parametrize("batch", [2, 16, 64, 131])
def test_blocks_that_score_and_append_run_in_one_round(batch: int) -> None:
    plan = plan_decode(SPEC, call_of(batch, 1024), HOPPER)
    assert batch * (plan.score_ctas + 1) <= SCORE_BLOCKS_AN_SM * HOPPER.sm_count < batch * (plan.score_ctas + 2)


def test_the_histogram_is_as_large_as_the_kernels() -> None:
    bits = re.search(r"BIN_BITS = (\d+);", (jit.kernel_folder() / "decode_select.cuh").read_text())
    assert bits is not None and 4 << int(bits[1]) == decode_plan._HISTOGRAM_BYTES


def test_tables_within_the_budget_score_nothing() -> None:
    assert plan_decode(SPEC, call_of(3, 16), HOPPER).score_ctas == 0
    assert plan_decode(SPEC, call_of(3, 17), HOPPER).score_ctas > 0


def test_one_page_is_never_split_into_more_parts_than_it_has_tiles() -> None:
    assert plan_decode(SPEC, call_of(1, 1), HOPPER).splits <= 2


def test_devices_without_clusters_get_none() -> None:
    assert cluster_sizes((8, 9)) == ()
    assert 16 in cluster_sizes((9, 0))
    assert not any(plan_decode(SPEC, call_of(batch, 64), SMALL).clustered for batch in (1, 4, 16, 64))


def test_offsets_are_the_workspaces() -> None:
    call = call_of(3, 40)
    offsets = layout(SPEC.geometry, call).offsets
    assert plan_decode(SPEC, call, HOPPER).offsets == tuple(
        offsets[slot] for slot in ("live", "scores", "maxima", "blocks", "partials", "stats", "counters")
    )


def test_the_layout_is_the_structs() -> None:
    """Pointers, then 4-byte fields, as many as `DecodeParams` in decode.cuh has."""
    source = (jit.kernel_folder() / "decode.cuh").read_text()
    body = re.search(r"struct DecodeParams \{(.*?)\n\};", source, re.DOTALL)
    assert body is not None
    fields = re.findall(r"^\s+(?:const )?(\w+\*?) (\w+);", body[1], re.MULTILINE)
    codes = "".join("Q" if kind.endswith("*") else {"int": "i", "float": "f"}[kind] for kind, _ in fields)
    spelled = "".join(code * int(count or 1) for count, code in re.findall(r"(\d*)(\w)", LAYOUT))
    assert codes == spelled
    assert ParamBlock(LAYOUT).size == (struct.calcsize("=" + LAYOUT) + 7) // 8 * 8


def test_a_runner_gives_every_call_its_own_plan_in_any_order() -> None:
    """It remembers the last call as an object, and plans by value."""
    runner = QsaSparseDecodeRunner(SPEC, SPEC.geometry)
    runner._limits = HOPPER
    short, long = call_of(1, 64), call_of(16, 1024)
    for call in (short, long, long, short, call_of(16, 1024), replace(short)):
        assert runner.plan(call) == plan_decode(SPEC, call, HOPPER)
    assert runner.plan(short) is runner.plan(replace(short))
