"""The `qsa-trt` command line. Results go to stdout, everything else to stderr.

Exit codes: 0 done, or nothing to do; 1 valid input that was refused, or work that failed; 2 anything found wrong before
work started (arguments, files, missing packages); 130 interrupted.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from qsa_plugin import contract
from qsa_plugin.errors import QsaError

from . import __version__
from .command import Group, Settings, progress, say, verbose
from .machine_commands import cache_command, doctor_command, selftest_command

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from qsa_plugin import flavour_name, flavour_version

    try:
        tensorrt = f"{flavour_name()} {flavour_version()}"
    except QsaError:
        tensorrt = "no usable TensorRT (see qsa-trt doctor)"
    click.echo(f"qsa-trt {__version__}, {tensorrt}")
    context.exit()


@click.group(cls=Group, context_settings=_SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and the TensorRT in use.",
)
def cli() -> None:
    """Qwen Sparse Attention for TensorRT: patch ONNX files and build engines from them."""


#: Options that patch-onnx and export share.
_POOL_IO = click.option(
    "--pool-io",
    type=click.Choice([p.option for p in contract.PoolIO]),
    default=contract.PoolIO.IN_PLACE.option,
    show_default=True,
    help="How the pool output relates to the pool input: one address (in-place), declared to TensorRT as an alias, or "
    "copied, for tools that give every output a buffer of its own.",
)
_REFERENCE_BODY = click.option(
    "--reference-body/--no-reference-body",
    default=True,
    show_default=True,
    help="Carry a plain-op definition of QsaAttention, which is what onnxruntime runs.",
)
_ROPE_TABLE = click.option(
    "--rope-table",
    type=click.Choice(["input", "initializer"]),
    default="input",
    show_default=True,
    help="Leave the rope table a graph input, or bake it in.",
)


@cli.command("patch-onnx")
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Where to write.  [default: MODEL with .qsa.onnx]")
@click.option(
    "--dtype",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    help="Surface of the QsaAttention nodes: fp16 or bf16, with casts around the node in graphs of another type; fp32 "
    "is for comparisons in onnxruntime only.  [default: the graph's own, fp16 in fp32 graphs]",
)
@_POOL_IO
@_ROPE_TABLE
@click.option("--max-positions", type=int, help="Positions of the baked rope table, which needs them.")
@click.option("--config", type=click.Path(), help="The model's config.json, for what the graph does not tell.")
@_REFERENCE_BODY
@click.option(
    "--external-data",
    type=click.Choice(["copy", "link", "reference"]),
    default="copy",
    show_default=True,
    help="What becomes of weights in external files when OUT is in another folder: copied, hard-linked (copied where "
    "that is impossible), or referenced, where they lie below OUT's folder.",
)
@click.option(
    "--fuse-qkv",
    is_flag=True,
    help="Merge the projections of every layer into one MatMul. What is made of external weights goes to OUT.qkv.data.",
)
@click.option("--verify", is_flag=True, help="Compare the result with MODEL in onnxruntime before it is kept.")
@click.option("--dry-run", is_flag=True, help="Print what would be done; write nothing.")
def patch_onnx_command(model: str, output: str | None, **options: Any) -> None:
    """Rewrite every QSA attention of the ONNX file MODEL into one QsaAttention node."""
    from .patching import patch_onnx

    with progress(f"patch {model}"):
        report = patch_onnx(model, output, **options)
    click.echo(report.summary())


@cli.command("export")
@click.argument("source", type=click.Path(), metavar="CHECKPOINT_OR_CONFIG")
@click.option("-o", "--output", type=click.Path(), required=True, help="Where to write.")
@click.option("--random-init", type=int, metavar="SEED", help="Random weights; a config.json is enough then.")
@click.option("--plain", is_flag=True, help="Plain operators, prefill only: what patch-onnx takes.")
@click.option("--layers", metavar="N[-M]", help="Decoder layers to export, from 0, both included.  [default: all]")
@click.option("--only-attention", is_flag=True, help="The attention module of one layer alone.")
@click.option(
    "--dtype",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    default="fp16",
    show_default=True,
    help="Of weights, activations and nodes; fp32 is for comparisons in onnxruntime.",
)
@_POOL_IO
@_ROPE_TABLE
@click.option("--max-positions", type=int, help="Positions of the baked rope table.  [default: the config's]")
@_REFERENCE_BODY
@click.option(
    "--external-data/--no-external-data",
    default=None,
    help="Write the weights to a file of their own, OUT.data, or into OUT.  [default: to their own above 64 MB]",
)
def export_command(source: str, output: str, **options: Any) -> None:
    """Export a Hugging Face qwen4_exp text model to ONNX with QsaAttention nodes.

    CHECKPOINT_OR_CONFIG is a folder with config.json and safetensors files, or with --random-init a config.json alone.
    """
    from .exporting import export_onnx

    with progress(f"export {source}"):
        report = export_onnx(source, output, **options)
    click.echo(report.summary())


@cli.command("build-engine")
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Where to write.  [default: MODEL with .engine]")
@click.option("--max-batch", type=int, help="Most sequences of one call.  [default: 1]")
@click.option("--max-seq-len", type=int, help="Most tokens of one prefill.  [default: 2048]")
@click.option("--max-kv-len", type=int, help="Longest sequence, prompt and answer.  [default: 4096]")
@click.option(
    "--num-pages",
    type=int,
    help="Pages per plane of every pool, 128 tokens each.  [default: max-batch * ceil(max-kv-len / 128)]",
)
@click.option("--single-profile", is_flag=True, help="One optimization profile for prefill and decode instead of two.")
@click.option(
    "--profile",
    multiple=True,
    metavar="[PROFILE:]NAME:MIN/OPT/MAX",
    help="Override the shapes of an input, as in decode:input_ids:[1,1]/[4,1]/[8,1]; may be repeated.",
)
@click.option(
    "--target", multiple=True, metavar="SM[,SM]", help="Compute capabilities such as sm_86,sm_120 (TensorRT-RTX only)."
)
@click.option(
    "--timing-cache", type=click.Path(), help="Take timings from this file and write them back (tensorrt only)."
)
@click.option(
    "--version-compatible",
    is_flag=True,
    help="Let later TensorRT versions load the engine, without code of the host in it (tensorrt only).",
)
@click.option(
    "--hardware-compatible",
    type=click.Choice(["ampere+", "same-cc"]),
    help="Let other GPUs run the engine: 8.0 and newer, or of the same compute capability (tensorrt only).",
)
@click.option("--workspace", metavar="BYTES", help="Limit of the builder's workspace, such as 4G.")
@click.option("--tensorrt", metavar="FLAVOUR", help="tensorrt or tensorrt_rtx.  [default: the first one installed]")
@verbose("Print TensorRT's log to stderr, and the traces behind an error.")
def build_engine_command(model: str, output: str | None, workspace: str | None, **options: Any) -> None:
    """Build a TensorRT engine from the patched ONNX file MODEL."""
    from .building import parse_bytes, plan_build, run_build

    size = None if workspace is None else parse_bytes(workspace)
    plan = plan_build(model, output, workspace=size, **options)
    click.echo(plan.summary())
    with progress(f"build {plan.output}") as shown:
        report = run_build(plan, progress=shown)
    click.echo(report.summary())


@cli.command("validate")
@click.argument("model", type=click.Path())
@click.option("--original", type=click.Path(), help="The unpatched file, where MODEL is a patched one.")
@click.option("--config", type=click.Path(), help="The model's config.json, for what the graph does not tell.")
@click.option("--lengths", metavar="N[,N]", help="Prompt lengths, one a sequence.  [default: 160,97,33]")
@click.option("--decode-steps", type=int, help="Tokens decoded after each prompt.  [default: 40]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random prompts.")
@click.option("--cuda-graph", is_flag=True, help="Of an engine: decode by replaying a CUDA graph.")
@click.option("--gpu", is_flag=True, help="Compare the plugin on this machine's GPU, layer by layer, with onnxruntime.")
@click.option("--print-polygraphy", is_flag=True, help="Print the polygraphy commands to the same end; run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
def validate_command(
    model: str, gpu: bool, cuda_graph: bool, print_polygraphy: bool, as_json: bool, **options: Any
) -> int:
    """Compare MODEL's attention before and after patching, in onnxruntime and in fp32.

    MODEL is an unpatched ONNX file, which is patched into a temporary folder, or a patched one with --original. With
    --gpu the plugin computes every layer from the activations that onnxruntime gave it (fp16 or bf16 surface). Of an
    engine, TensorRT's results are compared with those of the patched file beside it, or of --original.
    """
    from .comparison import validate
    from .engine_validation import validate_engine
    from .inspecting.engine_file import is_engine
    from .layer_validation import validate_layers
    from .polygraphy_command import polygraphy_command

    engine = is_engine(Path(model))
    if print_polygraphy:
        if engine:
            raise click.UsageError("--print-polygraphy: give the ONNX file; polygraphy builds an engine of its own")
        if as_json:
            raise click.UsageError("--print-polygraphy: it prints commands, which --json has no form for")
        click.echo(polygraphy_command(model))
        return 0
    if cuda_graph and not engine:
        raise click.UsageError("--cuda-graph: MODEL is no engine")
    if engine and (gpu or options["config"]):
        raise click.UsageError("--gpu and --config: they have no meaning for an engine")
    for name in ("original", "config") if gpu else ("config",) if engine else ():
        if options.pop(name):
            raise click.UsageError(f"--{name}: the GPU is compared with MODEL itself; leave it out with --gpu")
    report: Any
    with progress(f"validate {model}") as shown:
        if engine:
            report = validate_engine(model, cuda_graph=cuda_graph, **options)
        elif gpu:
            report = validate_layers(model, **options)
        else:
            report = validate(model, progress=shown, **options)
    click.echo(report.json() if as_json else report.summary())
    return 0 if report.passed else 1


@cli.group("bench", invoke_without_command=True)
@click.option("--quick", is_flag=True, help="Fewer cases and repeats: half a minute instead of two and a half.")
@click.option("--cases", metavar="PATTERN[,PATTERN]", help="Only the cases whose names match, as in decode-b1-*.")
@click.option("--json", type=click.Path(), help="Write the record to this file too.")
@click.pass_context
def bench_command(context: click.Context, /, **options: Any) -> None:
    """Time the plugin on this machine's GPU: whole calls, their kernels, the host, floors and dense attention.

    Needs an NVIDIA GPU and any TensorRT package; with PyTorch for CUDA also cuDNN's dense attention is timed.
    """
    if context.invoked_subcommand is None:
        from .benchmark import run_benchmark

        click.echo(run_benchmark(**options, progress=say).summary())


@bench_command.command("compare")
@click.argument("before", type=click.Path())
@click.argument("after", type=click.Path())
@click.option("--noise", type=float, default=0.05, show_default=True, help="Slowdown that passes, as a fraction.")
def bench_compare_command(before: str, after: str, noise: float) -> int:
    """Compare two records case by case; exit 1 where something became slower by more than the noise."""
    from .benchmark import compare_records

    comparison = compare_records(before, after, noise)
    click.echo(comparison.summary())
    return 0 if comparison.passed else 1


@bench_command.command("plot")
@click.argument("file", type=click.Path())
@click.option("-o", "--output", type=click.Path(), required=True, help="Where to draw: .svg, .png or .pdf.")
def bench_plot_command(file: str, output: str) -> None:
    """Draw the record FILE: time against context, this plugin, dense cuDNN, the floor (needs matplotlib)."""
    from .benchmark import plot_record

    click.echo(f"drew {plot_record(file, output)}")


@cli.command("inspect")
@click.argument("file", type=click.Path())
@click.option("--config", type=click.Path(), help="The model's config.json, for what the graph does not tell.")
@click.option(
    "--deserialize",
    is_flag=True,
    help="Load the engine with the installed TensorRT too. Engines hold code: only those you trust.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON, and nothing else.")
def inspect_command(file: str, as_json: bool, **options: Any) -> None:
    """Say what FILE holds: an ONNX model, patched or not, or a TensorRT engine with its ENGINE.json."""
    from .inspecting import inspect

    found = inspect(file, **options)
    click.echo(found.json() if as_json else found.summary())


cli.add_command(doctor_command)
cli.add_command(cache_command)
cli.add_command(selftest_command)


@cli.command("contract")
def contract_command() -> None:
    """Print the QsaAttention contract (inputs, outputs, attributes) as Markdown tables."""
    click.echo(contract_tables())


def contract_tables() -> str:
    """The contract's three tables as Markdown; `docs/contract.md` holds the same text."""
    rows: list[str] = []
    for title, tensors in (("Inputs", contract.INPUTS), ("Outputs", contract.OUTPUTS)):
        rows += [f"## {title}", "", "| # | name | dtype | shape | meaning |", "|---|---|---|---|---|"]
        for index, t in enumerate(tensors):
            shape = ", ".join(str(d) for d in t.dims)
            rows.append(f"| {index} | `{t.name}` | {t.dtype.value} | [{shape}] | {t.meaning} |")
        rows.append("")
    rows += ["## Attributes", "", "| name | type | default | meaning |", "|---|---|---|---|"]
    for a in contract.ATTRIBUTES:
        default = "required" if a.default is None else str(a.default)
        rows.append(f"| `{a.name}` | {a.kind.__name__}32 | {default} | {a.meaning} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's error prints one line; a bug keeps its trace."""
    chosen = Settings()
    try:
        result = cli.main(args=arguments, prog_name="qsa-trt", standalone_mode=False, obj=chosen)
    except click.exceptions.NoArgsIsHelpError as help_text:
        click.echo(help_text.format_message(), err=True)
        return 2
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "qsa-trt"
        _say(f"error: {error.format_message()} (see {command} --help)")
        return 2
    except QsaError as error:
        if chosen.verbose:
            traceback.print_exception(error)
        _say(f"error: {error}")
        return error.exit_code
    except OSError as error:  # the disk or a stream failed during the work
        _say(f"error: {error.strerror or error}: {error.filename or 'standard output'}")
        return 1
    except MemoryError as error:
        _say(f"error: out of memory: {error or 'free some, or take smaller sizes'}")
        return 1
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted; no file is left half-written")
        return 130
    return result if isinstance(result, int) else 0


def _say(text: str) -> None:
    """One line on stderr, whatever line ends a file's name holds."""
    click.echo("qsa-trt: " + " ".join(text.splitlines()), err=True)
