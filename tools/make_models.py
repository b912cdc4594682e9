"""Writes the sample models of `models/`: python tools/make_models.py [--out models].

Needs the `oracle` extra. The same versions of torch, transformers and onnxscript give the same files.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: only tools/ is on the path
    sys.path[:0] = [str(ROOT), str(ROOT / "plugin")]

from qsa_plugin.errors import MissingPackageError, QsaError  # noqa: E402

if TYPE_CHECKING:
    import onnx
    from transformers import PreTrainedConfig

PACKAGES = ("torch", "transformers", "onnxscript")


def make_models(folder: Path) -> list[Path]:
    """Export every sample model into `folder`, each as NAME.onnx and NAME.config.json; the files written.

    Raises:
        MissingPackageError: a package of the `oracle` extra is not installed.
    """
    check_packages()
    from tools import hf_export

    folder.mkdir(parents=True, exist_ok=True)
    layer, lm, plain = hf_export.real_layer_fp16(), hf_export.qsa_lm(), hf_export.plain_qwen3()
    return [
        *_write(folder, "real_layer_fp16", layer.config, hf_export.export_layer(layer)),
        *_write(folder, "qsa_lm", lm.config, hf_export.export_lm(lm)),
        *_write(folder, "plain_qwen3", plain.config, hf_export.export_lm(plain)),
    ]


def check_packages() -> None:
    """Find out before any work that a package is missing."""
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"package {package}", "nothing installed", "the `oracle` extra", "pip install 'qsa-trt[oracle]'"
            ) from error


def _write(folder: Path, name: str, config: PreTrainedConfig, model: onnx.ModelProto) -> list[Path]:
    contents = {
        f"{name}.onnx": model.SerializeToString(deterministic=True),
        f"{name}.config.json": config.to_json_string(use_diff=False).encode(),
    }
    for file, content in contents.items():
        temporary = folder / f".{file}.tmp"
        temporary.write_bytes(content)
        temporary.replace(folder / file)
    return [folder / file for file in contents]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the sample models.")
    parser.add_argument("--out", type=Path, default=ROOT / "models", help="folder (default: models)")
    options = parser.parse_args(arguments)
    try:
        for path in make_models(options.out):
            print(f"{path}: {path.stat().st_size:,} bytes")
    except QsaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
