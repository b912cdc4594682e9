"""ENGINE.json: what an engine was built from, and what a runtime must bind to it (docs/engine-manifest.md).

Engine and manifest appear together or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qsa_plugin import contract
from qsa_plugin.errors import FailedError

from .. import __version__
from ..new_file import new_file
from .network import PREVIEW_FEATURE, BuildOptions, uses_alias
from .patched_model import PatchedModel, QsaNode
from .profiles import Profile, Shape, Sizes

#: Raised whenever a key changes its meaning or goes; new keys alone do not raise it.
FORMAT_VERSION = 1
_SURFACE_BYTES = 2  # fp16 and bf16

Json = dict[str, Any]


def manifest_path(engine: Path) -> Path:
    """Where the manifest of an engine lies: ENGINE.json beside ENGINE."""
    return engine.with_name(engine.name + ".json")


def describe_engine(
    model: PatchedModel,
    profiles: Sequence[Profile],
    sizes: Sizes,
    options: BuildOptions,
    *,
    flavour: str,
    version: str,
    seconds: float,
) -> Json:
    """The manifest, all but its last entry `engine`, which `write_engine` adds.

    Args:
        model: what was built; its files are read for their checksums.
        profiles: the optimization profiles in engine order.
        sizes: the capacities behind them.
        options: the builder's options.
        flavour: TensorRT package.
        version: version of that package.
        seconds: wall time of parsing and building.
    """
    layers = [_layer(node, profiles, sizes) for node in model.nodes]
    return {
        "format": FORMAT_VERSION,
        "tool": {"name": "qsa-trt", "version": __version__},
        "tensorrt": {"flavour": flavour, "version": version},
        "onnx": {
            "file": model.path.name,
            "sha256": _sha256(model.path),
            "external_data": [
                {"file": os.path.relpath(file, model.path.parent), "sha256": _sha256(file)}
                for file in model.external_files
            ],
        },
        "plugin": {
            "name": contract.PLUGIN_NAME,
            "version": contract.PLUGIN_VERSION,
            "namespace": contract.PLUGIN_NAMESPACE,
        },
        "surface_dtype": model.surface,
        "layers": layers,
        "sizes": asdict(sizes),
        "pool": {
            "page_size": contract.PAGE_SIZE,
            "num_pages": max(layer["pool_shape"][1] for layer in layers),
            "pages_per_seq": (_largest(profiles, model.nodes[0].input("kv_page_table")) or [sizes.pages_per_seq])[-1],
            "total_bytes": sum(layer["pool_bytes"] for layer in layers),
        },
        "rope": _rope(model, profiles, sizes),
        "profiles": [{"name": p.name, "shapes": {n: asdict(s) for n, s in p.shapes.items()}} for p in profiles],
        "flags": {
            "strongly_typed": True,
            "preview_features": [PREVIEW_FEATURE] if uses_alias(model) else [],
            "workspace": options.workspace,
            "version_compatible": options.version_compatible,
            "hardware_compatible": options.hardware_compatible,
        },
        "targets": list(options.targets),
        "build_seconds": round(seconds, 3),
    }


def _layer(node: QsaNode, profiles: Sequence[Profile], sizes: Sizes) -> Json:
    derived = (2, sizes.num_pages, contract.PAGE_SIZE, node.geometry.num_kv_heads, node.geometry.pool_width)
    pool_shape = _largest(profiles, node.input("past_key_value")) or derived
    return {
        "name": node.name,
        "op_type": node.op_type,
        "attributes": node.geometry.to_attributes(),
        "past": node.input("past_key_value"),
        "present": node.outputs[contract.OUTPUT_INDEX["present_key_value"]],
        "pool_shape": list(pool_shape),
        "pool_bytes": math.prod(pool_shape) * _SURFACE_BYTES,
    }


def _rope(model: PatchedModel, profiles: Sequence[Profile], sizes: Sizes) -> Json:
    rope = model.rope
    derived = (1, rope.positions or sizes.max_positions, rope.rotary_dims)
    _, positions, rotary_dims = _largest(profiles, rope.tensor) or derived
    return {
        "tensor": rope.tensor,
        "source": "initializer" if rope.baked else "input",
        "rotary_dims": rotary_dims,
        "max_positions": positions,
    }


def _largest(profiles: Sequence[Profile], tensor: str) -> Shape | None:
    """The largest shape of a graph input over all profiles; None for a tensor that is none."""
    return max((profile.shapes[tensor].max for profile in profiles if tensor in profile.shapes), default=None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_engine(engine: Path, serialized: Any, manifest: Json) -> Json:
    """Write ENGINE and ENGINE.json, both or none.

    Args:
        engine: where the engine goes; replaced if it exists.
        serialized: the engine's bytes (anything with the buffer protocol).
        manifest: what `describe_engine` returned.

    Returns:
        The manifest as written, with the entry `engine`.

    Raises:
        FailedError: a file cannot be written.
    """
    data = memoryview(serialized)
    complete = manifest | {
        "engine": {"file": engine.name, "bytes": data.nbytes, "sha256": hashlib.sha256(data).hexdigest()}
    }
    text = _readable(json.dumps(complete, indent=2)) + "\n"
    try:
        with new_file(engine) as new_engine, new_file(manifest_path(engine)) as new_manifest:
            new_engine.write_bytes(data)
            new_manifest.write_text(text, encoding="utf-8")
            _move_both(new_engine, engine, new_manifest, manifest_path(engine))
    except OSError as error:
        raise FailedError(f"cannot write {error.filename or engine}: {error.strerror}; nothing was written") from error
    written: Json = json.loads(text)
    return written


def _readable(text: str) -> str:
    """JSON with every list of numbers on one line: shapes fill the manifest."""
    return re.sub(r"\[\n[\s\d,]+\]", lambda match: re.sub(r"\s+", "", match[0]).replace(",", ", "), text)


def _move_both(new_engine: Path, engine: Path, new_manifest: Path, manifest: Path) -> None:
    """An engine never lies there with another one's manifest: the old manifest goes first, the new one comes last."""
    manifest.unlink(missing_ok=True)
    new_engine.replace(engine)
    try:
        new_manifest.replace(manifest)
    except BaseException:
        engine.unlink()
        raise
