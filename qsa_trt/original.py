"""Runs an unpatched model in onnxruntime over whole prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin.errors import FailedError

from .patching.files import ModelFile
from .prompts import ModelInput, Prompts, batch_and_seq, cache_key, model_inputs
from .recording import open_session, run_session

Array = NDArray[Any]


@contextlib.contextmanager
def onnxruntime_errors(what: str) -> Iterator[None]:
    """Turn what onnxruntime raises into one line.

    Raises:
        FailedError: names `what` was being run.
    """
    try:
        yield
    except Exception as error:  # onnxruntime's exceptions have no common base class
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise FailedError(f"onnxruntime cannot run {what}: {' '.join(str(error).split())}") from error


class OriginalSession:
    """An unpatched model on the CPU.

    Attributes:
        inputs: what a caller feeds, dense caches left out.
        caches: its dense caches; they start empty.
        outputs: names of its outputs, caches left out.

    Raises:
        FailedError: onnxruntime cannot run the model.
        MissingPackageError: onnxruntime is not installed.
    """

    def __init__(self, source: ModelFile) -> None:
        self.inputs, self.caches = split_caches(model_inputs(source.model))
        with onnxruntime_errors(f"the original {source.path.name}"):
            self._session = open_session(source.model, source.folder)
        cached = {cache_key(cache.name) for cache in self.caches}
        self.outputs = [o.name for o in self._session.get_outputs() if cache_key(o.name) not in cached]

    def run(self, prompts: Prompts) -> dict[str, Array]:
        """The outputs of every token, `[B, tokens, ...]`: in one call, or token by token through the caches."""
        batch, total = prompts.lengths.size, int(prompts.lengths.max())
        positions = np.broadcast_to(np.arange(total), (batch, total))
        with onnxruntime_errors("the original"):
            if not self.caches:
                return run_session(self._session, prompts.window(self.inputs, positions))
            steps = []
            caches = empty_caches(self.caches, self.inputs, batch)
            for t in range(total):
                feeds = prompts.window(self.inputs, positions[:, t : t + 1], cached=t)
                values = run_session(self._session, {**feeds, **caches})
                caches = grown_caches(self.caches, values)
                steps.append({name: values[name] for name in self.outputs})
        return {name: np.concatenate([step[name] for step in steps], axis=1) for name in self.outputs}


def split_caches(inputs: tuple[ModelInput, ...]) -> tuple[tuple[ModelInput, ...], tuple[ModelInput, ...]]:
    """Inputs of this call's tokens, and dense caches."""
    return tuple(i for i in inputs if not i.is_cache), tuple(i for i in inputs if i.is_cache)


def empty_caches(caches: tuple[ModelInput, ...], inputs: tuple[ModelInput, ...], batch: int) -> dict[str, Array]:
    """The caches before the first token; they share the batch dim of the other inputs' tokens."""
    batch_dim = next(iter(batch_and_seq(inputs)), None)
    return {cache.name: cache.empty(batch, batch_dim) for cache in caches}


def grown_caches(caches: tuple[ModelInput, ...], outputs: Mapping[str, Array]) -> dict[str, Array]:
    """What a call gave back, under the names of the inputs that take it next."""
    by_key = {cache_key(name): value for name, value in outputs.items()}
    return {cache.name: by_key[cache_key(cache.name)] for cache in caches}
