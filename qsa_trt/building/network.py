"""Everything that talks to TensorRT's builder: parse, count plugin layers, add profiles, build."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsa_plugin import clear_errors, first_error
from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import FailedError, InputError

from ..progress import Progress
from ..tensorrt_log import failure, logger
from .compatibility import load_timing_cache, save_timing_cache, set_compatibility
from .patched_model import OPERATORS, PatchedModel
from .profiles import Profile

PREVIEW_FEATURE = "ALIASED_PLUGIN_IO_10_03"
#: TensorRT, its registry and the plugin's remembered errors are process-wide: one build at a time.
_one_build = threading.Lock()
#: Phases of phases that are told: those below come and go by the thousand.
_SHOWN_DEPTH = 3


@dataclass(frozen=True)
class BuildOptions:
    """What the builder is told beside the model and the profiles."""

    targets: tuple[str, ...] = ()
    workspace: int | None = None
    verbose: bool = False
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatible: str | None = None


def parse_targets(trt: Any, flavour: str, targets: Sequence[str]) -> tuple[str, ...]:
    """Compute capabilities such as `sm_86`, each item one or several separated by commas, as `SM86`.

    Raises:
        InputError: this TensorRT builds for the GPU at hand only, or does not know a target.
    """
    spelled = [t.strip() for item in targets for t in item.split(",") if t.strip()]
    if not targets:
        return ()
    if flavour != "tensorrt_rtx":
        raise InputError(
            "--target",
            ",".join(spelled),
            f"no target with {flavour}, which builds for the GPU of this machine",
            "leave --target out, or use tensorrt_rtx (set QSA_TRT_TENSORRT=tensorrt_rtx)",
        )
    known = {
        f"sm_{member.removeprefix('SM')}": member
        for member in trt.ComputeCapability.__members__
        if member.startswith("SM")
    }
    for target in spelled or [""]:
        if target not in known:
            raise InputError("--target", target, "one or more of " + ", ".join(known), "correct the option")
    return tuple(known[target] for target in dict.fromkeys(spelled))


def compile_engine(
    trt: Any,
    model: PatchedModel,
    profiles: Sequence[Profile],
    options: BuildOptions,
    cancelled: threading.Event,
    progress: Progress,
) -> Any:
    """Parse the model and build it, strongly typed; the builder's phases go to `progress`.

    Returns:
        TensorRT's host memory with the serialized engine; supports the buffer protocol.

    Raises:
        FailedError: the message holds the plugin's own first error where there is one, else TensorRT's.
    """
    with _one_build:
        clear_errors()
        log = logger(trt)
        log.restart(options.verbose)
        builder = start_builder(trt, log)
        network = builder.create_network(_strongly_typed(trt))
        parser = trt.OnnxParser(network, log)
        progress.text = f"parse {model.path.name}"
        _parse(parser, model, log)
        _check_plugin_layers(trt, network, model)
        config = _config(trt, builder, network, model, profiles, options)
        cache = load_timing_cache(config, options.timing_cache) if options.timing_cache else None
        monitor = _monitor(trt, cancelled, progress)
        config.progress_monitor = monitor
        serialized = builder.build_serialized_network(network, config)
        if serialized is None or first_error() is not None:  # the bindings build on after some exceptions
            raise failure(f"the build failed{_limits(options)}", log)
        if cache is not None and options.timing_cache:
            save_timing_cache(cache, options.timing_cache)
        return serialized


def _limits(options: BuildOptions) -> str:
    """What the options withheld from the builder, which its own error does not say."""
    if options.workspace is None:
        return ""
    return f" with at most {options.workspace} bytes of workspace (raise --workspace or leave it out)"


def start_builder(trt: Any, log: Any) -> Any:
    """TensorRT's builder.

    Raises:
        FailedError: it could not start, with the first error of `log` as the reason.
    """
    try:
        return trt.Builder(log)
    except Exception as error:  # pybind raises TypeError for a null pointer, which is what no GPU leads to
        raise failure(f"{trt.__name__} could not start its builder", log) from error


def _strongly_typed(trt: Any) -> int:
    """Creation flags; releases without the flag know no other kind of network."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parse(parser: Any, model: PatchedModel, log: Any) -> None:
    if parser.parse_from_file(str(model.path)):
        return
    cause = first_error()
    if cause is not None:
        raise cause.as_plugin_error() from cause.error
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    unsupported: dict[str, list[str]] = {}  # node type -> the details of its nodes
    for error in errors:
        if operator := _node_type(error):
            unsupported.setdefault(operator, []).append(_details(error))
    if not unsupported:
        raise failure(f"TensorRT's ONNX parser rejects {model.path}", log)
    types = ", ".join(f"{operator} ({_counted(details)})" for operator, details in unsupported.items())
    foreign = any(_UNKNOWN in error.desc() for error in errors)
    fix = "; files optimised by onnxruntime hold operators of its own: patch the file as exported" if foreign else ""
    raise FailedError(f"{model.path}: this TensorRT cannot parse {types}{_inlined(model) or fix}")


