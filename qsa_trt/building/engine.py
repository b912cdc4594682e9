"""`build_engine`: from a patched ONNX file to ENGINE and ENGINE.json.

`plan_build` finds everything that is wrong before TensorRT is started; `run_build` does the work.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qsa_plugin import ensure_rtx_library, flavour_name, flavour_version, register
from qsa_plugin import tensorrt as load_tensorrt
from qsa_plugin.errors import InputError

from ..patching.files import check_writable
from ..progress import Progress
from .compatibility import check_compatibility
from .manifest import Json, describe_engine, manifest_path, write_engine
from .network import BuildOptions, compile_engine, parse_targets
from .patched_model import PatchedModel, load_patched_model
from .profiles import Profile, Sizes, choose_sizes, derive_profiles, profile_table

_Result = TypeVar("_Result")
_INT64_MAX = (1 << 63) - 1
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class BuildPlan:
    """A build whose input has been checked."""

    model: PatchedModel
    output: Path
    sizes: Sizes
    profiles: tuple[Profile, ...]
    options: BuildOptions
    flavour: str
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """The profiles as a table, then what a user may not have meant."""
        warnings = [f"warning: {text}" for text in self.sizes.warnings]
        return "\n".join([profile_table(self.profiles), *warnings, *(f"note: {text}" for text in self.notes)])


@dataclass(frozen=True)
class BuildReport:
    """A finished build."""

    plan: BuildPlan
    manifest: Json

    @property
    def engine(self) -> Path:
        """The engine file."""
        return self.plan.output

    @property
    def manifest_file(self) -> Path:
        """ENGINE.json."""
        return manifest_path(self.plan.output)

    def summary(self) -> str:
        """What was made, one line a thing."""
        engine, tensorrt, pool = self.manifest["engine"], self.manifest["tensorrt"], self.manifest["pool"]
        targets = ", ".join(self.manifest["targets"]) or "the default of this TensorRT"
        count = len(self.manifest["layers"])
        return "\n".join(
            [
                f"engine    {self.engine}  {_mib(engine['bytes'])}, {self.manifest['build_seconds']:.1f} s",
                f"manifest  {self.manifest_file}",
                f"builder   {tensorrt['flavour']} {tensorrt['version']}, targets: {targets}",
                f"plugins   {count} QsaAttention layer{'s' * (count != 1)}, {self.manifest['surface_dtype']}",
                f"pools     {pool['num_pages']} pages of {pool['page_size']} tokens a layer, "
                f"{_mib(pool['total_bytes'])} in all",
            ]
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def build_engine(
    model: str | Path,
    output: str | Path | None = None,
    *,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    max_kv_len: int | None = None,
    num_pages: int | None = None,
    single_profile: bool = False,
    profile: Sequence[str] = (),
    target: Sequence[str] = (),
    timing_cache: str | Path | None = None,
    version_compatible: bool = False,
    hardware_compatible: str | None = None,
    workspace: int | None = None,
    verbose: bool = False,
    tensorrt: str | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build a TensorRT engine from a patched ONNX file; arguments and errors of `plan_build` and `run_build`."""
    return run_build(
        plan_build(
            model,
            output,
            max_batch=max_batch,
            max_seq_len=max_seq_len,
            max_kv_len=max_kv_len,
            num_pages=num_pages,
            single_profile=single_profile,
            profile=profile,
            target=target,
            timing_cache=timing_cache,
            version_compatible=version_compatible,
            hardware_compatible=hardware_compatible,
            workspace=workspace,
            verbose=verbose,
            tensorrt=tensorrt,
        ),
        progress=progress,
    )


