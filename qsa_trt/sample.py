"""The sample model that comes with the package: a causal LM of two QSA layers with random weights, 1 MB."""

from __future__ import annotations

from pathlib import Path

from qsa_plugin.errors import FailedError

NAME = "qsa_lm.onnx"


def sample_model() -> Path:
    """The unpatched ONNX file; `qsa_lm.config.json` lies beside it.

    A wheel holds it in the package; in a clone it is in models/.

    Raises:
        FailedError: the installation is incomplete.
    """
    package = Path(__file__).parent
    for folder in (package / "sample", package.parent / "models"):
        if (folder / NAME).is_file():
            return folder / NAME
    raise FailedError(f"the sample model {NAME} is missing from {package}; install qsa-trt again")
