"""What GPU tests share: kernels compiled ahead, and figures that end up in the results file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qsa_plugin.specialisation import SPECIALISATIONS, arch_of
from qsa_trt import device
from tests.support.compile_ahead import compile_ahead
from tests.support.gpu_results import RECORD

RecordError = Callable[[str, float, float | None], None]
#: Files that run first: what they say is missed most where the time on a GPU ends early.
FIRST = ("test_whole_layer.py", "test_state.py", "test_attention_stage.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """What the session's tests need, in the disk cache, by all processors at once."""
    capability = device.compute_capability()
    if capability is None:
        return
    items = request.session.items
    names = {name for item in items for name in names_of(item)} & SPECIALISATIONS.keys()
    portable = any(parameters_of(item).get("portable") for item in items)
    compile_ahead([SPECIALISATIONS[name].on(arch_of(capability)) for name in sorted(names)], portable=portable)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """Of a parametrised test; empty for others."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def names_of(item: pytest.Item) -> list[Any]:
    """Specialisations by the customs of these tests: a parameter `name`, a constant `NAME` or `REAL` of the module."""
    module = getattr(item, "module", None)
    return [parameters_of(item).get("name"), getattr(module, "NAME", None), getattr(module, "REAL", None)]


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