#: What the parser says of a type outside ONNX that no plugin goes by.
_UNKNOWN = "Plugin not found"


def _node_type(error: Any) -> str:
    """What a parser error is about; errors found late name only an importer, such as `importScatterElements`."""
    importer = re.match(r"(?:import|check)(\w+)", error.func())
    return str(error.node_operator()) or (importer[1] if importer else "")


def _details(error: Any) -> str:
    """Node and reason; "false" is all that the parser says of types of ONNX that it does not know."""
    node = f"node {error.node_name()}" if error.node_name() else ""
    reason = "unknown" if _UNKNOWN in error.desc() else error.desc()
    return ": ".join(text for text in (node, reason) if text and text != "false")


def _counted(details: list[str]) -> str:
    others = len(set(details)) - 1
    return f"{details[0]}, and {others} more" if others else details[0]


def _check_plugin_layers(trt: Any, network: Any, model: PatchedModel) -> None:
    found = sum(1 for plugin in _plugins(trt, network) if getattr(plugin, "plugin_name", None) in OPERATORS)
    if found < len(model.nodes):
        reason = _inlined(model) or ": another plugin answered to their name"
        raise FailedError(
            f"{model.path}: {found} plugin layers after parsing for {len(model.nodes)} QsaAttention nodes{reason}"
        )


def _plugins(trt: Any, network: Any) -> Iterator[Any]:
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.PLUGIN_V3:
            layer.__class__ = trt.IPluginV3Layer  # the bindings' way of a downcast
            yield layer.plugin


def _inlined(model: PatchedModel) -> str:
    """Why TensorRT may have taken the slow plain-op definition instead of the plugin; empty when it did not."""
    unnamed = [node.name for node in model.nodes if not node.names_plugin]
    if not (model.has_reference_body and unnamed):
        return ""
    return (
        f": TensorRT inlines the local function where a node has no attribute plugin_namespace ({', '.join(unnamed)});"
        " patch the original model again"
    )


def _config(
    trt: Any, builder: Any, network: Any, model: PatchedModel, profiles: Sequence[Profile], options: BuildOptions
) -> Any:
    config = builder.create_builder_config()
    for profile in profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    if uses_alias(model):
        config.set_preview_feature(getattr(trt.PreviewFeature, PREVIEW_FEATURE), True)
    set_compatibility(
        trt,
        config,
        version_compatible=options.version_compatible,
        hardware_compatible=options.hardware_compatible,
    )
    if options.targets:
        config.num_compute_capabilities = len(options.targets)
        for index, target in enumerate(options.targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, target), index)
    return config


def uses_alias(model: PatchedModel) -> bool:
    """Whether a node declares its pools as aliases, which takes a preview feature."""
    return any(node.geometry.pool_io == PoolIO.ALIAS for node in model.nodes)


def _profile(builder: Any, network: Any, profile: Profile) -> Any:
    native = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor:
            raise FailedError(
                f"graph input {tensor.name}: TensorRT needs its values to know shapes; make it a constant of the model"
            )
        shapes = profile.shapes[tensor.name]
        native.set_shape(tensor.name, shapes.min, shapes.opt, shapes.max)
    return native


def _monitor(trt: Any, cancelled: threading.Event, progress: Progress) -> Any:
    """Tells the builder's phases, and lets it stop at its next step once `cancelled` is set."""

    class BuildMonitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.depth: dict[str, int] = {}  # of the phases that have not finished, in the order of their starts

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self.depth[name] = self.depth.get(parent or "", 0) + 1
            self.tell()

        def phase_finish(self, name: str) -> None:
            self.depth.pop(name, None)
            self.tell()

        def tell(self) -> None:
            shown = [name for name, depth in self.depth.items() if depth <= _SHOWN_DEPTH]
            progress.text = "stop at the next step" if cancelled.is_set() else ": ".join(["build", *shown[-1:]])

        def step_complete(self, name: str, step: int) -> bool:
            return not cancelled.is_set()

    return BuildMonitor()
