"""What GPU tests share: kernels compiled ahead, and figures that end up in the results file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_trt import device
from tests.support.compile_ahead import compile_ahead
from tests.support.gpu_results import RECORD

RecordError = Callable[[str, float, float | None], None]


#: What the quick tests compile.
QUICK = (
    "real-fp16",
    "real-bf16",
    "group-7",
    "group-16",
    "head-64",
    "ratio-8",
    "budget-odd-blocks",
    "head-256-index-32",
)


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """All that a session needs in the disk cache, by all processors at once."""
    capability = device.compute_capability()
    if capability is None:
        return
    quick = all(item.get_closest_marker("quick") for item in request.session.items)
    names = QUICK if quick else SPECIALISATIONS
    specs = [SPECIALISATIONS[name].on(arch_of(capability)) for name in names]
    compile_ahead(specs, portable=not quick)


@pytest.fixture
def record_error(request: pytest.FixtureRequest) -> RecordError:
    """`record_error(name, value, bound)` keeps a figure for the results file, then asserts that it is within its bound.

    A bound of None records a figure that no bound is stated for.
    """

    def record(name: str, value: float, bound: float | None) -> None:
        figure = {"name": name, "value": float(value), "bound": bound}
        request.node.user_properties.append((RECORD, figure))
        print(f"{name}: {value:.6g} (bound {bound})")
        assert bound is None or value <= bound, f"{name}: {value:.6g} > {bound}"

    return record
