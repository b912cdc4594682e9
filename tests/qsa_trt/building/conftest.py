"""Model files for the builder's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.qsa_graphs import qsa_model


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., Path]:
    """Saves a small model (`qsa_model`'s options) and returns its path."""

    def save(*args: Any, **options: Any) -> Path:
        path = tmp_path / "model.qsa.onnx"
        onnx.save(qsa_model(*args, **options), path)
        return path

    return save
