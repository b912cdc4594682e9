"""`bench compare`: ratios, the noise bound, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsa_plugin.errors import InputError
from qsa_trt.benchmark import compare_records
from qsa_trt.cli import main
from tests.support.bench import case_result, make_record


def write(path: Path, scale: float = 1.0, **options: Any) -> Path:
    cases = [case_result("decode-b1-8192", 10 * scale, cold=14), case_result("prefill-2048", 200)]
    make_record(cases, **options).write(path)
    return path


def test_equal_records_pass(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json")
    comparison = compare_records(a, a)
    assert comparison.passed and comparison.summary().endswith("\nPASSED")
    assert list(comparison.times) == ["decode-b1-8192 hot", "decode-b1-8192 cold", "prefill-2048 hot", "host"]


@pytest.mark.parametrize(("scale", "noise", "passed"), [(1.04, 0.05, True), (1.06, 0.05, False), (1.06, 0.1, True)])
def test_a_slowdown_beyond_the_noise_fails(scale: float, noise: float, passed: bool, tmp_path: Path) -> None:
    comparison = compare_records(write(tmp_path / "a.json"), write(tmp_path / "b.json", scale), noise)
    assert comparison.passed == passed
    assert comparison.slower == ([] if passed else ["decode-b1-8192 hot"])
    assert f"{scale:.3f}" in comparison.summary()


@pytest.mark.parametrize(("host_us", "passed"), [(22.5, True), (26.0, False)])
def test_the_host_may_vary_more(host_us: float, passed: bool, tmp_path: Path) -> None:
    """Its tenth fastest call: 19 us before, 21.5 or 25 after."""
    a, b = write(tmp_path / "a.json"), write(tmp_path / "b.json", host_us=host_us)
    assert compare_records(a, b).passed == passed


def test_what_only_one_holds_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json"), tmp_path / "b.json"
    make_record([case_result("prefill-2048", 100)], host_us=None).write(b)
    comparison = compare_records(a, b)
    assert comparison.only_in_one == ("decode-b1-8192 hot", "decode-b1-8192 cold", "host")
    assert comparison.passed and "faster" in comparison.summary()


def test_another_gpu_is_said(tmp_path: Path) -> None:
    comparison = compare_records(write(tmp_path / "a.json"), write(tmp_path / "b.json", gpu="Other"))
    assert comparison.summary().startswith("warning: two kinds of GPU, Some GPU and Other")


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json"), tmp_path / "b.json"
    make_record([case_result("other", 1)], host_us=None).write(b)
    with pytest.raises(InputError, match="a record with a case of"):
        compare_records(a, b)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99, "cases": []}'])
def test_files_that_are_no_records(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match="a record of qsa-trt bench, schema 1; make one: qsa-trt bench --json FILE"):
        compare_records(path, path)


def test_the_command_exits_1_on_a_slowdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.json"), write(tmp_path / "b.json", 1.2)
    assert main(["bench", "compare", str(a), str(b)]) == 1
    assert capsys.readouterr().out.endswith("slower by more than 5%: 1 of 4\nFAILED\n")
    assert main(["bench", "compare", str(a), str(b), "--noise", "0.25"]) == 0
    assert main(["bench", "compare", str(a), str(b), "--noise", "5"]) == 2
    assert main(["bench", "compare", str(a), "absent.json"]) == 2


def test_a_record_is_plain_json(tmp_path: Path) -> None:
    record = json.loads(write(tmp_path / "a.json").read_text())
    assert set(record) == {
        "schema", "date", "gpu", "versions", "settings", "roofs", "cases", "host", "seconds",
    }  # fmt: skip
    assert set(record["cases"][0]) == {
        "name", "mode", "batch", "length", "target_us", "relative_to", "jaccard_target", "bytes", "flops", "floor_us",
        "workspace_bytes", "jaccard", "hot", "cold", "stages_us", "dense", "notes", "skipped",
    }  # fmt: skip
    assert set(record["cases"][0]["hot"]) == {"us", "low_us", "high_us", "repeats"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
