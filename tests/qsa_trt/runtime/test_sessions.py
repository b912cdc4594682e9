"""Sessions in onnxruntime, on an engine, and on one layer: the same pages, the same tokens.

Without a GPU an engine is a patched model in onnxruntime behind TensorRT's calls, and a layer is the NumPy reference
behind the plugin's; both read and write pools of device memory that lies on the host.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsa_plugin.errors import FailedError, InputError
from qsa_trt.onnx_model import qsa_nodes
from qsa_trt.paging import flat_pages
from qsa_trt.patching import patch_onnx
from qsa_trt.patching.files import load_model
from qsa_trt.recording import PatchedSession
from qsa_trt.runtime import EngineSession, LayerSession, OnnxSession, PoolLayout, Session, engine_session
from tests.support.fake_cuda import FakeDriver
from tests.support.fake_engine import FakeContext, FakeEngine, FakeTensorRT, write_fake_engine
from tests.support.fake_plugin import use_reference
from tests.support.originals import MODELS, Original
from tests.support.plugin_host import needs_tensorrt
from tests.support.requirements import has, needs_onnxruntime

pytestmark = needs_onnxruntime
LENGTHS = (130, 7)


def rope(positions: int = 300) -> np.ndarray:
    return Original("qsa_lm").rope(positions)


def onnx_session(model: Path, **options: Any) -> OnnxSession:
    return OnnxSession(model, **({"num_pages": 9, "max_kv_len": 300, "rope": rope(), "fill": np.nan} | options))


def prompts() -> dict[str, np.ndarray]:
    return {"input_ids": np.random.default_rng(0).integers(0, 128, (2, max(LENGTHS)))}


def generate(session: Session, steps: int) -> np.ndarray:
    """Greedy tokens `[3, steps]`: two prompts, and a fork of the first one that is led astray at its first token."""
    pages = session.pages
    first, second = pages.allocate(), pages.allocate()
    logits = session.prefill([first, second], prompts(), LENGTHS)["logits"]
    last = logits[[0, 1], np.array(LENGTHS) - 1].argmax(-1)  # [2]
    rows = [first, second, pages.fork(first)]
    tokens = [np.array([*last, (last[0] + 1) % 128])]
    for _ in range(steps - 1):
        logits = session.decode(rows, {"input_ids": tokens[-1][:, None]})["logits"]  # [3, 1, V]
        tokens.append(logits[:, 0].argmax(-1))
    return np.stack(tokens, 1)


def prefill_only(model: Path, ids: list[int], steps: int) -> list[int]:
    """Greedy tokens without a past: every step prefills the whole text into a new session."""
    tokens: list[int] = []
    for _ in range(steps):
        session = onnx_session(model)
        text = np.array([[*ids, *tokens]])
        logits = session.prefill([session.pages.allocate()], {"input_ids": text}, [text.shape[1]])["logits"]
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def test_decode_goes_on_where_prefill_ended_and_a_fork_leaves_its_sibling_alone(language_model: Path) -> None:
    tokens = generate(onnx_session(language_model), 4)
    ids = prompts()["input_ids"]
    for row, (text, length) in enumerate(zip(ids, LENGTHS, strict=True)):
        assert tokens[row].tolist() == prefill_only(language_model, text[:length].tolist(), 4)
    astray = [*ids[0].tolist(), int(tokens[2, 0])]
    assert tokens[2, 1:].tolist() == prefill_only(language_model, astray, 3)


def test_the_order_of_pages_changes_nothing(language_model: Path) -> None:
    shuffled = onnx_session(language_model, rng=np.random.default_rng(3))
    assert np.array_equal(generate(shuffled, 4), generate(onnx_session(language_model), 4))


def test_a_failed_step_leaves_the_pages_as_they_were(language_model: Path) -> None:
    session = onnx_session(language_model)
    sequence = session.pages.allocate()
    with pytest.raises(InputError, match="feeds: got nothing; expected input_ids"):
        session.prefill([sequence], {}, [5])
    assert session.pages.length(sequence) == 0 and session.pages.free_pages == 9
    session.prefill([sequence], {"input_ids": prompts()["input_ids"][:1]}, [5])
    with pytest.raises(InputError, match=r"input input_ids: got shape \[2, 1\]; expected a batch of 1"):
        session.decode([sequence], {"input_ids": np.zeros((2, 1), np.int64)})
    assert session.pages.length(sequence) == 5


def test_what_callers_do_wrong(language_model: Path) -> None:
    session = onnx_session(language_model, num_pages=1)
    sequence = session.pages.allocate()
    feeds = {"input_ids": np.zeros((1, 130), np.int64)}
    with pytest.raises(InputError, match=r"page pool: got 2 more pages wanted, 1 of 1 free"):
        session.prefill([sequence], feeds, [130])
    with pytest.raises(InputError, match=r"lengths: got \[3, 4\]; expected 1 numbers"):
        session.prefill([sequence], feeds, [3, 4])
    session.prefill([sequence], feeds, [3])
    with pytest.raises(InputError, match="prefill: got sequence 0 of 3 tokens"):
        session.prefill([sequence], feeds, [3])
    with pytest.raises(InputError, match=r"sequences: got \[0, 0\]; expected one or more, each once"):
        session.decode([sequence, sequence], {"input_ids": np.zeros((2, 1), np.int64)})
    with pytest.raises(InputError, match="rope table: got 200 positions; expected at least max_kv_len 300"):
        onnx_session(language_model, rope=rope(200))


@pytest.fixture
def engine(language_model: Path, tmp_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "lm.engine"
    write_fake_engine(language_model, path)
    install(path, language_model, cuda, monkeypatch)
    return path


def install(engine: Path, model: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    trt = FakeTensorRT(cuda, model, json.loads(engine.with_name(engine.name + ".json").read_text()))
    for name, value in {
        "tensorrt": lambda flavour: trt,
        "flavour_name": lambda flavour: flavour or "tensorrt_rtx",
        "flavour_version": lambda flavour: "1.7",
        "register": lambda flavour: None,
    }.items():
        monkeypatch.setattr(engine_session, name, value)
    return trt


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_generates_what_onnxruntime_does(
    engine: Path, language_model: Path, cuda: FakeDriver, graphs: bool
) -> None:
    session = EngineSession(engine, rope=rope(), cuda_graphs=graphs)
    assert np.array_equal(generate(session, 4), generate(onnx_session(language_model), 4))
    assert session._trt.runs == [("prefill", 2)] + [("decode", 3)] * 3
    assert cuda.launches == (2 if graphs else 0)


def test_one_profile_serves_both_modes(
    language_model: Path, tmp_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_engine(language_model, tmp_path / "one.engine", single=True)
    install(tmp_path / "one.engine", language_model, cuda, monkeypatch)
    session = EngineSession(tmp_path / "one.engine", rope=rope())
    assert np.array_equal(generate(session, 3), generate(onnx_session(language_model), 3))
    assert {profile for profile, _ in session._trt.runs} == {"all"}


def test_what_an_engine_refuses(engine: Path) -> None:
    with pytest.raises(InputError, match=r"rope table: got nothing"):
        EngineSession(engine)
    session = EngineSession(engine, rope=rope())
    sequence = session.pages.allocate()
    with pytest.raises(InputError, match=r"input input_ids: got int32; expected int64; convert it"):
        session.prefill([sequence], {"input_ids": np.zeros((1, 5), np.int32)}, [5])
    with pytest.raises(InputError, match=r"input input_ids: got shape .1, 201.; expected one of the engine"):
        session.prefill([sequence], {"input_ids": np.zeros((1, 201), np.int64)}, [5])
    assert session.pages.length(sequence) == 0


def test_an_engine_that_cannot_be_loaded(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTensorRT, "Runtime", lambda self, log: FakeRuntime())
    with pytest.raises(FailedError, match=r"lm\.engine cannot be deserialized: TensorRT gave no reason"):
        EngineSession(engine, rope=rope())


@pytest.mark.rtx
@pytest.mark.skipif(not has("tensorrt_rtx"), reason="tensorrt_rtx is not installed")
@pytest.mark.parametrize(
    ("owner", "method", "signature"),
    [
        ("IExecutionContext", "set_tensor_address", r"name: str, memory: .*\) -> bool"),
        ("IExecutionContext", "set_input_shape", r"name: str, shape: tuple\) -> bool"),
        ("IExecutionContext", "set_optimization_profile_async", r"profile_index: .*, stream_handle: .*\) -> bool"),
        ("IExecutionContext", "infer_shapes", r"\) -> list\[str\]"),
        ("IExecutionContext", "get_tensor_shape", r"name: str\) -> .*Dims"),
        ("IExecutionContext", "execute_async_v3", r"stream_handle: .*\) -> bool"),
        ("ICudaEngine", "get_tensor_profile_shape", r"name: str, profile_index: .*\) -> list\[.*Dims\]"),
        ("ICudaEngine", "get_tensor_name", r"index: .*\) -> str"),
        ("ICudaEngine", "get_tensor_mode", r"name: str\) -> .*TensorIOMode"),
        ("ICudaEngine", "get_tensor_dtype", r"name: str\) -> .*DataType"),
        ("ICudaEngine", "create_execution_context", r"\) -> .*IExecutionContext"),
        ("Runtime", "deserialize_cuda_engine", r"serialized_engine: .*Buffer\) -> .*ICudaEngine"),
    ],
)
def test_tensorrt_has_the_calls_that_the_stand_in_has(owner: str, method: str, signature: str) -> None:
    """Without a GPU an engine cannot be loaded; the bindings at least say what they take."""
    import tensorrt_rtx

    assert re.search(signature, getattr(getattr(tensorrt_rtx, owner), method).__doc__)
    assert hasattr({"IExecutionContext": FakeContext, "ICudaEngine": FakeEngine}.get(owner, FakeRuntime), method)


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("set_tensor_address", False, "the engine takes no address for input_ids"),
        ("set_optimization_profile_async", False, "no execution context for profile prefill"),
        ("execute_async_v3", False, "the engine failed: TensorRT gave no reason"),
        ("infer_shapes", ["input_ids"], "TensorRT still needs the shapes of input_ids"),
    ],
)
def test_what_tensorrt_refuses_is_an_error(
    engine: Path, monkeypatch: pytest.MonkeyPatch, method: str, result: object, message: str
) -> None:
    monkeypatch.setattr(FakeContext, method, lambda *_: result)
    with pytest.raises(FailedError, match=message):
        generate(EngineSession(engine, rope=rope()), 1)


class FakeRuntime:
    def deserialize_cuda_engine(self, data: bytes) -> None:
        return None


def test_copied_pools_are_refused(
    language_model: Path, tmp_path: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "copy.onnx", pool_io="copy")
    write_fake_engine(tmp_path / "copy.onnx", tmp_path / "copy.engine")
    install(tmp_path / "copy.engine", language_model, cuda, monkeypatch)
    with pytest.raises(InputError, match="pool_io: got copy; expected in place or alias"):
        EngineSession(tmp_path / "copy.engine", rope=rope())


def test_the_layout_of_an_engine_is_that_of_its_model(engine: Path, language_model: Path) -> None:
    layout = PoolLayout.of_engine(engine.with_name("lm.engine.json"))
    assert layout == replace(onnx_session(language_model).layout, pages_per_seq=3)
    assert layout.nbytes == 2 * 2 * 9 * 128 * 2 * 128 * 2


@needs_tensorrt
def test_a_layer_computes_what_it_saw_in_the_model(language_model: Path, cuda: FakeDriver) -> None:
    recorded = PatchedSession(language_model, batch=2, max_kv_len=300, rope=rope(), record=True, fill=np.nan)
    calls = [recorded.prefill(prompts(), LENGTHS).calls[0]]
    calls += [recorded.decode({"input_ids": np.full((2, 1), 3 * step)}).calls[0] for step in range(5)]
    session = layer_session(calls[0])
    use_reference(session._context, cuda)
    rows = [session.pages.allocate(), session.pages.allocate()]
    for call in calls:
        feeds = {name: call.inputs[name] for name in ("qkv", "index_qk")}
        done = session.prefill(rows, feeds, LENGTHS) if call is calls[0] else session.decode(rows, feeds)
        # two float16 roundings of values near 1: both sides compute in fp32, in another order
        assert np.allclose(done["attn_output"], call.attn_output, atol=2 * 2**-11)
        fork = session.pages.fork(rows[0])  # with a sibling, the next step copies the open page
        session.pages.free(rows[0])
        rows[0] = fork
    assert session._context.buffers["past_key_value"].intact()


def layer_session(call: Any) -> LayerSession:
    return LayerSession(
        call.node.geometry,
        "float16",
        {name: call.inputs[name] for name in call.inputs if name.endswith("gamma")},
        rope(),
        num_pages=9,
        max_kv_len=300,
        max_batch=2,
        max_seq_len=max(LENGTHS),
    )


@needs_tensorrt
def test_forked_pages_are_copied_on_the_device(language_model: Path, cuda: FakeDriver) -> None:
    (node, *_) = qsa_nodes(load_model(language_model).model)
    recorded = PatchedSession(language_model, batch=2, max_kv_len=300, rope=rope(), record=True)
    call = recorded.prefill(prompts(), LENGTHS).calls[0]
    assert call.node == node
    session = layer_session(call)
    use_reference(session._context, cuda)
    parent, other = session.pages.allocate(), session.pages.allocate()
    session.prefill([parent, other], {name: call.inputs[name] for name in ("qkv", "index_qk")}, LENGTHS)
    pool = session._context.buffers["past_key_value"]
    before = pool.read(session.layout.layers[0].shape(9), np.float16)
    child = session.pages.fork(parent)
    decode = {name: call.inputs[name][:1, :1] for name in ("qkv", "index_qk")}
    session.decode([child], decode)
    after = pool.read(before.shape, np.float16)
    kept, changed = session.pages.table([parent, child])
    used = kept[kept >= 0]
    assert np.array_equal(flat_pages(before)[used], flat_pages(after)[used], equal_nan=True)
    k_page = changed[0, 1]
    assert k_page not in used and not np.isnan(flat_pages(after)[k_page, :3, :, :64]).any()


def test_without_a_gpu_a_layer_says_so(language_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsa_trt.device.compute_capability", lambda: None)
    recorded = PatchedSession(language_model, batch=2, max_kv_len=300, rope=rope(), record=True)
    call = recorded.prefill(prompts(), LENGTHS).calls[0]
    with pytest.raises(InputError, match="GPU: got none; expected an NVIDIA GPU"):
        layer_session(call)


def test_what_a_layer_refuses(language_model: Path, cuda: FakeDriver) -> None:
    recorded = PatchedSession(language_model, batch=2, max_kv_len=300, rope=rope(), record=True)
    call = recorded.prefill(prompts(), LENGTHS).calls[0]
    gammas = {name: array for name, array in call.inputs.items() if name.endswith("gamma")}
    sizes: dict[str, int] = {"num_pages": 9, "max_kv_len": 300, "max_batch": 2, "max_seq_len": 130}
    geometry = call.node.geometry
    with pytest.raises(InputError, match="gammas: got nothing; expected q_norm_gamma, k_norm_gamma"):
        LayerSession(geometry, "float16", {}, rope(), **sizes)
    with pytest.raises(InputError, match="q_norm_gamma: got float16; expected bfloat16"):
        LayerSession(geometry, "bfloat16", gammas, rope(), **sizes)
    with pytest.raises(InputError, match="rope table: got 200 positions"):
        LayerSession(geometry, "float16", gammas, rope(200), **sizes)
    with pytest.raises(InputError, match="rope table: got float64; expected float32"):
        LayerSession(geometry, "float16", gammas, rope().astype(np.float64), **sizes)
