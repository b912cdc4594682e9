"""`qsa-trt selftest`: what it proves, what it skips and why, and that it can fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qsa_plugin import jit
from qsa_plugin.environment import CACHE_VARIABLE
from qsa_plugin.errors import FailedError
from qsa_trt import cli, selftest
from qsa_trt.doctor import DoctorReport, Finding
from qsa_trt.plugin_host import PluginHost
from qsa_trt.progress import Progress
from tests.support.fake_cuda import FakeDriver, cuda
from tests.support.fake_plugin import use_reference
from tests.support.plugin_host import needs_tensorrt
from tests.support.requirements import has, needs_onnxruntime

__all__ = ["cuda"]
pytestmark = needs_onnxruntime
ONNXRUNTIME = ["patch the sample model", "original against patched, onnxruntime"]
ONNXRUNTIME += ["NumPy reference against onnxruntime", "pages of the runtime, onnxruntime"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, and a compiler that is quick: tests/plugin compiles the kernels."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("qsa_trt.device.compute_capability", lambda: None)
    monkeypatch.setattr(jit, "compile_source", lambda name, source, arch: jit.Cubin(name, b"code", "log"))


def test_what_a_machine_without_a_gpu_proves(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    report = selftest.selftest(progress=progress)
    assert report.passed and progress.done == progress.total == len(report.lines)
    verdicts = {line.name: line.verdict for line in report.lines}
    assert [verdicts.pop(name) for name in ONNXRUNTIME] == ["PASS"] * 4
    assert verdicts.pop("build an engine") == ("PASS" if has("tensorrt_rtx") else "SKIP")
    assert verdicts.pop("compile the kernels") == "PASS"
    assert set(verdicts.values()) == {"SKIP"}
    assert {line.detail for line in report.lines if "GPU" in line.name} == {"no NVIDIA GPU with a driver is here"}
    text = report.summary()
    assert "TensorRT in use" in text and "PASS  patch the sample model" in text
    assert text.splitlines()[-1].startswith("PASSED: ") and "0 failed" in text


def test_kernels_are_compiled_without_a_cache_to_keep_them_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    checks = {name: selftest._CHECKS[name] for name in ("patch the sample model", "compile the kernels")}
    monkeypatch.setattr(selftest, "_CHECKS", checks)
    report = selftest.selftest()
    assert [line.verdict for line in report.lines] == ["PASS", "PASS"]
    assert ", 0 cached" in report.lines[1].detail


def with_checks(monkeypatch: pytest.MonkeyPatch, **checks: Any) -> None:
    monkeypatch.setattr(selftest, "_CHECKS", checks)
    monkeypatch.setattr(selftest, "doctor", lambda: DoctorReport((Finding("Python", "ok", "3"),)))


def test_one_failure_fails_the_report_and_the_rest_still_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(work: Any) -> str:
        raise FailedError("the first line\nand the second")

    with_checks(monkeypatch, first=fails, second=selftest._build, third=lambda work: "fine")
    assert cli.main(["selftest", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and "Python" in [finding["subject"] for finding in report["findings"]]
    first, second, third = report["checks"]
    assert (first["verdict"], first["detail"]) == ("FAIL", "FailedError: the first line and the second")
    assert second["verdict"] == "SKIP" and third["verdict"] == "PASS"
    assert cli.main(["selftest"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: 1 passed, 1 failed, 1 skipped"


def test_a_wrong_attention_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is made to differ by what one wrong key would change."""
    real = selftest.qsa_attention

    def wrong(inputs: Any, geometry: Any) -> Any:
        return real({**inputs, "k_norm_gamma": inputs["k_norm_gamma"] * inputs["qkv"].dtype.type(1.1)}, geometry)

    monkeypatch.setattr(selftest, "qsa_attention", wrong)
    with_checks(monkeypatch, patch=selftest._patch, reference=selftest._reference)
    report = selftest.selftest()
    assert [line.verdict for line in report.lines] == ["PASS", "FAIL"] and "row error" in report.lines[1].detail


@needs_tensorrt
@pytest.mark.parametrize("faulty", [False, True])
def test_a_graph_is_replayed_and_compared(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch, faulty: bool) -> None:
    real = PluginHost.context
    monkeypatch.setattr(PluginHost, "context", lambda host: use_reference(real(host), cuda))
    if faulty:
        monkeypatch.setattr("qsa_trt.device.Graph.launch", lambda graph: None)
    with_checks(monkeypatch, patch=selftest._patch, graph=selftest._graph)
    line = selftest.selftest().lines[1]
    expected = (
        ("FAIL", "AssertionError: attn_output differs") if faulty else ("PASS", "1 nodes, the same bits as launched")
    )
    assert (line.verdict, line.detail) == expected


@pytest.mark.parametrize(
    ("code", "out", "verdict", "detail"),
    [
        (0, {"passed": True}, "PASS", "row errors prefill 1.0e-04; decode by graph replay"),
        (1, {"passed": False}, "FAIL", "row errors prefill 1.0e-04, bound 1.0e-02"),
        (2, None, "FAIL", "exit code 2: qsa-trt: error: no"),
        (-6, None, "FAIL", "exit code -6: qsa-trt: error: no"),
    ],
)
def test_the_engine_runs_in_a_process_of_its_own(
    code: int, out: dict[str, Any] | None, verdict: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = {"comparisons": [{"phase": "prefill", "error": 1e-4, "bound": 1e-2}]}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "qsa_trt", "validate", "made.engine"] and "--cuda-graph" in command
        text = "" if out is None else json.dumps(comparisons | out)
        return subprocess.CompletedProcess(command, code, text, "qsa-trt: error: no")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(selftest, "cannot_execute", lambda flavour, capability: None)
    monkeypatch.setattr(selftest, "flavour_name", lambda: "tensorrt")

    def made(work: Any) -> str:
        work.files |= {"engine": Path("made.engine"), "fp16 model": Path("lm.onnx")}
        return ""

    with_checks(monkeypatch, made=made, engine=selftest._engine)
    line = selftest.selftest().lines[1]
    assert line.verdict == verdict and detail in line.detail


def test_a_check_whose_file_was_not_made_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, pages=selftest._pages)
    (line,) = selftest.selftest().lines
    assert (line.verdict, line.detail) == ("SKIP", "there is no fp16 model: see above")