def plan_build(
    model: str | Path,
    output: str | Path | None = None,
    *,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    max_kv_len: int | None = None,
    num_pages: int | None = None,
    single_profile: bool = False,
    profile: Sequence[str] = (),
    target: Sequence[str] = (),
    timing_cache: str | Path | None = None,
    version_compatible: bool = False,
    hardware_compatible: str | None = None,
    workspace: int | None = None,
    verbose: bool = False,
    tensorrt: str | None = None,
) -> BuildPlan:
    """Check everything that can be checked before TensorRT starts to work, and derive the profiles.

    Args:
        model: a patched ONNX file.
        output: the engine file; None means `model` with `.engine`.
        max_batch: most sequences of one call; default 1, or what the graph fixes.
        max_seq_len: most tokens of one prefill; default 2048, at most `max_kv_len`.
        max_kv_len: longest sequence; default 4096, at most the positions of a baked rope table.
        num_pages: pages a plane of every pool; default `max_batch * ceil(max_kv_len / 128)`.
        single_profile: one profile for prefill and decode instead of two.
        profile: overrides `[PROFILE:]NAME:[min]/[opt]/[max]`.
        target: compute capabilities such as `sm_86`, TensorRT-RTX only; default: those of TensorRT-RTX.
        timing_cache: file whose timings are taken, and that gets those of this build; TensorRT only.
        version_compatible: let later versions load the engine, which then holds no code of the host; TensorRT only.
        hardware_compatible: `ampere+` lets GPUs of compute capability 8.0 and newer run the engine, `same-cc` those of
            this machine's; TensorRT only.
        workspace: limit of the builder's workspace pool, bytes; default: TensorRT's.
        verbose: print TensorRT's log to stderr.
        tensorrt: the flavour, `tensorrt` or `tensorrt_rtx`; None resolves it.

    Raises:
        InputError: anything wrong with the arguments, the file, its nodes or the installed packages.
    """
    path = Path(model)
    if workspace is not None:
        _check_bytes(workspace, workspace)
    patched = load_patched_model(path)
    engine = Path(output) if output is not None else default_output(path)
    _check_output(engine, (path, *patched.external_files))
    sizes = choose_sizes(
        patched, max_batch=max_batch, max_seq_len=max_seq_len, max_kv_len=max_kv_len, num_pages=num_pages
    )
    profiles = derive_profiles(patched, sizes, single=single_profile, overrides=profile)
    flavour = flavour_name(tensorrt)
    trt = load_tensorrt(flavour)
    if flavour == "tensorrt_lean":
        raise InputError(
            "TensorRT flavour",
            flavour,
            "tensorrt or tensorrt_rtx: tensorrt_lean runs engines, it does not build them",
            "pip install 'qsa-trt[rtx]', or set QSA_TRT_TENSORRT",
        )
    if flavour == "tensorrt_rtx":
        ensure_rtx_library()
    cache = None if timing_cache is None else Path(timing_cache)
    notes = check_compatibility(
        flavour, timing_cache=cache, version_compatible=version_compatible, hardware_compatible=hardware_compatible
    )
    options = BuildOptions(
        targets=parse_targets(trt, flavour, target),
        workspace=workspace,
        verbose=verbose,
        timing_cache=None if notes else cache,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
    )
    return BuildPlan(patched, engine, sizes, profiles, options, flavour, notes)


def run_build(plan: BuildPlan, *, progress: Progress | None = None) -> BuildReport:
    """Build, and write ENGINE and ENGINE.json, both or none.

    Args:
        plan: what to build.
        progress: told the builder's phases.

    Raises:
        FailedError: TensorRT cannot parse or build the model, or a file cannot be written.
        KeyboardInterrupt: Ctrl-C; the builder stopped at its next step and nothing was written.
    """
    trt = load_tensorrt(plan.flavour)
    register(plan.flavour)
    start = time.perf_counter()
    shown = progress or Progress()
    serialized = _interruptible(lambda stop: compile_engine(trt, plan.model, plan.profiles, plan.options, stop, shown))
    shown.text = f"write {plan.output.name}"
    manifest = describe_engine(
        plan.model,
        plan.profiles,
        plan.sizes,
        plan.options,
        flavour=plan.flavour,
        version=flavour_version(plan.flavour),
        seconds=time.perf_counter() - start,
    )
    return BuildReport(plan, write_engine(plan.output, serialized, manifest))


def default_output(model: Path) -> Path:
    """MODEL with `.engine` in place of `.onnx`."""
    return model.with_name(model.name.removesuffix(".onnx") + ".engine")


def parse_bytes(text: str) -> int:
    """A number of bytes as polygraphy spells it: `4G`, `512M`, `64k`, `1e9`; K, M and G are powers of 1024.

    Raises:
        InputError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?)\s*([KMG]?)\s*", text, flags=re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and len(text) < 40 else 0
    _check_bytes(size, text)
    return size


def _check_bytes(size: int, given: object) -> None:
    if not 1 <= size <= _INT64_MAX:
        raise InputError(
            "--workspace", given, "a positive number of bytes below 2^63, such as 4G or 512M", "correct the option"
        )


def _check_output(engine: Path, sources: Sequence[Path]) -> None:
    check_writable(engine)
    check_writable(manifest_path(engine))
    for file in (engine, manifest_path(engine)):
        for source in sources:
            if file.exists() and file.samefile(source):
                raise InputError("OUT", file, "another file than those of MODEL", "choose another name with -o")


def _interruptible(work: Callable[[threading.Event], _Result]) -> _Result:
    """Run `work` in a thread of its own, so that Ctrl-C reaches this one: TensorRT swallows it in callbacks.

    On Ctrl-C the event is set and the thread awaited; a second Ctrl-C no longer waits.
    """
    stop, done = threading.Event(), threading.Event()
    outcome: list[_Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work(stop))
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="qsa-trt build", daemon=True).start()
    try:
        done.wait()  # not join(): Python 3.11 takes a thread for finished once its join() was interrupted
    except KeyboardInterrupt:
        stop.set()
        done.wait()
        raise
    if failure:
        raise failure[0]
    return outcome[0]
