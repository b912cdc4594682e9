from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Checkpoint(NamedTuple):
    """A sharded checkpoint of two layers, and the model that it holds."""

    folder: Path
    lm: Any


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    import torch

    from tests.support import checkpoints

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lm = checkpoints.causal_lm()
    yield Checkpoint(checkpoints.save(lm, tmp_path_factory.mktemp("checkpoint")), lm)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def exported(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with QsaAttention nodes in fp32."""
    from qsa_trt.exporting import export_onnx

    path = tmp_path_factory.mktemp("exported") / "direct.onnx"
    export_onnx(checkpoint.folder, path, dtype="fp32")
    return path


@pytest.fixture(scope="session")
def plain(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in plain operators in fp32."""
    from qsa_trt.exporting import export_onnx

    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    export_onnx(checkpoint.folder, path, dtype="fp32", plain=True)
    return path
