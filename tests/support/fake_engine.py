"""TensorRT's runtime as `EngineSession` uses it, with an engine that is a patched model in onnxruntime.

It knows what an engine knows: names, types, profiles, shapes and addresses. A call that TensorRT would refuse fails.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
from onnx import TensorProto, helper

from qsa_trt.building.manifest import describe_engine, write_engine
from qsa_trt.building.network import BuildOptions
from qsa_trt.building.patched_model import load_patched_model
from qsa_trt.building.profiles import choose_sizes, derive_profiles
from qsa_trt.onnx_model import open_session, run_session
from tests.support.fake_cuda import FakeDriver, read, write

_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
}


def write_fake_engine(model: Path, engine: Path, *, single: bool = False, targets: tuple[str, ...] = ()) -> None:
    """ENGINE whose content is a line of text, and the ENGINE.json that build-engine would write."""
    patched = load_patched_model(model)
    sizes = choose_sizes(patched, max_batch=3, max_seq_len=200, max_kv_len=300, num_pages=9)
    profiles = derive_profiles(patched, sizes, single=single)
    options = BuildOptions(targets=targets)
    manifest = describe_engine(patched, profiles, sizes, options, flavour="tensorrt_rtx", version="1.7", seconds=0.1)
    write_engine(engine, b"an engine", manifest)


class Mode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class FakeTensorRT:
    """The module. `runs` notes (profile, batch) of every execution."""

    TensorIOMode = Mode

    class ILogger:
        ERROR, INTERNAL_ERROR = 1, 0

    def __init__(self, driver: FakeDriver, model: Path, manifest: Mapping[str, Any]) -> None:
        self.driver, self.manifest = driver, manifest
        self.proto = onnx.load(str(model))
        self.session = open_session(self.proto, model.parent)
        self.runs: list[tuple[str, int]] = []

    def Runtime(self, log: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: FakeEngine(self) if data == b"an engine" else None)


class FakeEngine:
    def __init__(self, trt: FakeTensorRT) -> None:
        graph = trt.proto.graph
        self.trt = trt
        weights = {tensor.name for tensor in graph.initializer}
        self.inputs = {v.name: v.type.tensor_type.elem_type for v in graph.input if v.name not in weights}
        self.outputs = {v.name: v.type.tensor_type.elem_type for v in graph.output}
        self.types = self.inputs | self.outputs
        self.num_io_tensors = len(self.types)

    def get_tensor_name(self, index: int) -> str:
        return list(self.types)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_TYPES[self.types[name]])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        shapes = self.trt.manifest["profiles"][profile]["shapes"][name]
        return [tuple(shapes[kind]) for kind in ("min", "opt", "max")]

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.trt = engine, engine.trt
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return profile < len(self.trt.manifest["profiles"])

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        fits = len(shape) == len(most) and all(a <= d <= b for a, d, b in zip(least, shape, most, strict=True))
        if fits:
            self.shapes[name] = shape
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.types

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.inputs:
            return self.shapes[name]
        assert name == "logits"
        return (*self.shapes["input_ids"], 128)

    def execute_async_v3(self, stream: int) -> bool:
        if self.infer_shapes() or set(self.addresses) != set(self.engine.types):
            return False
        shapes = dict(self.shapes)
        self.trt.driver.enqueue(lambda: self._execute(shapes))
        return True

    def _execute(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        feeds = {
            name: read(self.addresses[name], shapes[name], helper.tensor_dtype_to_np_dtype(self.engine.types[name]))
            for name in self.engine.inputs
        }
        for name, array in run_session(self.trt.session, feeds).items():
            write(self.addresses[name], array)
        profile = self.trt.manifest["profiles"][self.profile]["name"]
        self.trt.runs.append((profile, len(feeds["context_lengths"])))
