"""What is known about an engine: from ENGINE.json and this machine; from the engine itself only on request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsa_plugin import flavour_name, flavour_version, register, tensorrt
from qsa_plugin.contract import Geometry
from qsa_plugin.errors import InputError, QsaError

from .. import device
from ..building.manifest import manifest_path
from ..columns import columns
from ..patching.files import ENGINE_MAGIC
from ..runtime.engine_file import mismatches
from ..runtime.layout import load_manifest
from ..tensorrt_log import failure, logger
from .layer_table import HEAD, row

#: First bytes of engines by the family of packages that reads them.
_MAGIC = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}


@dataclass(frozen=True)
class EngineInspection:
    """A TensorRT engine.

    Attributes:
        file: its path.
        size: bytes.
        family: what can read it, told by its first bytes.
        manifest: the content of ENGINE.json; None where there is none.
        mismatches: why this machine should not load it, each with a remedy; empty when everything fits.
        contents: what the engine says of itself; None where it was not deserialised.
    """

    file: Path
    size: int
    family: str
    manifest: Mapping[str, Any] | None
    mismatches: tuple[str, ...]
    contents: Mapping[str, Any] | None

    def json(self) -> str:
        """The findings for programs."""
        findings = {
            "kind": "engine",
            "file": str(self.file),
            "size": self.size,
            "family": self.family,
            "manifest": self.manifest,
            "mismatches": self.mismatches,
            "contents": self.contents,
        }
        return json.dumps(findings, indent=2)

    def summary(self) -> str:
        """The findings for people."""
        lines = [f"{self.file}: {self.family} engine, {self.size} bytes"]
        if self.manifest is not None:
            lines += _described(self.manifest)
        lines += [f"mismatch: {text}" for text in self.mismatches] or ["nothing is in the way of loading it here"]
        if self.contents is None:
            return "\n".join([*lines, "not deserialised: engines hold code (--deserialize loads those you trust)"])
        return "\n".join([*lines, *_contents(self.contents)])


def _described(manifest: Mapping[str, Any]) -> list[str]:
    built, pool, rope, engine = (manifest[key] for key in ("tensorrt", "pool", "rope", "engine"))
    targets = ", ".join(manifest["targets"]) or f"the default of {built['flavour']}"
    lines = [
        f"built by {manifest['tool']['name']} {manifest['tool']['version']} with {built['flavour']} {built['version']}"
        f" in {manifest['build_seconds']} s, targets: {targets}",
        f"from {manifest['onnx']['file']}, sha256 {manifest['onnx']['sha256']}",
        f"engine sha256 {engine['sha256']}",
        f"plugin {manifest['plugin']['name']} version {manifest['plugin']['version']}, surface"
        f" {manifest['surface_dtype']}: qsa_plugin.register() comes before the engine",
        f"QSA attention layers: {len(manifest['layers'])}",
    ]
    rows = [
        (
            *row(layer["name"], layer["op_type"], Geometry.from_attributes(layer["attributes"]), rope["rotary_dims"]),
            layer["past"],
            layer["pool_bytes"],
        )
        for layer in manifest["layers"]
    ]
    lines += [f"  {line}" for line in columns([(*HEAD, "pool", "bytes"), *rows])] if rows else []
    lines += [
        f"pools: {pool['num_pages']} pages of {pool['page_size']} tokens a plane, {pool['pages_per_seq']} a sequence,"
        f" {pool['total_bytes']} bytes in all",
        f"rope table: {rope['source']} {rope['tensor']}, {rope['max_positions']} positions",
    ]
    for profile in manifest["profiles"]:
        lines.append(f"profile {profile['name']}:")
        shapes = [(name, *(_dims(s[k]) for k in ("min", "opt", "max"))) for name, s in profile["shapes"].items()]
        lines += [f"  {line}" for line in columns([("input", "min", "opt", "max"), *shapes])]
    return lines


def _contents(contents: Mapping[str, Any]) -> list[str]:
    tensors = [(t["name"], t["mode"], t["dtype"], _dims(t["shape"]), t["format"]) for t in contents["tensors"]]
    lines = [
        f"deserialised: {contents['layers']} layers, of which {len(contents['plugin_layers'])} of the plugin;"
        f" {contents['profiles']} profiles, {contents['device_memory']} bytes of activations"
    ]
    lines += [f"  {line}" for line in columns([("tensor", "mode", "dtype", "shape", "format"), *tensors])]
    reformats = contents["reformats"]
    return [*lines, *(f"  reformatted or copied: {name}" for name in reformats)]


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def is_engine(path: Path) -> bool:
    """Whether a file starts as TensorRT's engines do; False for one that cannot be read."""
    return _first_bytes(path)[1:] == ENGINE_MAGIC


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError:
        return b""


def inspect_engine(path: Path, *, deserialize: bool) -> EngineInspection:
    """Read what lies beside an engine and compare it with this machine.

    Args:
        path: the engine.
        deserialize: load it too.

    Raises:
        InputError: ENGINE.json is there and not readable.
        FailedError: the engine cannot be deserialised.
    """
    manifest = load_manifest(manifest_path(path)) if manifest_path(path).is_file() else None
    return EngineInspection(
        file=path,
        size=path.stat().st_size,
        family=_MAGIC.get(_first_bytes(path), "TensorRT"),
        manifest=manifest,
        mismatches=tuple(_mismatches(path, manifest)),
        contents=_deserialized(path, manifest) if deserialize else None,
    )


def _mismatches(path: Path, manifest: Mapping[str, Any] | None) -> list[str]:
    if manifest is None:
        beside = manifest_path(path)
        return [
            str(InputError("ENGINE.json", "none", f"the file {beside}", "copy it along, or build the engine again"))
        ]
    try:
        flavour = flavour_name()
        version = flavour_version()
    except QsaError as error:
        return [str(error)]
    capability = device.compute_capability()
    found = mismatches(path, manifest, flavour=flavour, version=version, capability=capability)
    return [str(error) for error in found]


def _deserialized(path: Path, manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the engine says of itself.

    Raises:
        FailedError: TensorRT cannot load it.
    """
    trt = tensorrt()
    register()
    log = logger(trt)
    log.restart(verbose=False)
    runtime = trt.Runtime(log)
    engine = runtime.deserialize_cuda_engine(path.read_bytes()) if runtime is not None else None
    if engine is None:
        raise failure(f"{path} cannot be deserialised", log)
    information = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    layers = [_layer_name(layer) for layer in json.loads(information).get("Layers", [])]
    nodes = [layer["name"] for layer in manifest["layers"]] if manifest is not None else []
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return {
        "layers": engine.num_layers,
        "plugin_layers": [name for name in layers if any(node in name for node in nodes)],
        "reformats": [name for name in layers if "reformat" in name.lower() or "copy" in name.lower()],
        "profiles": engine.num_optimization_profiles,
        "device_memory": engine.device_memory_size_v2,
        "tensors": [
            {
                "name": name,
                "mode": engine.get_tensor_mode(name).name.lower(),
                "dtype": engine.get_tensor_dtype(name).name.lower(),
                "shape": [int(d) for d in engine.get_tensor_shape(name)],
                "format": engine.get_tensor_format_desc(name),
            }
            for name in names
        ],
    }


def _layer_name(layer: Any) -> str:
    """A layer is a name alone, or an object with one, as the engine's profiling verbosity has it."""
    return str(layer["Name"] if isinstance(layer, Mapping) else layer)
