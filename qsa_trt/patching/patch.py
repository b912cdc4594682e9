"""`patch_onnx`: from an ONNX file with QSA attention in plain operators to one with `QsaAttention` nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto

from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import FailedError, InputError

from . import fuse_qkv as fuse
from . import rewrite
from .config import Config, load_config
from .detect import patched_nodes
from .files import AddedData, ExternalData, ModelFile, check_output, default_output, load_model, save_model
from .fused_ops import restore
from .graph_index import GraphIndex
from .linear import behind
from .plain_form import PlainForm, to_plain_form
from .plan import TYPE_NAMES, TYPES, make_plan
from .prune import Removed, prune, strip_stack_traces
from .reference_body import add_reference_function
from .report import LayerReport, PatchReport, TensorReport
from .rope_source import baked_table
from .structure import indexers
from .verify import PlainCut

if TYPE_CHECKING:
    from ..comparison import ValidationReport

#: What OUT gets behind its name for the file of fused weights.
FUSED_SUFFIX = ".qkv.data"


def patch_onnx(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dtype: Literal["fp16", "bf16", "fp32"] | None = None,
    pool_io: Literal["in-place", "alias", "copy"] = "in-place",
    rope_table: Literal["input", "initializer"] = "input",
    max_positions: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    reference_body: bool = True,
    external_data: ExternalData = "copy",
    fuse_qkv: bool = False,
    verify: bool = False,
    dry_run: bool = False,
) -> PatchReport:
    """Rewrite every QSA attention of a model into one `QsaAttention` node and write the result.

    Args:
        model: the ONNX file; never modified.
        output: where to write; by default MODEL with `.qsa.onnx`. It may not be MODEL itself.
        dtype: element type at the nodes. None: the graph's own fp16 or bf16; fp16 with casts in an fp32 graph.
        pool_io: how each pool output relates to its input (the node attribute of that name).
        rope_table: `input` leaves `rope_rotary_cos_sin` a graph input; `initializer` bakes it in.
        max_positions: positions of the baked table; needed there and only there.
        config: the model's `config.json` (path or content), for what the graph does not tell.
        reference_body: carry the plain-op function that onnxruntime runs.
        external_data: what becomes of weights in external data when OUT is in another folder than MODEL: `copy`;
            `link`, a hard link, or a copy where the file system has none; `reference`, where they lie below OUT's
            folder, since a location may not leave it. In MODEL's own folder they are never touched.
        fuse_qkv: merge the projections of every layer into one MatMul. What is made of external weights goes to a new
            file, OUT with `.qkv.data`.
        verify: run model and result in onnxruntime, as `qsa_trt.comparison.validate` does, before the result is kept.
        dry_run: do everything but write.

    Returns:
        What was done. Status `already-patched`: the model has QsaAttention nodes; nothing was written.

    Raises:
        InputError: a file or an argument is wrong.
        RefusedError: the model has no QSA attention, or one that cannot be cut safely; nothing was written.
        FailedError: the result cannot be written or, with `verify`, differs from the model; nothing was written.
        MissingPackageError: `verify` without onnxruntime.
    """
    io = _pool_io(pool_io)
    _check_choice("--dtype", dtype, (None, *TYPES))
    _check_choice("--external-data", external_data, get_args(ExternalData))
    _check_rope(rope_table, max_positions)
    config = load_config(config)
    source = load_model(model)
    target = Path(output) if output is not None else default_output(source.path)
    check_output(source, target, external_data)
    if fuse_qkv:
        check_output(source, target.with_name(target.name + FUSED_SUFFIX))
    form = to_plain_form(source.model, source.folder)
    if patched_nodes(source.model):
        plain = [f"{topk.label} is still an indexer in plain operators" for topk, _ in indexers(form.index)]
        if verify:
            plain.append(f"not verified: run qsa-trt validate {source.path} --original FILE")
        return PatchReport("already-patched", source.path, target, warnings=tuple(plain))
    options = EditOptions(dtype, io, max_positions, reference_body, fuse_qkv)
    edit = edit_model(source, form, target, config, options)
    verdicts: list[ValidationReport] = []

    def accept(written: Path) -> None:
        if verify:
            verdicts.append(_verify(source.path, written, target, config))

    if dry_run:
        accept(source.path)
    notes = () if dry_run else save_model(source.model, source, target, external_data, accept, edit.added)
    return replace(
        edit.report,
        status="dry-run" if dry_run else "patched",
        verification=next(iter(verdicts), None),
        warnings=(*edit.report.warnings, *notes),
    )


@dataclass(frozen=True)
class Edit:
    """What `edit_model` did, and the new weights that belong beside the model, if any."""

    report: PatchReport
    added: AddedData | None


@dataclass(frozen=True)
class EditOptions:
    """How to patch; the names are those of `patch_onnx`. A rope table is baked in where `max_positions` is given."""

    dtype: str | None = None
    pool_io: PoolIO = PoolIO.IN_PLACE
    max_positions: int | None = None
    reference_body: bool = True
    fuse_qkv: bool = False


def edit_model(source: ModelFile, form: PlainForm, target: Path, config: Config, options: EditOptions) -> Edit:
    """Patch a loaded model in memory; its external data stays as it is.

    Args:
        source: the file, whose proto is changed.
        form: of its model, from `to_plain_form`.
        target: where the result will be written.
        config: the model's config; empty when none is given.
        options: how to patch.

    Raises:
        InputError, RefusedError: as `patch_onnx`.
    """
    edited, index = source.model, form.index
    plan = make_plan(index, config, options.dtype, options.pool_io)
    plans = plan.layers
    rope, rope_text = _rope(index, plans, options.max_positions, config)
    warnings = _shape_warnings(index, plans)
    if form.inlined:
        warnings.append(f"local functions were inlined: {', '.join(form.inlined)}")
    layers = [_layer_report(index, plan) for plan in plans]
    additions = rewrite.add_layers(edited, index, plans, rope)
    rewrite.apply(edited, additions)
    fusion = fuse.Fusion(target.name + FUSED_SUFFIX)
    if options.fuse_qkv:
        fuse.fuse_qkv(edited, index, plan, additions.names, fusion)
    removed = prune(edited, index, plan.cache_outputs, additions.names)
    restore(edited, form.rewritten)
    strip_stack_traces(edited)
    if options.reference_body:
        add_reference_function(edited)
    report = PatchReport(
        status="patched",
        input=source.path,
        output=target,
        layers=tuple(layers),
        removed_inputs=removed.inputs,
        removed_outputs=removed.outputs,
        removed_nodes=removed.nodes,
        new_inputs=tuple(_tensor_report(v) for v in additions.inputs),
        new_outputs=tuple(_tensor_report(v) for v in additions.outputs),
        rope=rope_text,
        reference_body=options.reference_body,
        fused_widths=tuple(fusion.widths),
        warnings=(*warnings, *additions.warnings(), *_kept_warnings(removed), *fusion.notes),
    )
    return Edit(report, AddedData(fusion.data, fusion.write) if fusion.has_data else None)


def _rope(
    index: GraphIndex, plans: Sequence[rewrite.LayerPlan], max_positions: int | None, config: Config
) -> tuple[NDArray[np.float32] | None, str]:
    rotary = plans[0].attributes.rotary_dims
    if max_positions is None:
        return None, f"graph input, rotary dims {rotary}"
    table, origin = baked_table(index, [plan.cut for plan in plans], rotary, max_positions, config)
    return table, f"baked in, {max_positions} positions, rotary dims {rotary}, from {origin}"


def _verify(original: Path, written: Path, target: Path, config: Config) -> ValidationReport:
    """Compare the original with what was written; with itself, patched once more, where it is the same file."""
    from ..comparison import validate

    result = validate(written, original=None if written == original else original, config=config)
    for comparison in result.comparisons:
        if not comparison.passed:
            raise FailedError(
                f"{target} would differ from {original}: {comparison.phase}, {comparison.output}: largest row error"
                f" {comparison.error:.1e}, bound {comparison.bound:.0e}; nothing was written"
            )
    return replace(result, model=target)


def _layer_report(index: GraphIndex, plan: rewrite.LayerPlan) -> LayerReport:
    projections = plan.cut.anchors.projections if isinstance(plan.cut, PlainCut) else {}
    return LayerReport(
        index=plan.number,
        name=plan.cut.layer,
        strategy=plan.cut.strategy,
        geometry=plan.attributes.geometry,
        rotary_dims=plan.attributes.rotary_dims,
        graph_dtype=TYPE_NAMES[plan.graph_type],
        surface=TYPE_NAMES[plan.surface],
        where=plan.attributes.where,
        biases=tuple(name for name, tensor in projections.items() if any(n.op == "Add" for n in behind(index, tensor))),
    )


def _tensor_report(info: ValueInfoProto) -> TensorReport:
    kind = info.type.tensor_type
    shape = tuple(d.dim_param or int(d.dim_value) for d in kind.shape.dim)
    return TensorReport(info.name, TensorProto.DataType.Name(kind.elem_type).lower(), shape)


def _shape_warnings(index: GraphIndex, plans: Sequence[rewrite.LayerPlan]) -> list[str]:
    """Fixed sizes decide what the patched file can be used for."""
    batch, seq_len = rewrite.token_dims(index, plans[0].cut)
    warnings = []
    if isinstance(batch, int):
        warnings.append(f"the batch is fixed to {batch} in this graph")
    if seq_len == 1:
        warnings.append("the graph takes one token a call: the file decodes, and cannot prefill longer prompts")
    elif isinstance(seq_len, int):
        warnings.append(f"the graph takes {seq_len} tokens a call: the file prefills, and cannot decode")
    if any(isinstance(plan.cut, PlainCut) and len(plan.cut.topks) > 1 for plan in plans):
        warnings.append("the indexer is unrolled: the original is right at its own shape only")
    return warnings


def _kept_warnings(removed: Removed) -> list[str]:
    return [f"input {name} stays: its shape is read, and no other input has the same dims" for name in removed.kept]


def _pool_io(value: str) -> PoolIO:
    _check_choice("--pool-io", value, [p.option for p in PoolIO])
    return next(p for p in PoolIO if p.option == value)


def _check_choice(option: str, value: object, legal: Sequence[object]) -> None:
    if value not in legal:
        spelled = ", ".join(str(choice) for choice in legal if choice is not None)
        raise InputError(option, value, f"one of {spelled}", "choose one of these")


def _check_rope(rope_table: str, max_positions: int | None) -> None:
    _check_choice("--rope-table", rope_table, ("input", "initializer"))
    if rope_table == "input" and max_positions is not None:
        raise InputError(
            "--max-positions", max_positions, "no value with --rope-table input", "add --rope-table initializer"
        )
    if rope_table == "initializer" and (max_positions is None or max_positions < 1):
        raise InputError(
            "--max-positions",
            "nothing" if max_positions is None else max_positions,
            "a positive number of positions with --rope-table initializer",
            "give the longest sequence that will be run",
        )
