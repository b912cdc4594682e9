"""The packages of the `export` extra, which the rest of the toolkit does without."""

from __future__ import annotations

import importlib

from qsa_plugin.errors import MissingPackageError

PACKAGES = ("torch", "transformers", "safetensors", "onnxscript")


def check_packages() -> None:
    """Find out before any work that a package is missing.

    Raises:
        MissingPackageError: it says what to install.
    """
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"package {package}", "not installed", "the `export` extra", "run: pip install 'qsa-trt[export]'"
            ) from error
    try:
        importlib.import_module("transformers.models.qwen4_exp")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "package transformers", "a version without qwen4_exp", "5.17 or newer", "run: pip install 'qsa-trt[export]'"
        ) from error
