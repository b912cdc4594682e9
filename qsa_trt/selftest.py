"""Everything this project claims that can be proven on this machine, on the sample model that comes with it.

Each check ends in PASS, FAIL or SKIP; a SKIP says what the machine lacks. The report is what a bug report needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsa_plugin import flavour_name
from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.errors import MissingPackageError

from . import device
from .cache import compile_kernels, specialisations_of
from .columns import columns
from .comparison import validate
from .doctor import DoctorReport, doctor
from .layer_validation import LayerReport, validate_layers
from .metrics import row_error
from .patching import patch_onnx
from .patching.config import load_config
from .plugin_host import PluginHost, shapes_of
from .progress import Progress
from .recording import PatchedSession
from .reference import qsa_attention
from .rope import rope_from_config, rope_table
from .runtime import OnnxSession
from .runtime.engine_file import cannot_execute
from .sample import sample_model

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
#: Two computations in fp32 whose results are rounded to fp16 once differ by one unit in the last place at most, 2**-10
#: of the row's largest value; the logits that follow add a few.
_FP16_BOUND = 4 * 2.0**-10
#: What the kernels are compiled for where there is no GPU: one target of each generation of instructions.
_TARGETS = "sm_80,sm_90,sm_120"
_MINUTES = 10
_POSITIONS = 256


@dataclass(frozen=True)
class Line:
    """One check: its name, its verdict, what was found or why it was skipped, and seconds."""

    name: str
    verdict: str
    detail: str
    seconds: float


@dataclass(frozen=True)
class SelftestReport:
    """All checks, and the machine they ran on."""

    machine: DoctorReport
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(line.verdict != FAIL for line in self.lines)

    def json(self) -> str:
        """The report for programs."""
        checks = [asdict(line) for line in self.lines]
        return json.dumps({**asdict(self.machine), "checks": checks, "passed": self.passed}, indent=2)

    def summary(self) -> str:
        """The report for people; the last line starts with PASSED or FAILED."""
        counts = {verdict: sum(line.verdict == verdict for line in self.lines) for verdict in (PASS, FAIL, SKIP)}
        rows = [(line.verdict, line.name, f"{line.seconds:.1f}", line.detail) for line in self.lines]
        verdict = "PASSED" if self.passed else "FAILED"
        return "\n".join(
            [
                self.machine.summary(),
                "",
                *columns([("", "check", "s", "found"), *rows]),
                f"{verdict}: {counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIP]} skipped",
            ]
        )


class Skipped(Exception):
    """The machine lacks something that a check needs."""


@dataclass
class _Work:
    """What checks hand on to later ones."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        """A file that an earlier check made."""
        if name not in self.files:
            raise Skipped(f"there is no {name}: see above")
        return self.files[name]


def selftest(*, progress: Progress | None = None) -> SelftestReport:
    """Run all checks; takes half a minute, and two where kernels or an engine have to be compiled on a slow machine.

    Args:
        progress: told the checks one by one.
    """
    progress = progress or Progress()
    progress.text, progress.total = "look at this machine", len(_CHECKS)
    machine = doctor()
    lines = []
    with tempfile.TemporaryDirectory(prefix="qsa-trt-selftest-") as name:
        work = _Work(Path(name))
        for check, function in _CHECKS.items():
            progress.text = check
            lines.append(_run(check, function, work))
            progress.done += 1
    return SelftestReport(machine, tuple(lines))


def _run(name: str, function: Callable[[_Work], str], work: _Work) -> Line:
    start = time.perf_counter()
    try:
        verdict, detail = PASS, function(work)
    except (Skipped, MissingPackageError) as error:
        verdict, detail = SKIP, str(error)
    except Exception as error:  # whatever goes wrong is what the report is for
        verdict, detail = FAIL, f"{type(error).__name__}: {error}"
    return Line(name, verdict, " ".join(detail.split()), time.perf_counter() - start)


def _patch(work: _Work) -> str:
    for dtype in ("fp16", "bf16"):
        work.files[f"{dtype} model"] = patch_onnx(sample_model(), work.folder / f"{dtype}.onnx", dtype=dtype).output
    return "fp16 and bf16 surface"


def _onnxruntime(work: _Work) -> str:
    report = validate(sample_model())
    _require(report.passed, report.summary())
    return f"largest row error {max(c.error for c in report.comparisons):.1e}, fp32"


def _reference(work: _Work) -> str:
    """The NumPy operator on what the nodes of the file saw, against what onnxruntime computed from it."""
    session = PatchedSession(
        work.file("fp16 model"), batch=2, max_kv_len=200, rope=_rope(), record=True, fill=float("nan")
    )
    steps = [session.prefill({"input_ids": _tokens(2, 150)}, [150, 70]), session.decode({"input_ids": _tokens(2, 1)})]
    worst = 0.0
    for call in (call for step in steps for call in step.calls):
        expected = qsa_attention(call.inputs, call.node.geometry)
        worst = max(worst, float(row_error(call.attn_output, expected.attn_output).max()))
    _require(worst <= _FP16_BOUND, f"row error {worst:.1e} of at most {_FP16_BOUND:.1e}")
    return f"largest row error {worst:.1e}, fp16"


def _pages(work: _Work) -> str:
    """Decode over a fork, across a page boundary, against one prefill of the whole text; the sibling goes on too."""
    session = OnnxSession(work.file("fp16 model"), num_pages=6, max_kv_len=_POSITIONS, rope=_rope())
    length, steps = PAGE_SIZE - 2, 4
    text = _tokens(1, length + steps)
    pages = session.pages
    parent = pages.allocate()
    session.prefill([parent], {"input_ids": text[:, :length]}, [length])
    rows = [parent, pages.fork(parent)]
    decoded = []  # [2, 128] a step: the parent reads other tokens than the fork
    for step in range(length, length + steps):
        tokens = np.concatenate([(text[:, step : step + 1] + 1) % 100, text[:, step : step + 1]])
        decoded.append(session.decode(rows, {"input_ids": tokens})["logits"][:, 0])
    whole = session.prefill([pages.allocate()], {"input_ids": text}, [length + steps])["logits"][0]
    worst = float(row_error(np.stack([rows[1] for rows in decoded]), whole[length:]).max())
    _require(worst <= _FP16_BOUND, f"row error {worst:.1e} of at most {_FP16_BOUND:.1e}")
    return f"decode equals prefill to {worst:.1e}, fork beside its parent"


def _compile(work: _Work) -> str:
    here = device.compute_capability() is not None
    arch, surfaces = (None, ("fp16", "bf16")) if here else (_TARGETS, ("fp16",))
    reports = [compile_kernels(specialisations_of(work.file(f"{dtype} model"), arch)) for dtype in surfaces]
    targets = ", ".join(spec.arch for spec in reports[0].specialisations)
    return f"{sum(r.compiled for r in reports)} compiled, {sum(r.found for r in reports)} cached, for {targets}"


def _need_gpu() -> None:
    if device.compute_capability() is None:
        raise Skipped("no NVIDIA GPU with a driver is here")


def _kernels(dtype: str) -> Callable[[_Work], str]:
    def check(work: _Work) -> str:
        _need_gpu()
        report: LayerReport = validate_layers(work.file(f"{dtype} model"))
        _require(report.passed, report.summary())
        return f"largest row error {max(x.error for x in report.layers):.1e}, bound {report.layers[0].bound:.1e}"

    return check


def _graph(work: _Work) -> str:
    """One decode call, launched and then replayed as a CUDA graph over the same pool."""
    _need_gpu()
    session = PatchedSession(work.file("fp16 model"), batch=2, max_kv_len=200, rope=_rope(), record=True)
    session.prefill({"input_ids": _tokens(2, 150)}, [150, 70])
    call = session.decode({"input_ids": _tokens(2, 1)}).calls[0]
    context = PluginHost(call.node.geometry, "float16", shapes_of(call.inputs, call.node.geometry)).context()
    launched = context.run(call.inputs)
    context.bind(call.inputs)
    context.poison()
    graph = context.capture()
    graph.launch()
    replayed = context.read()
    for name in ("attn_output", "present_key_value"):
        _require(np.array_equal(getattr(launched, name), getattr(replayed, name), equal_nan=True), f"{name} differs")
    return f"{graph.nodes} nodes, the same bits as launched"


def _build(work: _Work) -> str:
    from .building import build_engine

    flavour, capability = flavour_name(), device.compute_capability()
    if flavour == "tensorrt_lean":
        raise Skipped("tensorrt_lean runs engines and builds none")
    if flavour == "tensorrt" and capability is None:
        raise Skipped("tensorrt builds on a machine with a GPU alone")
    here = flavour == "tensorrt_rtx" and cannot_execute(flavour, capability) is None and capability is not None
    report = build_engine(
        work.file("fp16 model"),
        work.folder / "sample.engine",
        max_batch=3,
        max_seq_len=160,
        max_kv_len=_POSITIONS,
        target=[f"sm_{capability[0]}{capability[1]}"] if here and capability else [],
    )
    work.files["engine"] = report.engine
    return f"{len(report.manifest['layers'])} plugin layers, {flavour}"


def _engine(work: _Work) -> str:
    """In a process of its own: the plugin is registered, the engine deserialized, prefill, decode, graph replay."""
    if reason := cannot_execute(flavour_name(), device.compute_capability()):
        raise Skipped(reason)
    command = [sys.executable, "-m", "qsa_trt", "validate", str(work.file("engine")), "--cuda-graph", "--json"]
    command += ["--original", str(work.file("fp16 model"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES, check=False)
    _require(done.returncode in (0, 1) and bool(done.stdout), f"exit code {done.returncode}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    worst = ", ".join(f"{c['phase']} {c['error']:.1e}" for c in report["comparisons"])
    _require(report["passed"], f"row errors {worst}, bound {report['comparisons'][0]['bound']:.1e}")
    return f"row errors {worst}; decode by graph replay"


_CHECKS: dict[str, Callable[[_Work], str]] = {
    "patch the sample model": _patch,
    "original against patched, onnxruntime": _onnxruntime,
    "NumPy reference against onnxruntime": _reference,
    "pages of the runtime, onnxruntime": _pages,
    "compile the kernels": _compile,
    "kernels on the GPU, fp16": _kernels("fp16"),
    "kernels on the GPU, bf16": _kernels("bf16"),
    "graph replay on the GPU": _graph,
    "build an engine": _build,
    "the engine in a fresh process": _engine,
}


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _tokens(batch: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng(length).integers(0, 100, (batch, length))


def _rope() -> NDArray[np.float32]:
    config = load_config(sample_model().with_name("qsa_lm.config.json"))
    return rope_table(_POSITIONS, rope_from_config(config))
