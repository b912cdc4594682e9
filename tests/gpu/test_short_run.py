"""A short run of every kernel of an enqueue, on scratch that nobody has written: what `make gpu-sanitize` looks at.

A poisoned workspace counts as initialised, so here workspace and output are fresh memory.
"""

from __future__ import annotations

import numpy as np
import pytest

from qsa_plugin.contract import Mode
from qsa_trt import device
from tests.support.node import call_inputs, needs_node, open_node, output_of, same_bits

pytestmark = needs_node


class FreshBuffer(device.Buffer):
    """Device memory as the driver hands it out."""

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver

        self._driver, self.nbytes = driver, nbytes
        self._base = device.check(driver.cuMemAlloc(nbytes))
        self.address = int(self._base)


@pytest.mark.quick
@pytest.mark.pitfall(17)
@pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
@pytest.mark.parametrize("name", ["head-256-index-32", "group-7", "budget-odd-blocks"])
def test_fresh_scratch_gives_what_poisoned_scratch_gives(name: str, mode: Mode) -> None:
    """The kernels of compute capability 9.0 and the portable ones, fp16 and bf16; dense and sparse rows."""
    context_limit = {"head-256-index-32": 1024, "group-7": 512, "budget-odd-blocks": 36}[name]
    inputs = call_inputs(name, [context_limit + 45, 3, 130], mode)
    context = open_node(name, inputs)
    expected = context.run(inputs).attn_output
    context.bind(inputs)
    for buffer in ("workspace", "attn_output"):
        context.buffers[buffer] = FreshBuffer(context.buffers[buffer].nbytes)
    device.synchronize()
    context.enqueue()
    output = output_of(context)
    assert same_bits(output, expected)
    assert np.isfinite(output.astype(np.float32)).all()
