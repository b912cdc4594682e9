"""One QsaAttention layer on the GPU, through the plugin as TensorRT drives it; needs no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.contract import INPUTS, Geometry, PoolIO, resolve_dims
from qsa_plugin.errors import InputError

from .. import device
from ..plugin_host import PluginHost
from .layout import single_layer
from .pages import PageCopy
from .session import Array, Session, check_feeds, check_rope
from .transfers import copy_pages

_GAMMAS = tuple(tensor.name for tensor in INPUTS if tensor.name.endswith("gamma"))
_ACTIVATIONS = ("qkv", "index_qk")


class LayerSession(Session):
    """One layer and its pool on device 0. `prefill` and `decode` take `qkv` and `index_qk` and return `attn_output`.

    Args:
        geometry: the layer's attributes; its pool is updated in place, whatever `pool_io` says.
        surface: "float16" or "bfloat16".
        gammas: the four norm weights by their contract names, surface `[D]` or `[Id]`.
        rope: the rope table fp32 `[1, maxPos, rotary]`.
        num_pages: pages a plane of the pool, 128 tokens each.
        max_kv_len: tokens of the longest sequence.
        max_batch: most sequences of one call.
        max_seq_len: most tokens of one prefill.
        rng: shuffles the page ids; None hands them out in order.

    Raises:
        InputError: no GPU is here, or a norm weight or the rope table is missing, of another type or too short.
        MissingPackageError: TensorRT is not installed; any flavour will do.
        ContractError, RefusedError: the plugin refuses the layer or its sizes.
    """

    def __init__(
        self,
        geometry: Geometry,
        surface: str,
        gammas: Mapping[str, Array],
        rope: NDArray[np.float32],
        *,
        num_pages: int,
        max_kv_len: int,
        max_batch: int,
        max_seq_len: int,
        rng: np.random.Generator | None = None,
    ) -> None:
        geometry = replace(geometry, pool_io=int(PoolIO.IN_PLACE))
        super().__init__(single_layer(geometry, surface, num_pages, max_kv_len), rng)
        if set(gammas) != set(_GAMMAS):
            raise InputError("gammas", ", ".join(gammas) or "nothing", ", ".join(_GAMMAS), "give all four norm weights")
        for name, gamma in gammas.items():
            if gamma.dtype != self.layout.dtype:
                raise InputError(name, gamma.dtype, str(self.layout.dtype), "convert it")
        if device.compute_capability() is None:
            raise InputError("GPU", "none", "an NVIDIA GPU with its driver", "run this on a machine that has one")
        rope = check_rope(rope, "rope_rotary_cos_sin", max_kv_len)
        self._constants: dict[str, Array] = {**gammas, "rope_rotary_cos_sin": rope}
        sizes = {"B": max_batch, "S": max_seq_len, "N": num_pages, "M": self.pages.pages_per_seq, "start": max_batch}
        largest = {
            tensor.name: tuple(sizes[d] if isinstance(d, str) else d for d in resolve_dims(tensor.dims, geometry))
            for tensor in INPUTS
            if tensor.name != "rope_rotary_cos_sin"
        }
        largest |= {
            "rope_rotary_cos_sin": rope.shape,
            "attn_output": (max_batch, max_seq_len, geometry.num_q_heads, geometry.head_size),
            "present_key_value": largest["past_key_value"],
        }
        self._context = PluginHost(geometry, surface, largest).context()
        self._context.shapes["past_key_value"] = largest["past_key_value"]  # the pool is never uploaded

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        context = self._context
        copy_pages(context.buffers["past_key_value"], self.layout.num_pages, copies, context.stream)

    def _run(self, feeds: Mapping[str, Array], step: Mapping[str, Array]) -> dict[str, Array]:
        check_feeds(feeds, dict.fromkeys(_ACTIVATIONS, self.layout.dtype), step["context_lengths"].size)
        context = self._context
        context.bind({**feeds, **step, **self._constants})
        self._constants = {}  # they stay on the device
        device.synchronize()  # uploads of pageable memory may still be on their way
        context.enqueue()
        context.stream.synchronize()
        shape = context.shapes["attn_output"]
        return {"attn_output": context.buffers["attn_output"].read(shape, self.layout.dtype)}
