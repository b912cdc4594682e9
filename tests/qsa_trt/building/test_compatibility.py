"""Timing cache, other versions, other GPUs: what a flavour lacks is said before the build."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsa_plugin.errors import FailedError, InputError
from qsa_trt.building import build_engine, network
from qsa_trt.building.compatibility import check_compatibility, load_timing_cache, save_timing_cache, set_compatibility
from qsa_trt.progress import Progress
from tests.support.requirements import has

NOTHING: dict[str, Any] = {"timing_cache": None, "version_compatible": False, "hardware_compatible": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version_compatible": True}, "--version-compatible: got tensorrt_rtx; expected tensorrt"),
        ({"hardware_compatible": "ampere+"}, "--hardware-compatible: got tensorrt_rtx; .*--target sm_86,sm_120"),
        ({"hardware_compatible": "any"}, "--hardware-compatible: got any; expected ampere[+] or same-cc"),
    ],
)
def test_what_tensorrt_rtx_lacks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_compatibility("tensorrt_rtx", **(NOTHING | options))


def test_tensorrt_has_all_of_them(tmp_path: Path) -> None:
    options = {"timing_cache": tmp_path / "t.cache", "version_compatible": True, "hardware_compatible": "same-cc"}
    assert check_compatibility("tensorrt", **options) == ()
    with pytest.raises(InputError, match=r"OUT: got .*absent"):
        check_compatibility("tensorrt", **(NOTHING | {"timing_cache": tmp_path / "absent" / "t.cache"}))


@pytest.mark.rtx
@pytest.mark.skipif(not has("tensorrt_rtx"), reason="tensorrt_rtx is not installed")
def test_a_timing_cache_has_no_use_with_tensorrt_rtx(model_file: Callable[..., Path], tmp_path: Path) -> None:
    progress = Progress()
    cache = tmp_path / "t.cache"
    report = build_engine(model_file(), max_kv_len=256, max_seq_len=128, timing_cache=cache, progress=progress)
    assert "note: tensorrt_rtx times nothing while it builds" in report.plan.summary()
    assert not cache.exists()
    assert progress.text == f"write {report.engine.name}"


@pytest.mark.rtx
@pytest.mark.skipif(not has("tensorrt_rtx"), reason="tensorrt_rtx is not installed")
@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX:DeprecationWarning")
def test_the_builder_is_told_and_timings_come_back(tmp_path: Path) -> None:
    """TensorRT-RTX has the calls of TensorRT, if not what is behind them."""
    import tensorrt_rtx as trt

    from qsa_trt.tensorrt_log import logger

    builder = trt.Builder(logger(trt))
    config = builder.create_builder_config()
    set_compatibility(trt, config, version_compatible=True, hardware_compatible=None)
    assert config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    assert config.get_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME), "an engine without code of the host"
    file = tmp_path / "t.cache"
    save_timing_cache(load_timing_cache(config, file), file)
    assert list(tmp_path.iterdir()) == [file]
    load_timing_cache(builder.create_builder_config(), file)


class OtherGpu:
    """A builder that refuses the timings, as TensorRT does those of another GPU."""

    def create_timing_cache(self, data: bytes) -> str:
        return "cache"

    def set_timing_cache(self, cache: str, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return False


def test_timings_of_another_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"t\.cache is of another TensorRT or GPU.*name another file"):
        load_timing_cache(OtherGpu(), tmp_path / "t.cache")


class FakeModule:
    """As much of TensorRT as is needed."""

    class HardwareCompatibilityLevel:
        AMPERE_PLUS, SAME_COMPUTE_CAPABILITY = "A", "S"

    class IProgressMonitor:
        pass


class FakeConfig:
    hardware_compatibility_level = ""


@pytest.mark.parametrize(("level", "native"), [("ampere+", "A"), ("same-cc", "S")])
def test_hardware_levels(level: str, native: str) -> None:
    config = FakeConfig()
    set_compatibility(FakeModule, config, version_compatible=False, hardware_compatible=level)
    assert config.hardware_compatibility_level == native


def test_the_builders_phases_are_told_down_to_a_depth() -> None:
    progress, cancelled = Progress(), threading.Event()
    monitor = network._monitor(FakeModule, cancelled, progress)
    parent = None
    for name in ("Building", "Subgraph", "Costs", "Tactics", "Nodes"):
        monitor.phase_start(name, parent, 1)
        parent = name
    assert progress.text == "build: Costs"
    for name in ("Nodes", "Tactics", "Costs"):
        monitor.phase_finish(name)
    assert progress.text == "build: Subgraph"
    assert monitor.step_complete("Nodes", 1)
    cancelled.set()
    assert not monitor.step_complete("Nodes", 2)
    monitor.phase_start("Next", None, 1)
    assert progress.text == "stop at the next step"
