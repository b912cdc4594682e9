"""Every decode kernel compiles for every target without spilling. No GPU."""

from __future__ import annotations

import pytest

from qsa_plugin import jit
from qsa_plugin.decode_plan import DECODE_KERNELS, SCORE_STAGE, attend_shape, decode_tunings
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, Specialisation, shared_limit


@pytest.mark.parametrize("arch", ARCHES.values())
@pytest.mark.parametrize("name", ["real-bf16", "largest", "smallest"])
def test_decode_kernels_compile_without_spills(name: str, arch: str) -> None:
    """`make compile-test` compiles the whole table; the corners are compiled always."""
    _compile_all(SPECIALISATIONS[name].on(arch))


@pytest.mark.compile_table
@pytest.mark.parametrize("name", list(SPECIALISATIONS))
@pytest.mark.parametrize("arch", ARCHES.values())
def test_the_whole_table_compiles_without_spills(arch: str, name: str) -> None:
    _compile_all(SPECIALISATIONS[name].on(arch))


@pytest.mark.compile_table
def test_the_compiler_is_the_one_asked_for(pytestconfig: pytest.Config) -> None:
    """`make compile-test` runs these tests once with each NVRTC that it names."""
    wanted = pytestconfig.getoption("--nvrtc")
    if wanted is None:
        pytest.skip("no --nvrtc given: any NVRTC will do")
    assert ".".join(map(str, jit.nvrtc_version())) == wanted


def _compile_all(spec: Specialisation) -> None:
    for name, tuning in [*decode_tunings(spec, spec.compute_capability), ("decode_score", SCORE_STAGE)]:
        cubin = jit.compile_kernel(name, spec, tuning)
        assert list(cubin.resources) == [name]
        resources = cubin.resources[name]
        assert resources.spill_bytes == 0, f"{name} for {spec}: {resources}"
        assert "warning" not in cubin.log, cubin.log


def test_every_decode_kernel_is_tuned_on_every_target() -> None:
    for spec in SPECIALISATIONS.values():
        for capability in ARCHES:
            tunings = decode_tunings(spec, capability)
            assert {name for name, _ in tunings} == set(DECODE_KERNELS)
            assert attend_shape(spec, capability).shared_bytes(spec, clustered=True) <= shared_limit(capability)
