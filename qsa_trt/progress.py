"""Says on a terminal what takes long; says nothing anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Where a piece of work stands. The work sets the fields, in any thread; a display reads them.

    Attributes:
        text: what is being done.
        done: steps that are finished.
        total: steps in all; None while that is not known.
        started: monotonic seconds.
    """

    text: str = ""
    done: int = 0
    total: int | None = None
    started: float = field(default_factory=time.monotonic)

    def step(self, text: str) -> None:
        """The step in front of this one has finished."""
        self.text, self.done = text, self.done + 1

    def line(self) -> str:
        """Such as `12/30 decode_attend sm_90a, 4 s`."""
        count = f"{self.done}/{self.total} " if self.total else ""
        return f"{count}{self.text}, {time.monotonic() - self.started:.0f} s"


@contextmanager
def shown(text: str = "", *, quiet: bool = False) -> Iterator[Progress]:
    """A spinner with the line of a progress on stderr, where that is a terminal, unless `quiet`; it goes at the end."""
    from rich.console import Console

    progress = Progress(text)
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield progress
        return
    ended = threading.Event()
    with console.status(progress.line()) as status:
        thread = threading.Thread(target=_follow, args=(progress, status, ended), daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            ended.set()
            thread.join()


def _follow(progress: Progress, status: object, ended: threading.Event) -> None:
    from rich.markup import escape

    while not ended.wait(0.2):
        status.update(escape(progress.line()))  # type: ignore[attr-defined]  # rich's Status
