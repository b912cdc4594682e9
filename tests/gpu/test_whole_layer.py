"""Whole layers through the plugin against Hugging Face's own module on the GPU, in the surface dtype and in fp64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import PAGE_SIZE, Geometry, Mode
from qsa_plugin.specialisation import SPECIALISATIONS
from qsa_trt.metrics import row_error
from qsa_trt.paging import blank_dead_entries, empty_pool, page_table, pages_for
from tests.gpu.conftest import RecordError
from tests.support.cases import start_index
from tests.support.hf import HfAttention, HfRows
from tests.support.node import (
    BANDS,
    OUTPUT_ULPS,
    POOL_ULPS,
    Inputs,
    call_of,
    deviation,
    launch,
    listed_blocks,
    needs_node,
    open_node,
    prompt,
    token,
)
from tests.support.requirements import needs_oracle
from tests.support.spot_rows import SpotRows

Array = NDArray[Any]
pytestmark = [*needs_node, *needs_oracle]
#: Of the module's own error in the same dtype, both against the module in fp64.
TIMES_THE_MODULE = 3.0


@dataclass(frozen=True)
class Run:
    """What three implementations made of the rows `[T]` of one sequence that follow `start`."""

    start: int
    plugin: Array  # [T, Hq, D]
    plugin_blocks: list[NDArray[np.int64]]  # complete blocks of each row
    module: HfRows
    exact: HfRows

    def chosen(self, geometry: Geometry) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Complete blocks that each row attends to, bool `[T, G]`, of plugin, module and exact module."""
        ratio, rows = geometry.indexer_compress_ratio, len(self.plugin_blocks)
        plugin = np.zeros((rows, (self.start + rows) // ratio), bool)
        for row, blocks in enumerate(self.plugin_blocks):
            plugin[row, blocks] = True
        complete = np.arange(plugin.shape[1]) < (self.start + np.arange(rows) + 1)[:, None] // ratio
        first = slice(0, plugin.shape[1] * ratio, ratio)  # a block is attended to as a whole
        return plugin, self.module.selected[0, :, first] & complete, self.exact.selected[0, :, first] & complete


def layer_of(name: str, max_positions: int) -> tuple[HfAttention, HfAttention]:
    """The module in the surface dtype, and with the same weights in fp64."""
    spec = SPECIALISATIONS[name]
    layer = HfAttention(
        spec.geometry,
        hidden_size=256,
        rotary_dims=spec.rotary_dims,
        theta=1e7,
        max_positions=max_positions,
        dtype=spec.surface,
        device="cuda",
    )
    import torch

    exact = copy.deepcopy(layer)
    exact.module.double()
    exact.torch_dtype, exact.numpy_dtype = torch.float64, np.dtype(np.float64)
    return layer, exact


def whole_call(layer: HfAttention, hidden: Array) -> Inputs:
    """All tokens of one sequence as one prefill call on a NaN pool with shuffled pages."""
    total = hidden.shape[1]
    pages = pages_for(total)
    table = page_table(1, pages, pages, rng=np.random.default_rng(0))
    return layer.contract_inputs(hidden) | {
        "past_key_value": empty_pool(layer.geometry, pages, layer.numpy_dtype, np.nan),
        "context_lengths": np.array([total], np.int32),
        "kvcache_start_index": start_index(Mode.PREFILL, [total]),
        "kv_page_table": blank_dead_entries(table, np.array([total])),
    }


def run_prefill(name: str, total: int) -> tuple[Run, Inputs, Any]:
    """All rows of one prompt."""
    layer, exact = layer_of(name, pages_for(total) * PAGE_SIZE)
    hidden = layer.random_hidden(1, total)
    inputs = whole_call(layer, hidden)
    context = open_node(name, inputs)
    output = launch(context, inputs)[0]
    g, lists = layer.geometry, listed_blocks(context)[0]
    blocks = [
        lists[t - g.list_width].astype(np.int64)
        if t >= g.list_width
        else np.arange((t + 1) // g.indexer_compress_ratio)
        for t in range(total)
    ]
    return Run(0, output, blocks, layer.run(hidden), exact.run(hidden)), inputs, context


def run_decode(name: str, start: int, steps: int) -> tuple[Run, Inputs, Any]:
    """Decode steps after a prompt, each with the module's own cache."""
    layer, exact = layer_of(name, pages_for(start + steps) * PAGE_SIZE)
    hidden = layer.random_hidden(1, start + steps)
    inputs = whole_call(layer, hidden)
    context = open_node(name, inputs, inputs | token(inputs, [0]))
    launch(context, prompt(inputs, [start]))
    caches = [layer.new_cache(), exact.new_cache()]
    layer.run(hidden[:, :start], cache=caches[0])
    exact.run(hidden[:, :start], cache=caches[1])
    outputs, blocks, modules, exacts = [], [], [], []
    for at in range(start, start + steps):
        outputs.append(launch(context, token(inputs, [at]))[0, 0])
        chosen = min((at + 1) // layer.geometry.indexer_compress_ratio, layer.geometry.budget_blocks)
        blocks.append(listed_blocks(context)[0, :chosen].astype(np.int64))
        modules.append(layer.run(hidden[:, at : at + 1], cache=caches[0]))
        exacts.append(exact.run(hidden[:, at : at + 1], cache=caches[1]))
    run = Run(start, np.stack(outputs), blocks, joined(modules, start + steps), joined(exacts, start + steps))
    return run, inputs, context


def joined(steps: list[HfRows], total: int) -> HfRows:
    """Rows of several steps as those of one call."""
    selected = np.zeros((1, len(steps), total), bool)
    for row, step in enumerate(steps):
        selected[0, row, : step.selected.shape[-1]] = step.selected[0, 0]
    return HfRows(np.concatenate([step.attn_output for step in steps], axis=1), selected)


def compare(run: Run, inputs: Inputs, context: Any, record_error: RecordError) -> None:
    """Errors on rows with equal sets, and every set that differs within its tie band."""
    geometry = context.host.geometry
    spot = SpotRows(geometry, inputs, context.read().present_key_value)
    plugin, module, exact_module = run.chosen(geometry)
    equal = (plugin == module).all(1) & (plugin == exact_module).all(1)
    distance = 0.0
    for row in np.flatnonzero((plugin != module).any(1)):
        position = run.start + int(row)
        scores = spot.scores(0, position, position)
        kth = np.partition(scores, -geometry.budget_blocks)[-geometry.budget_blocks]
        differing = np.flatnonzero(plugin[row] != module[row])
        distance = max(distance, float(np.abs(scores[differing] - kth).max() / scores.max()))
    record_error("distance from the k-th of a differing block", distance, BANDS[context.host.surface])
    sparse = np.array([chosen.size == geometry.budget_blocks for chosen in run.plugin_blocks])
    record_error("rows past the budget without equal sets, share", 1 - equal[sparse].mean(), None)
    assert equal[sparse].any(), "no row past the budget could be compared"
    exact = run.exact.attn_output[0][equal]
    own = row_error(run.module.attn_output[0][equal].astype(np.float64), exact)
    ours = row_error(run.plugin[equal].astype(np.float64), exact)
    record_error("largest error over the module's", float(ours.max() / own.max()), TIMES_THE_MODULE)
    record_error("mean error over the module's", float(ours.mean() / own.mean()), TIMES_THE_MODULE)
    record_error("largest error against fp64", float(ours.max()), None)
    record_error("the module's largest error against fp64", float(own.max()), None)


@pytest.mark.pitfall(7, 18)
@pytest.mark.parametrize(
    ("name", "total"),
    [("real-fp16", 2400), ("real-bf16", 2400), ("head-64", 700), ("group-7", 900), ("ratio-8", 2300)],
)
def test_a_prompt_past_the_budget(name: str, total: int, record_error: RecordError) -> None:
    run, inputs, context = run_prefill(name, total)
    compare(run, inputs, context, record_error)
    found = deviation(context, inputs)
    record_error("ulps from the rounding chain", found.output_ulps, OUTPUT_ULPS)
    record_error("pool ulps from the rounding chain", found.pool_ulps, POOL_ULPS)


@pytest.mark.pitfall(7, 18)
@pytest.mark.parametrize(
    ("name", "start", "steps"),
    [("real-fp16", 2040, 60), ("real-bf16", 2040, 60), ("head-64", 240, 120), ("group-7", 500, 120)],
)
def test_decode_steps_across_the_budget(name: str, start: int, steps: int, record_error: RecordError) -> None:
    run, inputs, context = run_decode(name, start, steps)
    assert call_of(context).mode is Mode.DECODE
    compare(run, inputs, context, record_error)
    spot = SpotRows(context.host.geometry, inputs, context.read().present_key_value)
    rows = zip(range(start, start + steps), run.plugin_blocks, run.plugin, strict=True)
    worst = max(spot.output_ulps(0, at, at, chosen, output) for at, chosen, output in rows)
    record_error("ulps from the rounding chain", worst, OUTPUT_ULPS)
