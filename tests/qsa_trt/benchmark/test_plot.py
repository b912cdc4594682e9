"""`bench plot`: which points it shows, and the file it draws where matplotlib is installed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qsa_plugin.errors import InputError
from qsa_trt.benchmark import plot_record
from qsa_trt.benchmark.plot import series
from qsa_trt.benchmark.timing import Sample
from tests.support.bench import case_result, make_record
from tests.support.requirements import has

DENSE = Sample(30.0, 29.0, 31.0, 7)
RECORD = make_record(
    [
        case_result("decode-b1-32768", 12, length=32768, dense=DENSE),
        case_result("decode-b1-8192", 11),
        case_result("decode-b1-8192-portable", 15, relative_to="decode-b1-8192"),
        case_result("decode-b64-8192", 80, batch=64),
        case_result("prefill-8192-j0.9", 1300, jaccard_target=0.9, jaccard=0.9),
        case_result("prefill-8192-random", 2800, jaccard=0.3),
        case_result("prefill-2048", 200, length=2048),
    ]
)


def test_lines_hold_the_cases_in_order_of_length() -> None:
    record = asdict(RECORD)
    assert series(record, "decode", 1) == {
        "plugin": {8192: 11, 32768: 12},
        "dense": {32768: 30},
        "floor": {8192: 5, 32768: 5},
    }
    assert series(record, "prefill", 1)["plugin"] == {2048: 200, 8192: 1300}
    assert series(record, "decode", 16) == {}


@pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed (pip install 'qsa-trt[plot]')")
def test_the_drawing_is_the_same_every_time(tmp_path: Path) -> None:
    RECORD.write(tmp_path / "a.json")
    first, second = (plot_record(tmp_path / "a.json", tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    assert b"<svg" in first


@pytest.mark.parametrize("case", [case_result("decode-b16-8192", 1, batch=16), case_result("decode-b1-8192", 11)])
def test_nothing_to_draw(case: Any, tmp_path: Path) -> None:
    """No case of a panel, or one length, which makes no line."""
    make_record([case]).write(tmp_path / "a.json")
    with pytest.raises(InputError, match="a record with prefill or decode cases"):
        plot_record(tmp_path / "a.json", tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["a.jpg", "a", "absent/a.svg"])
def test_where_it_cannot_draw(name: str, tmp_path: Path) -> None:
    RECORD.write(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"OUT: got .*; expected a file in an existing folder, \.svg or"):
        plot_record(tmp_path / "a.json", tmp_path / name)
