"""The cache of compiled kernels: where it is, what it holds, and how to fill it without a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsa_plugin import jit
from qsa_plugin.contract import Geometry
from qsa_plugin.environment import CACHE_VARIABLE, cache_folder
from qsa_plugin.errors import FailedError, InputError
from qsa_plugin.specialisation import ARCHES, SPECIALISATIONS, Specialisation, arch_of
from qsa_plugin.warm import kernels_of

from . import device
from .progress import Progress

SURFACES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class CacheSize:
    """What the cache folder holds: compiled kernels and bytes."""

    folder: Path
    kernels: int
    nbytes: int

    def summary(self) -> str:
        """One line."""
        return f"{self.kernels} kernels, {self.nbytes / (1 << 20):.1f} MiB in {self.folder}"


def cache_size() -> CacheSize:
    """Count the cache's own files; others in the folder are left alone.

    Raises:
        InputError: the folder cannot be read.
    """
    files = _files()
    return CacheSize(
        cache_folder(), sum(file.suffix == ".cubin" for file in files), sum(file.stat().st_size for file in files)
    )


def clear_cache() -> CacheSize:
    """Delete the cache's own files; returns what was there.

    Raises:
        InputError: the folder cannot be read.
        FailedError: a file cannot be deleted.
    """
    before = cache_size()
    for file in _files():
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise FailedError(f"cannot delete {file}: {error.strerror}") from error
    return before


def _files() -> list[Path]:
    try:
        return jit.cached_files()
    except OSError as error:
        raise InputError(
            "cache folder",
            cache_folder(),
            f"a readable folder ({error.strerror})",
            f"check its permissions, or set {CACHE_VARIABLE}",
        ) from error


@dataclass(frozen=True)
class WarmReport:
    """What warming did: kernels compiled now and kernels that were there."""

    folder: Path
    specialisations: tuple[Specialisation, ...]
    compiled: int
    found: int

    def summary(self) -> str:
        """One line a specialisation, then the counts."""
        lines = [f"{spec.arch:<7} {spec.surface:<9} rotary {spec.rotary_dims}" for spec in self.specialisations]
        return "\n".join([*lines, f"{self.compiled} kernels compiled, {self.found} were there, in {self.folder}"])


def warm_cache(
    model: str | os.PathLike[str] | None = None,
    *,
    arch: str | Sequence[str] | None = None,
    geometry: str | Geometry = "real",
    surface: str | None = None,
    rotary: int | None = None,
    progress: Progress | None = None,
) -> WarmReport:
    """Compile every kernel that the nodes of a model load, for given architectures; needs no GPU.

    Args:
        model: a patched ONNX file, an engine or its ENGINE.json; None takes `geometry`.
        arch: such as "sm_90,sm_86", or "all"; None is that of this machine's GPU.
        geometry: "real", Qwen3.8-Flash-Next's, or attributes; only without a model.
        surface: "fp16" or "bf16"; None is the model's, or both without one.
        rotary: rotary dims; None is the model's, or 64 of the real geometry.
        progress: told the kernels one by one.

    Raises:
        InputError: an unknown architecture, a wrong file, contradicting arguments, a cache that cannot be written, or
            no GPU whose architecture could be taken.
        RefusedError: the kernels do not support a geometry.
        FailedError: a kernel does not compile.
    """
    specialisations = specialisations_of(model, arch, geometry, surface, rotary)
    _check_folder(cache_folder())
    return compile_kernels(specialisations, progress)


def compile_kernels(specialisations: tuple[Specialisation, ...], progress: Progress | None = None) -> WarmReport:
    """Compile what is not in the cache; where that cannot be written, the kernels are forgotten again.

    Raises:
        FailedError: a kernel does not compile.
    """
    jobs = list(dict.fromkeys(job for spec in specialisations for job in kernels_of(spec)))
    missing = [job for job in jobs if not job.path.is_file()]
    progress = progress or Progress()
    progress.total = len(missing)
    for job in missing:
        progress.text = f"{job.name} {job.specialisation.arch}"
        jit.compile_kernel(job.name, job.specialisation, dict(job.tuning))
        progress.done += 1
    return WarmReport(cache_folder(), specialisations, len(missing), len(jobs) - len(missing))


def specialisations_of(
    model: str | os.PathLike[str] | None,
    arch: str | Sequence[str] | None,
    geometry: str | Geometry = "real",
    surface: str | None = None,
    rotary: int | None = None,
) -> tuple[Specialisation, ...]:
    """What `warm_cache` compiles; arguments and errors as there."""
    arches = _arches(arch)
    if model is not None and (geometry != "real" or surface is not None):
        raise InputError("MODEL", model, "no geometry and no surface beside it", "leave out one of the two")
    nodes = _geometry(geometry, surface, rotary) if model is None else _nodes(Path(model), rotary)
    return tuple(dict.fromkeys(Specialisation.of(*node, target) for node in nodes for target in arches))


#: What a specialisation is made of beside the target: attributes, surface, rotary dims.
_Node = tuple[Geometry, str, int]


def _arches(arch: str | Sequence[str] | None) -> list[str]:
    if arch is None:
        capability = device.compute_capability()
        if capability is None:
            raise InputError("--arch", "nothing", "an architecture, as no GPU is here", "pass --arch sm_90,sm_86")
        return [arch_of(capability)]
    given = arch.split(",") if isinstance(arch, str) else list(arch)
    if given == ["all"]:
        return list(ARCHES.values())
    known = {name.rstrip("a"): name for name in ARCHES.values()}
    for name in given:
        if name.strip().rstrip("a") not in known:
            raise InputError("--arch", name, f"some of {', '.join(known)}, or all", "correct the option")
    return [known[name.strip().rstrip("a")] for name in given]


def _geometry(geometry: str | Geometry, surface: str | None, rotary: int | None) -> list[_Node]:
    real = SPECIALISATIONS["real-fp16"]
    if geometry != "real" and not isinstance(geometry, Geometry):
        raise InputError("--geometry", geometry, "real", "give a model in place of it")
    if surface is not None and surface not in SURFACES:
        raise InputError("--surface", surface, " or ".join(SURFACES), "correct the option")
    attributes = geometry if isinstance(geometry, Geometry) else real.geometry
    chosen = [SURFACES[surface]] if surface else list(SURFACES.values())
    return [(attributes, name, rotary or real.rotary_dims) for name in chosen]


def _nodes(path: Path, rotary: int | None) -> list[_Node]:
    from .building.manifest import manifest_path
    from .building.patched_model import load_patched_model
    from .inspecting.engine_file import is_engine
    from .runtime.layout import load_manifest

    if is_engine(path):
        path = manifest_path(path)
    if path.suffix == ".json":
        manifest: dict[str, Any] = load_manifest(path)
        geometries = [Geometry.from_attributes(layer["attributes"]) for layer in manifest["layers"]]
        surface, known = manifest["surface_dtype"], manifest["rope"]["rotary_dims"]
    else:
        model = load_patched_model(path)
        geometries, surface, known = [node.geometry for node in model.nodes], model.surface, model.rope.rotary_dims
    if rotary is not None and known not in (None, rotary):
        raise InputError("--rotary", rotary, f"{known}, as {path} has", "leave the option out")
    if (dims := rotary or known) is None:
        raise InputError("--rotary", "nothing", f"the rotary dims, which {path} leaves open", "pass --rotary N")
    return [(geometry, surface, dims) for geometry in geometries]


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return
        reason = "Permission denied"
    except OSError as error:
        reason = str(error.strerror)
    raise InputError(
        "cache folder", folder, f"a folder to write to ({reason})", f"check its permissions, or set {CACHE_VARIABLE}"
    )
