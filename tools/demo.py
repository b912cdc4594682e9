"""The main job on the sample model: patch, compare with the original, build an engine. No GPU, no torch."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qsa_plugin.errors import QsaError
from qsa_trt.building import build_engine
from qsa_trt.comparison import validate
from qsa_trt.patching import patch_onnx

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the demo and return its exit code: 0 PASSED, 1 FAILED, 2 something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "qsa_lm.onnx")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="folder for the results")
    arguments = parser.parse_args()
    start = time.perf_counter()
    try:
        passed = run(arguments.model, arguments.out, Console())
    except QsaError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{'PASSED' if passed else 'FAILED'} in {time.perf_counter() - start:.1f} s")
    return 0 if passed else 1


def run(model: Path, out: Path, console: Console) -> bool:
    """Patch `model` into `out`, compare and build; returns whether the comparison passed."""
    out.mkdir(parents=True, exist_ok=True)
    console.rule("qsa-trt patch-onnx")
    patched = patch_onnx(model, out / f"{model.stem}.qsa.onnx")
    console.print(patched.summary(), markup=False, highlight=False, soft_wrap=True)
    console.rule("original against patched in onnxruntime, fp32")
    comparison = validate(model)
    console.print(comparison.summary(), markup=False, highlight=False, soft_wrap=True)
    console.rule("qsa-trt build-engine")
    built = build_engine(patched.output, max_batch=2, max_seq_len=256, max_kv_len=512)
    console.print(built.plan.summary(), markup=False, highlight=False, soft_wrap=True)
    console.print(built.summary(), markup=False, highlight=False, soft_wrap=True)
    console.rule("made")
    console.print(file_table([patched.output, built.engine, built.manifest_file]))
    return comparison.passed


def file_table(files: list[Path]) -> Table:
    """One line a file."""
    table = Table("file", "KiB")
    for file in files:
        table.add_row(str(file), f"{file.stat().st_size / 1024:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
