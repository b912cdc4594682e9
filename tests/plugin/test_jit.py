"""The JIT without a GPU: its cache, its errors, the compiler's report."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_plugin import jit
from qsa_plugin.environment import CACHE_VARIABLE
from qsa_plugin.errors import FailedError
from qsa_plugin.specialisation import SPECIALISATIONS

SPEC = SPECIALISATIONS["smallest"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cubin_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile_kernel("decode_score", SPEC)
    assert len(list(cache.glob("decode_score-sm_80-*.cubin"))) == 1
    monkeypatch.setattr(jit, "compile_source", lambda *_: pytest.fail("compiled twice"))
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


def test_a_compile_error_names_kernel_target_and_cause(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel_folder", lambda: Path(__file__).parent / "kernels")
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
