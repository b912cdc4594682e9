"""The NumPy reference in the place of the plugin's kernels, over device memory that lies on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsa_plugin.contract import INPUTS, OUTPUTS
from qsa_trt.plugin_host import SURFACES, PluginContext
from qsa_trt.reference import qsa_attention
from tests.support.fake_cuda import FakeDriver, read, write


def use_reference(context: PluginContext, driver: FakeDriver) -> PluginContext:
    """Let the reference compute what a context enqueues."""
    context.plugin = _ReferencePlugin(context, driver)
    return context


class _ReferencePlugin:
    def __init__(self, context: PluginContext, driver: FakeDriver) -> None:
        self.context, self.driver = context, driver

    def on_shape_change(self, inputs: Any, outputs: Any) -> None:
        pass

    def enqueue(self, _in: Any, _out: Any, inputs: list[int], outputs: list[int], workspace: int, stream: int) -> None:
        shapes = dict(self.context.shapes)
        self.driver.enqueue(lambda: self._compute(shapes, inputs, outputs))

    def _compute(self, shapes: dict[str, tuple[int, ...]], inputs: list[int], outputs: list[int]) -> None:
        host = self.context.host
        types = {"int32": np.int32, "float32": np.float32, "surface": SURFACES[host.surface][0]}
        arrays = {
            tensor.name: read(address, shapes[tensor.name], types[tensor.dtype.value])
            for tensor, address in zip(INPUTS, inputs, strict=True)
        }
        result = qsa_attention(arrays, host.geometry)
        for tensor, address in zip(OUTPUTS, outputs, strict=True):
            write(address, getattr(result, tensor.name))
