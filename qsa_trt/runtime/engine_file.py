"""What can be said about an engine before it is deserialized: engines hold code, ENGINE.json does not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qsa_plugin.errors import InputError

#: Compute capabilities that TensorRT-RTX 1.7 runs on.
RTX_CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))


def cannot_execute(flavour: str, capability: tuple[int, int] | None) -> str | None:
    """Why a TensorRT flavour executes no engine on a device; None where it should.

    Args:
        flavour: `tensorrt`, `tensorrt_rtx` or `tensorrt_lean`.
        capability: the device's; None without a GPU.
    """
    if capability is None:
        return "no NVIDIA GPU with a driver is here"
    if flavour == "tensorrt_rtx" and capability not in RTX_CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in RTX_CAPABILITIES)
        return f"tensorrt_rtx runs on compute capability {known}, and this GPU has {capability[0]}.{capability[1]}"
    return None


def check_engine(
    engine: Path,
    manifest: Mapping[str, Any],
    *,
    flavour: str,
    version: str,
    capability: tuple[int, int] | None,
) -> None:
    """Compare an engine with its description, and both with this machine; arguments as for `mismatches`.

    Raises:
        InputError: the first thing that does not fit, and what to do about it.
    """
    for error in mismatches(engine, manifest, flavour=flavour, version=version, capability=capability):
        raise error


def mismatches(
    engine: Path,
    manifest: Mapping[str, Any],
    *,
    flavour: str,
    version: str,
    capability: tuple[int, int] | None,
) -> Iterator[InputError]:
    """Everything that does not fit, each with what to do about it.

    Args:
        engine: the engine file.
        manifest: the content of its ENGINE.json.
        flavour: TensorRT package in use.
        version: its version.
        capability: compute capability of the device; None without a GPU.
    """
    digest, described = _sha256("ENGINE", engine), manifest["engine"]["sha256"]
    if digest != described:
        yield InputError("ENGINE", f"{engine} with sha256 {digest[:12]}", described[:12], _BUILD_AGAIN)
    built = manifest["tensorrt"]
    if built["flavour"].removesuffix("_lean") != flavour.removesuffix("_lean"):
        yield InputError(
            "TensorRT flavour", flavour, f"{built['flavour']}, which built {engine}", "set QSA_TRT_TENSORRT, or build"
        )
    if built["version"] != version and not manifest["flags"].get("version_compatible"):
        yield InputError(
            f"{flavour} version", version, f"{built['version']}, which built {engine}", f"install it, or {_BUILD_AGAIN}"
        )
    if reason := cannot_execute(flavour, capability):
        yield InputError("GPU", reason, f"one that {flavour} executes {engine} on", "run it on another machine")
    targets = manifest["targets"]
    if capability is not None and targets and f"SM{capability[0]}{capability[1]}" not in targets:
        yield InputError(
            "compute capability",
            f"{capability[0]}.{capability[1]}",
            " or ".join(targets) + f", for which {engine} was built",
            "build it with --target for this GPU",
        )


def check_model(model: Path, manifest: Mapping[str, Any]) -> None:
    """Make sure that an engine was built from this file.

    Args:
        model: the patched ONNX file.
        manifest: the content of ENGINE.json.

    Raises:
        InputError: it cannot be read, or is another one.
    """
    digest, described = _sha256("patched file", model), manifest["onnx"]["sha256"]
    if digest != described:
        raise InputError(
            "patched file",
            f"{model} with sha256 {digest[:12]}",
            f"{described[:12]}, from which the engine was built",
            "give that file with --original",
        )


def _sha256(what: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(what, path, f"a readable file ({error.strerror})", "check the path") from error


_BUILD_AGAIN = "build the engine again"
