"""One plot of a record: time against context, prefill and decode, this plugin, dense cuDNN, the floor."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsa_plugin.errors import InputError, MissingPackageError
from qsa_trt.new_file import new_file

from .record import Json, read_record

#: Line to (label in the plot, colour, dash).
_STYLES = {
    "plugin": ("this plugin", "#0b6e4f", "-"),
    "dense": ("dense attention (cuDNN)", "#b23a48", "-"),
    "floor": ("least possible", "#777777", "--"),
}
_SUFFIXES = (".svg", ".png", ".pdf")
Points = Mapping[int, float]


def series(record: Json, mode: str, batch: int) -> dict[str, Points]:
    """Line to its points, context to us. Of several overlaps of a prefill, the one made for 0.9 counts.

    Args:
        record: as `read_record` returns it.
        mode: prefill or decode.
        batch: sequences.
    """
    lines: dict[str, dict[int, float]] = {line: {} for line in _STYLES}
    for case in record["cases"]:
        wanted = case["mode"] == mode and case["batch"] == batch and case["relative_to"] is None
        if not wanted or case["hot"] is None or _other_overlap(case):
            continue
        lines["plugin"][case["length"]] = case["hot"]["us"]
        lines["floor"][case["length"]] = case["floor_us"]
        if case["dense"]:
            lines["dense"][case["length"]] = case["dense"]["us"]
    return {name: dict(sorted(points.items())) for name, points in lines.items() if points}


def _other_overlap(case: Json) -> bool:
    return case["jaccard_target"] != 0.9 and case["jaccard"] is not None


def plot_record(file: str | Path, output: str | Path) -> Path:
    """Draw a record; the format is that of the suffix (.svg, .png, .pdf).

    Raises:
        InputError: no record, one without a case that the plot shows, or a suffix of no such format.
        MissingPackageError: matplotlib is not installed.
    """
    record, output = read_record(file), Path(output)
    if output.suffix not in _SUFFIXES or not output.parent.is_dir():
        raise InputError("OUT", output, f"a file in an existing folder, {' or '.join(_SUFFIXES)}", "correct -o")
    panels = [("prefill", 1, "prefill, neighbouring rows' Jaccard 0.9"), ("decode", 1, "decode, 1 sequence"),
              ("decode", 64, "decode, 64 sequences")]  # fmt: skip
    candidates = [(title, series(record, mode, batch)) for mode, batch, title in panels]
    drawn = [(title, lines) for title, lines in candidates if len(lines.get("plugin", {})) > 1]
    if not drawn:
        expected = "a record with prefill or decode cases of several lengths"
        raise InputError("FILE", file, expected, "run qsa-trt bench without --cases")
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(3.6 * len(drawn), 3.4), squeeze=False)
    for axis, (title, lines) in zip(axes[0], drawn, strict=True):
        _panel(axis, title, lines)
    axes[0][0].set_ylabel("time of one call")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.text(0.01, 0.01, f"{record['gpu']['name']}, fp16, {record['date'][:10]}", fontsize=7, color="#777777")
    figure.tight_layout(rect=(0, 0.03, 1, 0.92))
    suffix = output.suffix.removeprefix(".")
    with new_file(output) as temporary:
        figure.savefig(temporary, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
        temporary.replace(output)
    pyplot.close(figure)
    return output


def _panel(axis: Any, title: str, lines: Mapping[str, Points]) -> None:
    for name, points in lines.items():
        label, colour, dash = _STYLES[name]
        axis.plot(list(points), list(points.values()), dash, color=colour, label=label, marker="o", markersize=3)
    ticks = sorted({length for points in lines.values() for length in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [f"{length >> 10}K" for length in ticks])
    axis.yaxis.set_major_formatter(lambda us, _: f"{us:g} µs" if us < 1000 else f"{us / 1000:g} ms")
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens of context")
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _pyplot() -> Any:
    """matplotlib's pyplot without a display."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        fix = "pip install 'qsa-trt[plot]'"
        raise MissingPackageError("matplotlib", "no installation", "the Python package matplotlib", fix) from error
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "qsa-trt", "svg.fonttype": "none", "font.size": 8})
    return importlib.import_module("matplotlib.pyplot")
