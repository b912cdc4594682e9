"""The unversioned library that TensorRT-RTX's parser opens: linked, found elsewhere, or explained."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qsa_plugin import ensure_rtx_library, rtx_library
from qsa_plugin.errors import InputError


@pytest.fixture
def libs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the wheel installs it, on a machine whose loader knows no such library."""
    folder = tmp_path / "tensorrt_rtx_libs"
    folder.mkdir()
    (folder / "libtensorrt_rtx.so.1").write_bytes(b"library")
    monkeypatch.setattr(rtx_library, "_loader_finds_it", lambda: False)
    return folder


def test_creates_a_relative_link_once(libs: Path) -> None:
    ensure_rtx_library(libs)
    link = libs / "libtensorrt_rtx.so"
    assert link.readlink() == Path("libtensorrt_rtx.so.1")
    assert link.read_bytes() == b"library"
    created = link.lstat().st_ino
    ensure_rtx_library(libs)
    assert link.lstat().st_ino == created
    assert sorted(p.name for p in libs.iterdir()) == ["libtensorrt_rtx.so", "libtensorrt_rtx.so.1"]


def test_replaces_a_dangling_link(libs: Path) -> None:
    (libs / "libtensorrt_rtx.so").symlink_to("libtensorrt_rtx.so.0")
    ensure_rtx_library(libs)
    assert (libs / "libtensorrt_rtx.so").read_bytes() == b"library"


def test_many_at_once_agree(libs: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: rtx_library._link(libs), range(64)))
    assert sorted(p.name for p in libs.iterdir()) == ["libtensorrt_rtx.so", "libtensorrt_rtx.so.1"]


def test_a_read_only_folder_is_explained(libs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:  # permissions would not stop root
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(rtx_library.tempfile, "mkdtemp", refuse)
    with pytest.raises(InputError) as caught:
        ensure_rtx_library(libs)
    assert str(caught.value) == (
        f"libtensorrt_rtx.so: got none in {libs}, and the folder cannot be written (Read-only file system); "
        "expected a link to libtensorrt_rtx.so.1, which TensorRT-RTX's ONNX parser opens; run once as the owner of the"
        f" folder: ln -s libtensorrt_rtx.so.1 {libs}/libtensorrt_rtx.so; or put such a link into a folder of"
        " LD_LIBRARY_PATH"
    )
    assert [p.name for p in libs.iterdir()] == ["libtensorrt_rtx.so.1"]


def test_a_folder_without_the_library_is_refused(libs: Path) -> None:
    (libs / "libtensorrt_rtx.so.1").unlink()
    with pytest.raises(InputError, match=r"got no libtensorrt_rtx\.so\.1 in .*LD_LIBRARY_PATH"):
        ensure_rtx_library(libs)
    assert not list(libs.iterdir())


def test_no_package_is_refused(libs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx_library, "_libs_folder", lambda: None)
    with pytest.raises(InputError, match="got no package tensorrt_rtx_libs"):
        ensure_rtx_library()


def test_a_library_on_the_loader_path_is_enough(tmp_path: Path) -> None:
    """In a process of its own: the loader reads LD_LIBRARY_PATH at start."""
    on_path, empty = tmp_path / "on_path", tmp_path / "empty"
    on_path.mkdir()
    empty.mkdir()
    any_library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    (on_path / "libtensorrt_rtx.so").symlink_to(any_library)
    code = (
        "import sys, pathlib, qsa_plugin; folder = pathlib.Path(sys.argv[1])\n"
        "try: qsa_plugin.ensure_rtx_library(folder)\n"
        "except qsa_plugin.QsaError: print('refused')\n"
        "else: print('accepted', list(folder.iterdir()))\n"
    )
    said = {}
    for folder in (on_path, empty):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command = [sys.executable, "-c", code, str(empty)]
        said[folder] = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
    assert said == {on_path: "accepted []", empty: "refused"}
