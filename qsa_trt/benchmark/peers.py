"""PyTorch in the same process, where it is installed with CUDA: fp16 matrix rate and dense attention by cuDNN."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from qsa_plugin.contract import Geometry, Mode

from .cases import Case
from .timing import STEPS, Effort, Sample, fewer_steps, sample

_MATRIX = 8192


def load_torch() -> Any | None:
    """The module; None where it is absent or sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


class Peers:
    """Measures with PyTorch, on a stream of its own.

    Args:
        torch: the module.
        geometry: head counts and head size of dense attention.
        effort: how often everything is repeated.
    """

    def __init__(self, torch: Any, geometry: Geometry, effort: Effort) -> None:
        self._torch, self._geometry, self._effort = torch, geometry, effort
        self._stream = torch.cuda.Stream()
        self.dense = functools.cache(self._dense)

    def fp16_tflop_s(self) -> float:
        """Rate of an 8192 x 8192 x 8192 product of random fp16 matrices: the best repeat."""
        a, b = (self._random(_MATRIX, _MATRIX) for _ in range(2))
        return 2 * _MATRIX**3 / self._time(lambda: a @ b, most_steps=5).low_us / 1e6

    def _dense(self, mode: Mode, batch: int, length: int) -> Sample | str:
        """Causal dense attention of a prompt, or of one token a sequence over its context; a reason where it fails."""
        g, torch = self._geometry, self._torch
        rows = length if mode is Mode.PREFILL else 1
        attend = torch.nn.functional.scaled_dot_product_attention
        attention = importlib.import_module("torch.nn.attention")
        try:
            q = self._random(batch, g.num_q_heads, rows, g.head_size)
            k, v = (self._random(batch, g.num_kv_heads, length, g.head_size) for _ in range(2))
            with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
                return self._time(lambda: attend(q, k, v, is_causal=mode is Mode.PREFILL, enable_gqa=True))
        except RuntimeError as error:  # also out of memory
            return str(error).splitlines()[0]
        finally:
            q = k = v = None
            torch.cuda.empty_cache()

    def _random(self, *shape: int) -> Any:
        return self._torch.randn(*shape, device="cuda", dtype=self._torch.float16)

    def _time(self, work: Callable[[], Any], most_steps: int = STEPS) -> Sample:
        """One call from graph replays, fewer a graph where a call is long."""
        cuda = self._torch.cuda
        events = [cuda.Event(enable_timing=True) for _ in range(2)]
        cuda.synchronize()  # the inputs were made on another stream
        with cuda.stream(self._stream):
            work()  # chooses and loads its kernel
            steps = min(most_steps, fewer_steps(self._elapsed(events, work)))
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, stream=self._stream):
                for _ in range(steps):
                    work()
            return sample(lambda: self._elapsed(events, graph.replay), steps, self._effort)

    def _elapsed(self, events: list[Any], work: Callable[[], Any]) -> float:
        start, end = events
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000


def dense_of(peers: Peers | None, case: Case) -> Sample | str:
    """Dense attention over the same tokens as a case, or why there is no such number."""
    return "PyTorch with CUDA is not installed" if peers is None else peers.dense(case.mode, case.batch, case.length)
