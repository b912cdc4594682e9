"""The spinner: on a terminal and nowhere else, without colour under NO_COLOR, and gone at the end."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from qsa_trt import progress

WORK = """
import sys, time
from qsa_trt.progress import shown
with shown(quiet="quiet" in sys.argv) as progress:
    progress.total = 3
    progress.step("compile [brackets]")
    time.sleep(0.7)
print("done")
"""


def on_a_terminal(*arguments: str, **variables: str) -> tuple[str, str]:
    """(stdout, what the terminal behind stderr got)."""
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"} | variables
    child = subprocess.Popen(
        [sys.executable, "-c", WORK, *arguments], stdout=subprocess.PIPE, stderr=follower, env=environment, text=True
    )
    os.close(follower)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    seen = b""
    try:
        while chunk := os.read(leader, 65536):
            seen += chunk
    except OSError:  # what Linux says when the other end is closed
        pass
    os.close(leader)
    return out, seen.decode()


def test_a_terminal_sees_step_and_elapsed_time() -> None:
    out, terminal = on_a_terminal()
    assert out == "done\n" and "1/3 compile [brackets], 0 s" in terminal
    assert "\x1b[3" in terminal, "colours"
    assert "\x1b[2K" in terminal.rpartition("compile")[2], "the line is erased at the end"


def test_no_color_is_obeyed() -> None:
    _, terminal = on_a_terminal(NO_COLOR="1")
    assert "1/3 compile" in terminal and "\x1b[3" not in terminal


def test_quiet_says_nothing() -> None:
    assert on_a_terminal("quiet") == ("done\n", "")


def test_no_terminal_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown() as shown:
        shown.step("work")
    assert capsys.readouterr() == ("", "")
