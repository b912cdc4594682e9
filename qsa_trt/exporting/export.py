"""`export_onnx`: from a Hugging Face `qwen4_exp` checkpoint, or its config alone, to ONNX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import InputError, RefusedError

from .config import load_source
from .report import ExportReport
from .requirements import check_packages


@dataclass(frozen=True)
class Options:
    """The options of `export_onnx`, checked against each other."""

    random_init: int | None
    plain: bool
    layers: str | None
    only_attention: bool
    dtype: str
    pool_io: PoolIO
    bake_rope: bool
    max_positions: int | None
    reference_body: bool
    external_data: bool | None


def export_onnx(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    random_init: int | None = None,
    plain: bool = False,
    layers: str | None = None,
    only_attention: bool = False,
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16",
    pool_io: Literal["in-place", "alias", "copy"] = "in-place",
    rope_table: Literal["input", "initializer"] = "input",
    max_positions: int | None = None,
    reference_body: bool = True,
    external_data: bool | None = None,
) -> ExportReport:
    """Export a text model, or some of its layers, with one `QsaAttention` node a layer.

    The file has the inputs, outputs and nodes of a patched one: prefill and decode over paged pools. Weights are read
    and written one at a time, so that memory stays near the largest of them.

    Args:
        source: a checkpoint folder (config.json and safetensors files), or with `random_init` a config alone.
        output: where to write; weights above 64 MB go to a second file, OUT with `.data`.
        random_init: seed of random weights, which take the place of the checkpoint's.
        plain: plain operators and an attention mask instead of nodes: prefill only, and what `patch_onnx` takes.
        layers: `N` or `N-M`. Without the first layer the file takes the residual streams [B, S, hc_count * hidden] as
            `hidden_states`; without the last it gives them as `hidden_states_out`.
        only_attention: the attention module of one layer alone, [B, S, hidden] to [B, S, hidden].
        dtype: of weights, activations and nodes; fp32 is for comparisons in onnxruntime.
        pool_io: how each pool output relates to its input (the node attribute of that name).
        rope_table: `input` leaves `rope_rotary_cos_sin` a graph input; `initializer` bakes it in.
        max_positions: positions of the baked table; the config's own without it.
        reference_body: carry the plain-op function that onnxruntime runs.
        external_data: write the weights to a file of their own; None: above 64 MB.

    Raises:
        InputError: a file or an argument is wrong; tensors are missing or have other shapes than the config says.
        MissingPackageError: a package of the `export` extra is not installed.
        RefusedError: linear-attention layers, quantised weights, rope that depends on the length, or a weight that
            does not fit the dtype. Nothing was written, whatever the error.
    """
    _check_choice("--dtype", dtype, ("fp16", "bf16", "fp32"))
    _check_choice("--pool-io", pool_io, [p.option for p in PoolIO])
    _check_choice("--rope-table", rope_table, ("input", "initializer"))
    if max_positions is not None and (rope_table == "input" or max_positions < 1):
        raise InputError(
            "--max-positions", max_positions, "a positive number, with --rope-table initializer", "correct the options"
        )
    if plain and (pool_io != PoolIO.IN_PLACE.option or rope_table != "input" or not reference_body):
        raise InputError(
            "--plain", "an option about QsaAttention nodes", "none, since there are none", "give it to patch-onnx"
        )
    if random_init is not None and random_init < 0:
        raise InputError("--random-init", random_init, "a seed from 0", "correct the option")
    loaded = load_source(source)
    if random_init is None and loaded.folder is None:
        raise InputError(
            "CHECKPOINT_OR_CONFIG", source, "a checkpoint folder, for weights", "give the folder, or --random-init SEED"
        )
    if random_init is None and loaded.quantised:
        raise RefusedError(f"{source}: its weights are quantised, and only fp32, fp16 and bf16 weights are exported")
    options = Options(
        random_init=random_init,
        plain=plain,
        layers=layers,
        only_attention=only_attention,
        dtype=dtype,
        pool_io=next(p for p in PoolIO if p.option == pool_io),
        bake_rope=rope_table == "initializer",
        max_positions=max_positions,
        reference_body=reference_body,
        external_data=external_data,
    )
    check_packages()
    from .pipeline import run  # torch and transformers from here on

    return run(loaded, Path(output), options)


def _check_choice(option: str, value: object, legal: Sequence[object]) -> None:
    if value not in legal:
        raise InputError(option, value, f"one of {', '.join(map(str, legal))}", "choose one of these")
