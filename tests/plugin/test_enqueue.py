"""Which runner gets a call, with which addresses; without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qsa_plugin import enqueue
from qsa_plugin.contract import INPUTS, Call, Mode, PoolIO
from qsa_plugin.decode_runner import DecodeParams, QsaSparseDecodeRunner
from qsa_plugin.errors import FailedError, RefusedError
from qsa_plugin.prefill_runner import PrefillParams, QsaSparsePrefillRunner
from tests.support.cases import REAL

DECODE = Call(Mode.DECODE, 2, 1, 10, 4, 512, 64)
PREFILL = replace(DECODE, mode=Mode.PREFILL, seq_len=300)
INPUT_ADDRESSES = [1000 + i for i in range(len(INPUTS))]
POOL = INPUT_ADDRESSES[2]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Parameters that reached a runner, and pool copies as tuples; nothing is compiled or launched."""
    seen: list[Any] = []
    for kind in (QsaSparseDecodeRunner, QsaSparsePrefillRunner):
        monkeypatch.setattr(kind, "preflight", lambda self: None)
        monkeypatch.setattr(kind, "run", lambda self, params: seen.append(params))
    monkeypatch.setattr(enqueue, "_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(enqueue, "_loading_allowed", contextlib.nullcontext)
    monkeypatch.setattr(enqueue, "_copy", lambda *arguments: seen.append(arguments))
    return seen


@pytest.mark.parametrize(("call", "kind"), [(DECODE, DecodeParams), (PREFILL, PrefillParams)])
def test_addresses_reach_the_runner_of_the_mode(ran: list[Any], call: Call, kind: type) -> None:
    enqueue.NodeKernels(REAL, "float16").enqueue(call, INPUT_ADDRESSES, [77, POOL], 4096, 5)
    (params,) = ran
    assert type(params) is kind
    got = params._asdict()
    expected = {t.name: a for t, a in zip(INPUTS, INPUT_ADDRESSES, strict=True) if t.name != "kvcache_start_index"}
    assert got == expected | {"call": call, "attn_output": 77, "workspace": 4096, "stream": 5}


def test_copy_goes_first_and_the_kernels_get_the_output_pool(ran: list[Any]) -> None:
    kernels = enqueue.NodeKernels(replace(REAL, pool_io=PoolIO.COPY), "bfloat16")
    kernels.enqueue(DECODE, INPUT_ADDRESSES, [77, 88], 4096, 5)
    copy, params = ran
    assert copy == (88, POOL, 2 * 10 * 128 * 2 * 384 * 2, 5)
    assert params.past_key_value == 88


def test_both_modes_are_prepared_once_for_a_number_of_rotary_dims(ran: list[Any]) -> None:
    kernels = enqueue.NodeKernels(REAL, "float16")
    first = kernels.prepare(64)
    assert {mode: type(runner) for mode, runner in first.items()} == {
        Mode.DECODE: QsaSparseDecodeRunner,
        Mode.PREFILL: QsaSparsePrefillRunner,
    }
    assert kernels.prepare(64) is first
    assert kernels.prepare(32) is not first


def test_kernels_are_loaded_where_a_capture_allows_it(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a module while a stream of this thread is captured is an error in any other mode."""
    steps: list[str] = []

    @contextlib.contextmanager
    def allowed() -> Iterator[None]:
        steps.append("allowed")
        yield
        steps.append("forbidden")

    monkeypatch.setattr(enqueue, "_loading_allowed", allowed)
    for kind in (QsaSparseDecodeRunner, QsaSparsePrefillRunner):
        monkeypatch.setattr(kind, "preflight", lambda self: steps.append("load"))
    enqueue.NodeKernels(REAL, "float16").prepare(64)
    assert steps == ["allowed", "load", "load", "forbidden"]


def test_an_unknown_device_is_refused(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "_compute_capability", lambda: (7, 5))
    with pytest.raises(RefusedError, match=r"7\.5"):
        enqueue.NodeKernels(REAL, "float16").enqueue(DECODE, INPUT_ADDRESSES, [77, POOL], 4096, 5)


def test_no_device_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(cuda.core, "Device", fail)
    with pytest.raises(FailedError, match="no CUDA device: CUDA_ERROR_NO_DEVICE"):
        enqueue.NodeKernels(REAL, "float16").prepare(64)
