"""The resolver, on fake packages: what it picks, what it refuses, and what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qsa_plugin import flavour
from qsa_plugin.errors import InputError, MissingPackageError

ALL = ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "tensorrt_lean_bindings")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Hides every real TensorRT and returns a function that installs a fake one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("QSA_TRT_TENSORRT", raising=False)
    real = {name: sys.modules.pop(name) for name in ALL if name in sys.modules}
    for name in ALL:
        monkeypatch.setitem(sys.modules, name, None)

    def fake(name: str, version: str = "99.0.1", code: str = "class IPluginV3OneBuildV2: pass") -> None:
        monkeypatch.delitem(sys.modules, name)
        (tmp_path / f"{name}.py").write_text(f"{code}\n__version__ = {version!r}\n")

    resolved = flavour._resolve
    monkeypatch.setattr(flavour, "_resolve", flavour.cache(resolved.__wrapped__))
    yield fake
    for name in ALL:
        sys.modules.pop(name, None)
    monkeypatch.undo()
    sys.modules.update(real)


def test_order_of_preference(install: Install) -> None:
    install("tensorrt_lean")
    install("tensorrt_rtx")
    assert flavour.flavour_name() == "tensorrt_rtx"
    flavour._resolve.cache_clear()
    install("tensorrt")
    assert flavour.flavour_name() == "tensorrt"


def test_lean_is_found_under_the_name_of_its_bindings(install: Install) -> None:
    install("tensorrt_lean_bindings", "11.4.0")
    assert flavour.flavour_name() == "tensorrt_lean"
    assert flavour.tensorrt().__name__ == "tensorrt_lean_bindings"
    assert flavour.flavour_version() == "11.4.0"


def test_environment_forces_and_argument_wins(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_lean"):
        install(name)
    monkeypatch.setenv("QSA_TRT_TENSORRT", "tensorrt_lean")
    assert flavour.flavour_name() == "tensorrt_lean"
    assert flavour.flavour_name("tensorrt_rtx") == "tensorrt_rtx"
    monkeypatch.setenv("QSA_TRT_TENSORRT", "")
    assert flavour.flavour_name() == "tensorrt"


def test_unknown_flavour_is_refused(install: Install) -> None:
    with pytest.raises(InputError) as caught:
        flavour.tensorrt("trt")
    assert str(caught.value) == (
        "TensorRT flavour: got trt; expected tensorrt or tensorrt_rtx or tensorrt_lean; "
        "correct the argument or the variable QSA_TRT_TENSORRT"
    )


def test_nothing_installed_names_what_was_looked_for(install: Install) -> None:
    with pytest.raises(MissingPackageError) as caught:
        flavour.tensorrt()
    assert str(caught.value) == (
        "TensorRT: got no installation; expected the Python package tensorrt or tensorrt_rtx or tensorrt_lean; "
        "pip install 'qsa-trt[rtx]', or pip install 'tensorrt>=10.15'"
    )


def test_a_forced_flavour_is_not_replaced_by_another(install: Install) -> None:
    install("tensorrt_rtx")
    with pytest.raises(MissingPackageError) as caught:
        flavour.tensorrt("tensorrt")
    assert str(caught.value) == (
        "TensorRT: got no installation; expected the Python package tensorrt; pip install 'tensorrt>=10.15'"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('libnvinfer.so.11\\nnot found')", "RuntimeError: libnvinfer.so.11 not found"),
        ("raise ImportError('the stub could not download its libraries')", "the stub could not download"),
        ("import surely_not_installed", "No module named 'surely_not_installed'"),
    ],
)
def test_a_broken_installation_is_explained_not_skipped(install: Install, code: str, said: str) -> None:
    install("tensorrt", code=code)
    install("tensorrt_rtx")
    with pytest.raises(InputError) as caught:
        flavour.tensorrt()
    message = str(caught.value)
    assert message.startswith("Python package tensorrt: got an installation whose import fails: ")
    assert said in message
    assert "QSA_TRT_TENSORRT=tensorrt_rtx" in message
    assert "\n" not in message


def test_an_old_release_is_refused(install: Install) -> None:
    install("tensorrt_rtx", "1.6.2")
    with pytest.raises(InputError, match=r"got version 1\.6\.2; expected a working tensorrt_rtx 1\.7 or newer"):
        flavour.tensorrt()


def test_a_folder_of_that_name_is_not_taken_for_tensorrt(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt")
    (tmp_path / "tensorrt").mkdir()
    with pytest.raises(InputError, match="a module without TensorRT's plugin classes, from"):
        flavour.tensorrt()
