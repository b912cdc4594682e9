"""What launches may depend on, and what the workspace may hold. No GPU."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest

import qsa_plugin
from qsa_plugin.contract import Call, Mode
from qsa_plugin.decode_plan import DeviceLimits, plan_decode
from qsa_plugin.specialisation import SPECIALISATIONS, Specialisation
from qsa_plugin.workspace import SLOTS

#: Calls of cuda-python that give a device's name.
NAMES_OF_A_DEVICE = {"cuDeviceGetName", "cudaGetDeviceName", "get_device_name", "device_name"}


@pytest.mark.pitfall(38)
def test_launches_depend_on_capability_and_multiprocessors_alone() -> None:
    """A plan is a function of the specialisation, the shapes and `DeviceLimits`, which holds no name."""
    assert {field.name for field in fields(DeviceLimits)} == {"capability", "sm_count", "clusters"}
    assert "name" not in {field.name for field in fields(Specialisation)}
    spec = SPECIALISATIONS["real-fp16"].on("sm_90a")
    call = Call(Mode.DECODE, 4, 1, 300, 64, 8192, 64)
    limits = DeviceLimits((9, 0), 132, {2: 66})
    assert plan_decode(spec, call, limits) == plan_decode(spec, call, replace(limits))


@pytest.mark.pitfall(38)
@pytest.mark.parametrize("path", sorted(Path(qsa_plugin.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_no_module_asks_for_the_name_of_a_device(path: Path) -> None:
    tree = ast.parse(path.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & NAMES_OF_A_DEVICE
    devices = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "name"]
    assert not any("Device" in ast.unparse(node.value) for node in devices)


@pytest.mark.pitfall(38)
@pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
def test_no_key_or_value_is_copied_to_the_workspace(mode: Mode) -> None:
    """No slot grows with the head size times the tokens a row attends to, or those of a sequence.

    Only split-K partials and queries know the head size, and neither has a dim of tokens attended to: four times the
    budget and four times the context leave them as they are.
    """
    g = replace(SPECIALISATIONS["real-fp16"].geometry, indexer_budget=1024)
    call = Call(mode, 2, 1 if mode is Mode.DECODE else 20_000, 400, 200, 25_600, 64)
    wider = replace(g, indexer_budget=4096)
    longer = replace(call, pages_per_seq=800, max_positions=102_400, num_pages=1600)
    for slot in SLOTS:
        if mode in slot.modes and slot.shape(g, call) != slot.shape(replace(g, head_size=128), call):
            assert slot.shape(g, call) == slot.shape(wider, longer), f"{slot.name} may hold keys or values"
