"""Files are written all or nothing, and never in place of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsa_plugin.errors import InputError
from qsa_trt.new_file import new_file


def test_what_is_not_moved_away_goes(tmp_path: Path) -> None:
    with new_file(tmp_path / "out") as temporary:
        temporary.write_text("half")
    assert not list(tmp_path.iterdir())


def test_a_link_to_a_stream_is_not_replaced(tmp_path: Path) -> None:
    """What /dev/stdout is: a link that resolves to a regular file wherever the results go to one."""
    stream = tmp_path / "stdout"
    stream.symlink_to("/proc/self/fd/1")
    with pytest.raises(InputError, match="no stream of a process"), new_file(stream):
        pass
    assert stream.is_symlink()
    assert list(tmp_path.iterdir()) == [stream]
