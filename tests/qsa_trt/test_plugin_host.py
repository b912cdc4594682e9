"""The host's build phase, which needs TensorRT's classes and no GPU; tests/gpu runs the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsa_plugin.contract import INPUTS, Call, Mode
from qsa_plugin.errors import ContractError, RefusedError
from qsa_plugin.workspace import reported_size
from qsa_trt.plugin_host import PluginHost, shapes_of
from tests.support.cases import SMALL, random_inputs
from tests.support.plugin_host import GEOMETRY, PREFILL, call_shapes, needs_tensorrt


@needs_tensorrt
@pytest.mark.parametrize("surface", ["float16", "bfloat16"])
def test_the_workspace_is_what_the_plugin_reports_for_the_maximum(surface: str) -> None:
    host = PluginHost(GEOMETRY, surface, call_shapes(PREFILL))
    sizes = PREFILL
    largest = Call(
        Mode.PREFILL, sizes.batch, sizes.seq_len, sizes.num_pages, sizes.pages_per_seq, sizes.max_positions, 16
    )
    assert host.workspace_size == reported_size(GEOMETRY, largest) > 0


@needs_tensorrt
def test_sizes_and_nodes_that_the_plugin_refuses() -> None:
    with pytest.raises(ContractError, match="past_key_value"):
        PluginHost(GEOMETRY, "float16", call_shapes(PREFILL) | {"past_key_value": (2, 16, 128, 2, 64)})
    wide = replace(GEOMETRY, head_size=96)
    with pytest.raises(RefusedError, match="head_size: got 96"):
        PluginHost(wide, "float16", call_shapes(PREFILL, wide))


def test_shapes_of_a_call() -> None:
    inputs = random_inputs(SMALL, [5, 3], Mode.PREFILL, dtype=np.float16, rng=np.random.default_rng(0))
    shapes = shapes_of(inputs, SMALL)
    assert list(shapes) == [t.name for t in INPUTS] + ["attn_output", "present_key_value"]
    assert shapes["attn_output"] == (2, 5, SMALL.num_q_heads, SMALL.head_size)
    assert shapes["present_key_value"] == inputs["past_key_value"].shape
