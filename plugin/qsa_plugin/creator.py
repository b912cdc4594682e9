"""Creators of the plugin and their registration with TensorRT."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .callbacks import remember
from .contract import ATTRIBUTES, EDGE_LLM_NAME, PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, Geometry
from .errors import ContractError, FailedError, InputError
from .flavour import flavour_name, flavour_version, tensorrt
from .plugin import FORMAT_FIELD, FORMAT_VERSION, Callbacks, plugin_class
from .rtx_library import ensure_rtx_library

NAMES = (PLUGIN_NAME, EDGE_LLM_NAME)


@dataclass(frozen=True)
class Registration:
    """What `register` registered: the flavour, its version, and the creator names that now lead to this plugin."""

    flavour: str
    version: str
    names: tuple[str, ...]


_registrations: dict[str, Registration] = {}
#: Every creator ever made. A registry keeps raw pointers for good, also where registration as a whole failed.
_creators: list[Any] = []
_lock = threading.Lock()


def register(flavour: str | None = None) -> Registration:
    """Register the plugin's creators in the process-wide registry of one TensorRT flavour.

    Call it before an ONNX file is parsed and before an engine is deserialised: TensorRT does not store Python plugins
    in engines. Calling it again, from any thread, returns the first registration.

    Args:
        flavour: as for `qsa_plugin.tensorrt`.

    Raises:
        MissingPackageError, InputError: as `qsa_plugin.tensorrt`.
        FailedError: the registry holds somebody else's creator of the name `QsaAttention`.
    """
    name = flavour_name(flavour)
    with _lock:
        if name not in _registrations:
            _registrations[name] = _register(name)
        return _registrations[name]


def _register(flavour: str) -> Registration:
    trt = tensorrt(flavour)
    registry = trt.get_plugin_registry()
    creators = [creator_class(trt)(name) for name in NAMES]
    _creators.extend(creators)
    # Edge-LLM's own library may hold its name already; its plugin then stays the one behind that name.
    ours = [creator.name for creator in creators if registry.register_creator(creator, PLUGIN_NAMESPACE)]
    if PLUGIN_NAME not in ours:
        raise FailedError(f"{flavour} refused the creator {PLUGIN_NAME}: its registry already holds one of that name")
    return Registration(flavour, flavour_version(flavour), tuple(ours))


@cache
def creator_class(trt: Any) -> type[Any]:
    """The `IPluginCreatorV3One` on one TensorRT module; instances take the name they answer to."""

    class QsaAttentionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self, name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = name
            self.plugin_version = PLUGIN_VERSION
            self.plugin_namespace = PLUGIN_NAMESPACE
            # TensorRT keeps raw pointers: the fields and their arrays live as long as the creator.
            self._declared = _declared_fields(trt)
            self.field_names = self._declared[0]

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Callbacks:
            try:
                return _create(trt, self.name, name, fields, phase)
            except BaseException as error:
                remember(name, "create_plugin", error)
                raise

    return QsaAttentionCreator


def _create(trt: Any, plugin_name: str, layer_name: str, fields: Any, phase: Any) -> Callbacks:
    values = _read_fields(fields)
    if phase == trt.TensorRTPhase.RUNTIME:
        _check_format(values.get(FORMAT_FIELD))
    elif trt.__name__ == "tensorrt_rtx":
        ensure_rtx_library()  # the parser aborts the process right after this call otherwise
    return plugin_class(trt)(plugin_name, layer_name, Geometry.from_attributes(values))


def _read_fields(fields: Any) -> dict[str, int | float]:
    """Field name to value; attributes that a node does not have come without data, or not at all."""
    values: dict[str, int | float] = {}
    for item in fields:
        data = np.asarray(item.data).reshape(-1)
        if data.size > 1:
            raise ContractError(f"attribute {item.name}", data.tolist(), "one number", "correct the node attribute")
        if data.size:
            values[item.name] = data[0].item()
    return values


def _check_format(version: int | float | None) -> None:
    if version is None or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            "serialised plugin fields",
            f"format version {version}",
            f"1 to {FORMAT_VERSION}, which this version of qsa_plugin reads",
            "rebuild the engine, or install the version of qsa_plugin that built it",
        )


def _declared_fields(trt: Any) -> tuple[Any, ...]:
    """(collection, what it points to) of the attributes that a node may carry."""
    types = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    arrays = [np.array([], dtype=types[attribute.kind][0]) for attribute in ATTRIBUTES]
    fields = [
        trt.PluginField(attribute.name, array, types[attribute.kind][1])
        for attribute, array in zip(ATTRIBUTES, arrays, strict=True)
    ]
    return trt.PluginFieldCollection(fields), fields, arrays
