"""Creators and registration."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsa_plugin import clear_errors, first_error, flavour_name, flavour_version, register, tensorrt
from qsa_plugin.contract import ATTRIBUTES
from qsa_plugin.errors import ContractError, InputError
from qsa_plugin.plugin import FORMAT_VERSION
from qsa_trt.plugin_host import field_collection
from tests.support.plugin_host import GEOMETRY, creator, needs_tensorrt

pytestmark = needs_tensorrt
ROOT = Path(__file__).parents[2]
NAMES = ("QsaAttention", "QsaAttentionPlugin")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    clear_errors()
    yield
    clear_errors()


def run_python(code: str) -> str:
    """Standard output of a fresh process; one registry serves a whole process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_register_says_what_it_registered() -> None:
    registration = register()
    assert registration.flavour == flavour_name()
    assert registration.version == flavour_version()
    assert registration.names == NAMES


def test_register_is_idempotent_from_many_threads() -> None:
    code = """
import threading, qsa_plugin
barrier, found = threading.Barrier(16), []
def work():
    barrier.wait()
    found.append(qsa_plugin.register())
threads = [threading.Thread(target=work) for _ in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(found) == 16 and all(r is found[0] for r in found)
assert qsa_plugin.register() is found[0]
registry = qsa_plugin.tensorrt().get_plugin_registry()
print([c.name for c in registry.all_creators if c.name.startswith("Qsa")], found[0].names)
"""
    assert run_python(code) == "['QsaAttention', 'QsaAttentionPlugin'] ('QsaAttention', 'QsaAttentionPlugin')"


_FOREIGN = """
import qsa_plugin
trt = qsa_plugin.tensorrt()
class Foreign(trt.IPluginCreatorV3One):
    def __init__(self, name):
        trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = name, "1", ""
        self.field_names = trt.PluginFieldCollection([])
foreign = Foreign({name!r})
assert trt.get_plugin_registry().register_creator(foreign, "")
try:
    print(qsa_plugin.register().names)
except qsa_plugin.QsaError as error:
    print(error.exit_code, error)
"""


def test_edge_llms_own_creator_keeps_its_name() -> None:
    assert run_python(_FOREIGN.format(name="QsaAttentionPlugin")) == "('QsaAttention',)"


def test_a_foreign_creator_of_our_name_is_an_error() -> None:
    said = run_python(_FOREIGN.format(name="QsaAttention"))
    assert said.startswith("1 ")
    assert said.endswith("refused the creator QsaAttention: its registry already holds one of that name")


@pytest.mark.pitfall(28)
@pytest.mark.parametrize("name", NAMES)
def test_kind_28_the_registry_finds_the_creator(name: str) -> None:
    found = creator(name)
    assert (found.name, found.plugin_version, found.plugin_namespace) == (name, "1", "")


@pytest.mark.pitfall(28)
def test_kind_28_a_fresh_process_creates_the_plugin_of_an_engine() -> None:
    code = """
import qsa_plugin
from tests.support.plugin_host import runtime_plugin
trt = qsa_plugin.tensorrt()
assert trt.get_plugin_registry().get_creator("QsaAttention", "1", "") is None
plugin = runtime_plugin()
print(plugin.plugin_name, plugin.geometry.indexer_budget)
"""
    assert run_python(code) == "QsaAttention 64"


@pytest.mark.pitfall(29)
def test_kind_29_declared_fields_survive_gc() -> None:
    trt = tensorrt()
    kinds = {int: trt.PluginFieldType.INT32, float: trt.PluginFieldType.FLOAT32}
    found = creator()
    gc.collect()
    declared = [(field.name, field.type) for field in found.field_names]
    assert declared == [(attribute.name, kinds[attribute.kind]) for attribute in ATTRIBUTES]


def create(values: dict[str, int | float], phase: str = "BUILD") -> Any:
    trt = tensorrt()
    fields = field_collection(trt, values)
    return creator().create_plugin("layer_7", fields[0], getattr(trt.TensorRTPhase, phase))


def test_missing_optional_attributes_get_their_defaults() -> None:
    required = {a.name: GEOMETRY.to_attributes()[a.name] for a in ATTRIBUTES if a.default is None}
    plugin = create(required)
    assert plugin.geometry == GEOMETRY
    assert plugin.geometry.scale == 0.125
    assert plugin.layer_name == "layer_7"


@pytest.mark.pitfall(31)
def test_kind_31_a_missing_required_attribute_is_named_and_remembered() -> None:
    values = GEOMETRY.to_attributes()
    del values["indexer_budget"]
    with pytest.raises(ContractError, match="attribute indexer_budget: got nothing"):
        create(values)
    assert str(first_error()).startswith("plugin layer 'layer_7', create_plugin: attribute indexer_budget: got nothing")


def test_attributes_without_data_count_as_absent_and_lists_are_refused() -> None:
    trt = tensorrt()
    values = GEOMETRY.to_attributes()
    _, fields, arrays = field_collection(trt, values)
    empty, several = np.array([], np.float32), np.array([4, 8], np.int32)
    scale = trt.PluginField("attention_scale", empty, trt.PluginFieldType.FLOAT32)
    heads = trt.PluginField("num_q_heads", several, trt.PluginFieldType.INT32)
    with_empty = trt.PluginFieldCollection([scale if f.name == "attention_scale" else f for f in fields])
    assert creator().create_plugin("layer", with_empty, trt.TensorRTPhase.BUILD).geometry.attention_scale == 0.0
    with_several = trt.PluginFieldCollection([heads if f.name == "num_q_heads" else f for f in fields])
    with pytest.raises(ContractError, match=r"attribute num_q_heads: got \[4, 8\]; expected one number"):
        creator().create_plugin("layer", with_several, trt.TensorRTPhase.BUILD)
    assert arrays


@pytest.mark.pitfall(32)
@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, None])
def test_kind_32_a_newer_or_unknown_format_is_refused(version: int | None) -> None:
    values = GEOMETRY.to_attributes()
    if version is not None:
        values["format_version"] = version
    with pytest.raises(InputError) as caught:
        create(values, "RUNTIME")
    assert str(caught.value) == (
        f"serialised plugin fields: got format version {version}; expected 1 to {FORMAT_VERSION}, which this version "
        "of qsa_plugin reads; rebuild the engine, or install the version of qsa_plugin that built it"
    )
    assert first_error() is not None


@pytest.mark.pitfall(32)
def test_kind_32_this_format_is_read() -> None:
    values = {**GEOMETRY.to_attributes(), "format_version": FORMAT_VERSION, "attention_scale": -2.0}
    assert create(values, "RUNTIME").geometry.attention_scale == -2.0
