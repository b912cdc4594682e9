"""The commands about this machine rather than about a model: cache."""

from __future__ import annotations

from typing import Any

import click

from .progress import shown

EPILOG = "Exit codes: 0 done; 1 refused or failed; 2 wrong input, found before any work; 130 interrupted."


@click.group("cache", epilog=EPILOG)
def cache_command() -> None:
    """The compiled kernels on disk, which make the first call of a node quick."""


@cache_command.command("path", epilog=EPILOG)
def cache_path_command() -> None:
    """Print the cache folder (QSA_TRT_CACHE sets it)."""
    from qsa_plugin.environment import cache_folder

    click.echo(cache_folder())


@cache_command.command("size", epilog=EPILOG)
def cache_size_command() -> None:
    """Print how many kernels the cache holds, and their size."""
    from .cache import cache_size

    click.echo(cache_size().summary())


@cache_command.command("clear", epilog=EPILOG)
def cache_clear_command() -> None:
    """Delete the compiled kernels; other files in the folder stay."""
    from .cache import clear_cache

    click.echo(f"deleted {clear_cache().summary()}")


@cache_command.command("warm", epilog=EPILOG)
@click.argument("model", type=click.Path(), required=False)
@click.option("--arch", metavar="SM[,SM]", help="Such as sm_90,sm_86, or all.  [default: this machine's GPU]")
@click.option("--geometry", help="Without MODEL: real, that of Qwen3.8-Flash-Next.  [default: real]", default="real")
@click.option("--surface", type=click.Choice(["fp16", "bf16"]), help="Without MODEL.  [default: both]")
@click.option("--rotary", type=click.IntRange(min=2), help="Rotary dims.  [default: MODEL's, or 64]")
def cache_warm_command(model: str | None, **options: Any) -> None:
    """Compile every kernel that MODEL's nodes load, with no GPU.

    MODEL is a patched ONNX file or an ENGINE.json.
    """
    from .cache import warm_cache

    with shown() as progress:
        report = warm_cache(model, progress=progress, **options)
    click.echo(report.summary())
