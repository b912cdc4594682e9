"""Kind 31: what goes wrong in a callback is remembered."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from qsa_plugin import CallbackError, clear_errors, first_error, remembered_errors
from qsa_plugin.callbacks import CAPACITY, callback
from qsa_plugin.errors import PluginError


class Layer:
    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name

    @callback
    def double(self, value: int) -> int:
        return 2 * value

    @callback
    def fail(self, error: BaseException) -> None:
        raise error


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    clear_errors()
    yield
    clear_errors()


@pytest.mark.pitfall(31)
def test_kind_31_an_exception_is_remembered_and_raised_on() -> None:
    error = ValueError("no such shape")
    with pytest.raises(ValueError, match="no such shape"):
        Layer("qsa_3").fail(error)
    assert remembered_errors() == (CallbackError("qsa_3", "fail", error),)
    assert str(first_error()) == "plugin layer 'qsa_3', fail: no such shape"


@pytest.mark.pitfall(31)
def test_kind_31_the_memory_becomes_one_error_for_the_user() -> None:
    with pytest.raises(KeyError):
        Layer("a").fail(KeyError())
    with pytest.raises(ValueError, match="later"):
        Layer("b").fail(ValueError("later"))
    first = first_error()
    assert first is not None
    error = first.as_plugin_error()
    assert isinstance(error, PluginError)
    assert error.exit_code == 1
    assert str(error) == "plugin layer 'a', fail: KeyError"


def test_ctrl_c_is_remembered_too() -> None:
    with pytest.raises(KeyboardInterrupt):
        Layer("a").fail(KeyboardInterrupt())
    assert isinstance(remembered_errors()[0].error, KeyboardInterrupt)


def test_what_works_leaves_no_trace() -> None:
    assert Layer("a").double(4) == 8
    assert first_error() is None


def test_only_the_first_errors_are_kept() -> None:
    for i in range(CAPACITY + 5):
        with pytest.raises(ValueError, match=str(i)):
            Layer(str(i)).fail(ValueError(str(i)))
    assert [e.layer for e in remembered_errors()] == [str(i) for i in range(CAPACITY)]
    clear_errors()
    assert remembered_errors() == ()


def test_threads_share_the_memory() -> None:
    def work(name: str) -> None:
        with pytest.raises(ValueError, match=name):
            Layer(name).fail(ValueError(name))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(CAPACITY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {e.layer for e in remembered_errors()} == {str(i) for i in range(CAPACITY)}
