"""The commands about this machine rather than about a model: doctor, cache and selftest."""

from __future__ import annotations

from typing import Any

import click

from .command import Command, Group, progress


@click.command("doctor", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
def doctor_command(as_json: bool) -> int:
    """Say what this machine offers, and what to do about what is missing; exit code 1 if it cannot patch and build."""
    from .doctor import doctor

    report = doctor()
    click.echo(report.json() if as_json else report.summary())
    return 0 if report.passed else 1


@click.group("cache", cls=Group)
def cache_command() -> None:
    """The compiled kernels on disk, which make the first call of a node quick."""


@cache_command.command("path")
def cache_path_command() -> None:
    """Print the cache folder (QSA_TRT_CACHE sets it)."""
    from qsa_plugin.environment import cache_folder

    click.echo(cache_folder())


@cache_command.command("size")
def cache_size_command() -> None:
    """Print how many kernels the cache holds, and their size."""
    from .cache import cache_size

    click.echo(cache_size().summary())


@cache_command.command("clear")
def cache_clear_command() -> None:
    """Delete the compiled kernels; other files in the folder stay."""
    from .cache import clear_cache

    click.echo(f"deleted {clear_cache().summary()}")


@cache_command.command("warm")
@click.argument("model", type=click.Path(), required=False)
@click.option("--arch", metavar="SM[,SM]", help="Such as sm_90,sm_86, or all.  [default: this machine's GPU]")
@click.option("--geometry", help="Without MODEL: real, that of Qwen3.8-Flash-Next.  [default: real]", default="real")
@click.option("--surface", type=click.Choice(["fp16", "bf16"]), help="Without MODEL.  [default: both]")
@click.option("--rotary", type=click.IntRange(min=2), help="Rotary dims.  [default: MODEL's, or 64]")
def cache_warm_command(model: str | None, **options: Any) -> None:
    """Compile every kernel that MODEL's nodes load, with no GPU.

    MODEL is a patched ONNX file, an engine or its ENGINE.json.
    """
    from .cache import warm_cache

    with progress() as shown:
        report = warm_cache(model, progress=shown, **options)
    click.echo(report.summary())


@click.command("selftest", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
def selftest_command(as_json: bool) -> int:
    """Prove on this machine what can be proven on it, with a small sample model; paste the report into a bug report.

    Patching, onnxruntime against the original and against the NumPy reference, pages, kernels, an engine build; with a
    GPU the kernels' results, and the engine itself where the installed TensorRT executes it. A check that lacks
    something is skipped with the reason; exit code 1 if one fails.
    """
    from .selftest import selftest

    with progress() as shown:
        report = selftest(progress=shown)
    click.echo(report.json() if as_json else report.summary())
    return 0 if report.passed else 1
