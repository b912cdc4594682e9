"""The JIT without a GPU: every decode kernel compiles for every target without spilling; the cache; the errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_plugin import jit
from qsa_plugin.decode_plan import DECODE_KERNELS, attend_shape, decode_tunings, select_shared
from qsa_plugin.environment import CACHE_VARIABLE
from qsa_plugin.errors import FailedError
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, Specialisation, shared_limit

SPEC = SPECIALISATIONS["smallest"]
#: Spill bytes allowed, by kernel: none where it would cost bandwidth, a little in the kernel of one token.
SPILLS = {"decode_append": 64, "decode_score": 0, "decode_select": 0, "decode_attend": 0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ARCHES.values())
@pytest.mark.parametrize("name", ["real-bf16", "largest", "smallest"])
def test_decode_kernels_compile_without_spills(name: str, arch: str) -> None:
    """`make compile-test` compiles the whole table; the corners are compiled always."""
    _compile_all(SPECIALISATIONS[name].on(arch))


@pytest.mark.compile_table
@pytest.mark.parametrize("arch", ARCHES.values())
def test_the_whole_table_compiles_without_spills(arch: str) -> None:
    for spec in SPECIALISATIONS.values():
        _compile_all(spec.on(arch))


def _compile_all(spec: Specialisation) -> None:
    for name, tuning in decode_tunings(spec, spec.compute_capability):
        cubin = jit.compile_kernel(name, spec, tuning)
        assert list(cubin.resources) == [name]
        resources = cubin.resources[name]
        assert resources.spill_bytes <= SPILLS[name], f"{name} for {spec}: {resources}"
        assert "warning" not in cubin.log, cubin.log


def test_every_decode_kernel_is_tuned_on_every_target() -> None:
    for spec in SPECIALISATIONS.values():
        for capability in ARCHES:
            tunings = decode_tunings(spec, capability)
            assert {name for name, _ in tunings} == set(DECODE_KERNELS)
            assert attend_shape(spec, capability).shared_bytes(spec, clustered=True) <= shared_limit(capability)
            assert select_shared(capability) + 29 * 1024 <= shared_limit(capability)  # and its static part


def test_a_cubin_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile_kernel("decode_score", SPEC)
    assert len(list(cache.glob("decode_score-sm_80-*.cubin"))) == 1
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert jit.compile_kernel("decode_score", SPEC) == first


def test_the_key_depends_on_source_options_target_and_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def key(defines: dict[str, int], arch: str = "sm_80") -> str:
        return jit.cache_key("decode_score", jit.unit_source("decode_score", defines), arch)

    base = key({"A": 1})
    assert key({"A": 1}) == base
    assert key({"A": 2}) != base
    assert key({"A": 1}, "sm_86") != base
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    assert key({"A": 1}) != base
    monkeypatch.undo()
    for name in ("decode_score.cu", "common.cuh"):
        (tmp_path / name).write_bytes((jit.kernel_folder() / name).read_bytes())
    monkeypatch.setattr(jit, "kernel_folder", lambda: tmp_path)
    copied = key({"A": 1})
    (tmp_path / "common.cuh").write_text("// changed\n")
    assert key({"A": 1}) != copied


def test_a_broken_cache_costs_a_compilation_only(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    assert jit.compile_kernel("decode_score", SPEC).code
    assert blocked.read_text() == "not a folder"


def test_nothing_half_written_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    assert jit.compile_kernel("decode_score", SPEC).code
    assert not list(cache.iterdir())


def test_a_compile_error_names_kernel_target_and_cause(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { int x = nonsense; }\n')
    monkeypatch.setattr(jit, "kernel_folder", lambda: tmp_path)
    with pytest.raises(FailedError, match=r"broken does not compile for sm_80: .*nonsense") as caught:
        jit.compile_kernel("broken", SPEC)
    assert "\n" not in str(caught.value)


def test_the_compilers_report_is_read() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas         .     48 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 12704 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
    assert jit.parse_report(log) == {"one": jit.Resources(40, 12704, 48, 12), "two": jit.Resources(10, 0, 0, 0)}
