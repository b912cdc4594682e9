"""The command line: exit codes, one-line errors, and what goes to which stream."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from qsa_plugin import contract
from qsa_plugin.errors import InputError, QsaError, RefusedError
from qsa_trt import __version__, cli
from qsa_trt import command as command_module
from qsa_trt.building import build_engine
from qsa_trt.exporting import export_onnx
from qsa_trt.patching import patch_onnx
from tests.support.originals import MODELS

DOCS = Path(__file__).parents[2] / "docs"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version_goes_to_stdout_with_the_tensorrt_in_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as installed:
        installed.setattr("qsa_plugin.flavour_name", lambda: "tensorrt")
        installed.setattr("qsa_plugin.flavour_version", lambda: "10.15.1")
        assert run(capsys, "--version") == (0, f"qsa-trt {__version__}, tensorrt 10.15.1\n", "")
    monkeypatch.setenv("QSA_TRT_TENSORRT", "nonsense")
    expected = f"qsa-trt {__version__}, no usable TensorRT (see qsa-trt doctor)\n"
    assert run(capsys, "--version") == (0, expected, "")


def all_commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    children = command.commands.items() if isinstance(command, click.Group) else []
    return [path, *(found for name, child in children for found in all_commands(child, (*path, name)))]


@pytest.mark.parametrize("path", all_commands(cli.cli), ids=" ".join)
def test_every_help_states_the_exit_codes_and_how_to_be_quiet(
    capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
) -> None:
    code, out, _ = run(capsys, *path, "--help")
    assert code == 0
    assert "Exit codes: 0 done; 1 refused or failed; 2 wrong input" in out
    assert "-q, --quiet" in out and "-v, --verbose" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["patch-onnx"], "Missing argument 'MODEL'"),
        (["patch-onnx", "m.onnx", "--dtype", "int8"], "'int8' is not one of 'fp16', 'bf16', 'fp32'"),
        (["patch-onnx", "m.onnx", "--pool-io", "x"], "'x' is not one of 'in-place', 'alias', 'copy'"),
        (["patch-onnx", "m.onnx", "--max-positions", "many"], "'many' is not a valid integer"),
        (["export", "-o", "m.onnx"], "Missing argument 'CHECKPOINT_OR_CONFIG'"),
        (["export", "folder"], "Missing option '-o'"),
        (["export", "folder", "-o", "m.onnx", "--random-init", "x"], "'x' is not a valid integer"),
        (["build-engine"], "Missing argument 'MODEL'"),
        (["validate", "m.onnx", "--seed", "-1"], "-1 is not in the range x>=0"),
        (["validate", "m.onnx", "--print-polygraphy", "--json"], "it prints commands, which --json has no form for"),
        (["build-engine", "m.onnx", "--max-batch", "two"], "'two' is not a valid integer"),
    ],
)
def test_wrong_arguments_print_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["patch-onnx"], ["build-engine"], ["export", "-o", "m.onnx"]])
def test_a_missing_file_prints_one_line_and_exits_2(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, err = run(capsys, *command, "absent.onnx")
    assert (code, out) == (2, "")
    assert "absent.onnx" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("option --x", 3, "an even number", "pass 4"), 2),
        (RefusedError("layer 0: no"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device"), 1),
        (MemoryError(), 1),
    ],
)
def test_exit_codes_follow_the_error_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail() -> str:
        raise error

    monkeypatch.setattr(cli, "contract_tables", fail)
    got, out, err = run(capsys, "contract")
    assert (got, out) == (code, "")
    line = err.strip("\n")  # click puts an empty line before an interruption, after the terminal's ^C
    assert line.startswith("qsa-trt: ")
    assert "\n" not in line
    if isinstance(error, QsaError):
        assert str(error) in err


@pytest.mark.parametrize(
    ("command", "function"), [("patch-onnx", patch_onnx), ("export", export_onnx), ("build-engine", build_engine)]
)
def test_every_option_is_a_keyword_of_the_same_name(command: str, function: Callable[..., object]) -> None:
    options = {parameter.name for parameter in cli.cli.commands[command].params if parameter.expose_value}
    assert options == set(inspect.signature(function).parameters) - {"progress"}


def test_verbose_prints_the_traces_behind_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise RefusedError("no") from ZeroDivisionError("the cause")

    monkeypatch.setattr(cli, "contract_tables", fail)
    assert run(capsys, "contract") == (1, "", "qsa-trt: error: no\n")
    for arguments in (["contract", "-v"], ["-v", "contract"]):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (1, "") and "ZeroDivisionError: the cause" in err
        assert err.endswith("qsa-trt: error: no\n")


@pytest.mark.parametrize(("before", "after"), [([], []), (["-q"], []), ([], ["--quiet"])])
def test_quiet_leaves_progress_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, before: list[str], after: list[str]
) -> None:
    def speak() -> str:
        command_module.say("a line of progress")
        return "the result"

    monkeypatch.setattr(cli, "contract_tables", speak)
    expected = "" if before or after else "a line of progress\n"
    assert run(capsys, *before, "contract", *after) == (0, "the result\n", expected)


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    """As the documentation has it, with bash."""
    environment = os.environ | {"COMP_WORDS": "qsa-trt sel", "COMP_CWORD": "1", "_QSA_TRT_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-m", "qsa_trt"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "plain,selftest\n", done.stderr


def test_a_bug_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "contract_tables", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["contract"])


def test_contract_command_prints_every_name_and_the_docs_hold_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "contract")
    assert code == 0
    for item in (*contract.INPUTS, *contract.OUTPUTS, *contract.ATTRIBUTES):
        assert f"`{item.name}`" in out
    assert out.strip() in (DOCS / "contract.md").read_text()


def test_a_line_end_in_a_name_does_not_make_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "patch-onnx", "two\nlines.onnx")
    assert (code, err) == (
        2,
        "qsa-trt: error: MODEL: got two lines.onnx (no such file); expected an ONNX file; check the path\n",
    )


def test_no_command_prints_the_help_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "Usage: qsa-trt" in err


def in_process(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, **options)


def test_ctrl_c_while_the_packages_are_imported_prints_one_line() -> None:
    """As if the signal came in the middle of an import."""
    code = """
import sys
from qsa_trt.__main__ import run
class Interrupting:
    def find_spec(self, name, *_):
        if name == "qsa_trt.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
run()
"""
    done = in_process(code, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "qsa-trt: interrupted; no file is left half-written\n",
    )


RUN = "import sys; sys.argv[1:] = ['contract']; from qsa_trt.__main__ import run; run()"


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = in_process(RUN, stdout=full)
    assert (done.returncode, done.stderr) == (1, "qsa-trt: error: No space left on device: standard output\n")


def test_closed_streams_are_no_bug() -> None:
    command = [sys.executable, "-c", RUN]
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
    assert subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command]).returncode == 0


def test_a_reader_that_went_away_is_no_error_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = in_process(RUN, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["validate", str(MODELS / "qsa_lm.onnx"), "--original", "nope"], "--original: got nope (no such file)"),
        (["inspect", "nope"], "FILE: got nope (no such file); expected an ONNX file or a TensorRT engine"),
    ],
)
def test_the_argument_at_fault_is_named(capsys: pytest.CaptureFixture[str], command: list[str], said: str) -> None:
    code, _, err = run(capsys, *command)
    assert code == 2 and said in err
