"""The tables of a record."""

from __future__ import annotations

from tests.support.bench import case_result, make_record


def line_of(summary: str, name: str) -> list[str]:
    return next(line.split() for line in summary.splitlines() if line.startswith(name + " "))


def test_cases_stand_against_targets_floors_and_roofs() -> None:
    summary = make_record([case_result("decode-b1-8192", 10, cold=14, target_us=11, jaccard=0.9)]).summary()
    # 4 MB in 10 us is 0.4 TB/s, a tenth of 4; 2 GFLOP in 10 us are 200 of 800 TFLOP/s
    row = line_of(summary, "decode-b1-8192")
    expected = "decode-b1-8192 11.0 met 10.0 9.9..10.1 14.0 5.0 2.00 0.40 (10%) 200 (25%) - 0.900"
    assert " ".join(row) == expected
    assert "append 2.0  attend 8.0" in summary
    assert "host, decode-b1-8192 outside a graph: 20.0 us (19.0..21.0), target 25 met; checks 1.0" in summary
    assert summary.startswith("Some GPU, 2026-12-01T00:00:00+00:00, 100 s; roofs: copy 4.00 TB/s, fp16 product 800")


def test_a_missed_target_and_a_ratio() -> None:
    cases = [
        case_result("decode-b1-8192", 12, target_us=11),
        case_result("decode-b1-8192-all-equal", 18, relative_to="decode-b1-8192"),
    ]
    summary = make_record(cases, host_us=30).summary()
    assert line_of(summary, "decode-b1-8192")[1:3] == ["11.0", "MISSED"]
    assert line_of(summary, "decode-b1-8192-all-equal")[1:3] == ["1.50", "x"]
    assert "target 25 MISSED" in summary


def test_what_was_not_measured_is_said() -> None:
    skipped = case_result("decode-b64-131072", 1, hot=None, stages_us={}, skipped="needs 9 MiB, 1 are free")
    noted = case_result("decode-b1-8192", 10, notes=("no dense attention: PyTorch with CUDA is not installed",))
    summary = make_record([skipped, noted]).summary()
    assert "decode-b64-131072: skipped: needs 9 MiB, 1 are free" in summary
    assert "decode-b1-8192: no dense attention: PyTorch with CUDA is not installed" in summary
