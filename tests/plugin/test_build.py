"""Engines with plugin nodes, built by TensorRT-RTX for a GPU that need not be there (it can build but not run)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from qsa_plugin import PoolIO, clear_errors, creator, ensure_rtx_library, first_error, register, tensorrt
from qsa_plugin.contract import PAGE_SIZE
from qsa_plugin.errors import ContractError, RefusedError
from tests.support.plugin_host import error_logger
from tests.support.qsa_graphs import HIDDEN, ROTARY, SMALL, qsa_model
from tests.support.requirements import needs_rtx

pytestmark = needs_rtx

MAX_BATCH, MAX_SEQ, PAGES = 4, 256, 16
POSITIONS = 4 * PAGE_SIZE
EDGE_LLM = {"domain": "trt_edgellm", "op_type": "QsaAttentionPlugin", "plugin_attributes": False}
Range = tuple[int, int, int]


@pytest.fixture
def trt() -> Any:
    register("tensorrt_rtx")
    ensure_rtx_library()
    return tensorrt("tensorrt_rtx")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    clear_errors()
    yield
    clear_errors()


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plugins that the parser creates."""
    plugins: list[Any] = []
    create = creator._create

    def recording(*args: Any) -> Any:
        plugins.append(create(*args))
        return plugins[-1]

    monkeypatch.setattr(creator, "_create", recording)
    return plugins


class Build:
    """Parser, network and builder of one model; TensorRT wants all of them alive until the build is over."""

    def __init__(self, trt: Any, model: onnx.ModelProto) -> None:
        self.trt = trt
        self.builder = trt.Builder(error_logger())
        self.network = self.builder.create_network(0)
        self.parser = trt.OnnxParser(self.network, error_logger())
        self.parsed = self.parser.parse(model.SerializeToString())

    def plugin_layers(self) -> list[str]:
        layers = [self.network.get_layer(i) for i in range(self.network.num_layers)]
        return [layer.name for layer in layers if layer.type == self.trt.LayerType.PLUGIN_V3]

    def run(self, *, alias: bool = False, positions: int = POSITIONS, both: Range | None = None) -> Any:
        """Build with a prefill (start [0]) and a decode profile (start [1..B]), or with one profile for `both`."""
        config = self.builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(self.trt.ComputeCapability.SM86, 0)
        if alias:
            config.set_preview_feature(self.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        batch = (1, 2, MAX_BATCH)
        modes = [((0, 0, 0), (1, 128, MAX_SEQ)), (batch, (1, 1, 1))] if both is None else [(both, (1, 1, MAX_SEQ))]
        for start, seq in modes:
            config.add_optimization_profile(self._profile(batch, seq, start, positions))
        return self.builder.build_serialized_network(self.network, config)

    def _profile(self, batch: Range, seq: Range, start: Range, positions: int) -> Any:
        shapes = {
            "hidden_states": [(b, s, HIDDEN) for b, s in zip(batch, seq, strict=True)],
            "context_lengths": [(b,) for b in batch],
            "kvcache_start_index": [(s,) for s in start],
            "kv_page_table": [(b, 2, 4) for b in batch],
            "rope_rotary_cos_sin": [(1, positions, ROTARY)] * 3,
        }
        profile = self.builder.create_optimization_profile()
        for i in range(self.network.num_inputs):
            tensor = self.network.get_input(i)
            pool = (2, PAGES, PAGE_SIZE, *tuple(tensor.shape)[3:])
            profile.set_shape(tensor.name, *shapes.get(tensor.name, [pool] * 3))
        return profile


@pytest.mark.pitfall(28)
@pytest.mark.parametrize("surface", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("spelling", [{}, EDGE_LLM])
def test_kind_28_both_spellings_build_as_plugins(
    trt: Any, spelling: dict[str, Any], layers: int, surface: int, created: list[Any]
) -> None:
    build = Build(trt, qsa_model(layers, surface=surface, **spelling))
    assert build.parsed
    assert build.plugin_layers() == [f"qsa_{i}" for i in range(layers)]
    assert [p.layer_name for p in created] == build.plugin_layers()
    assert {p.plugin_name for p in created} == {spelling.get("op_type", "QsaAttention")}
    # attributes are fp32 in ONNX, which 1e-6 is not exactly
    assert {replace(p.geometry, rms_norm_eps=round(p.geometry.rms_norm_eps, 12)) for p in created} == {SMALL}
    assert len(bytes(build.run())) > 0
    assert first_error() is None


def test_a_node_without_optional_attributes_builds(trt: Any, created: list[Any]) -> None:
    model = qsa_model(1, **EDGE_LLM)
    node = next(n for n in model.graph.node if n.op_type == "QsaAttentionPlugin")
    optional = ("attention_scale", "rms_norm_eps", "pool_io")
    kept = [a for a in node.attribute if a.name not in optional]
    assert len(kept) == len(node.attribute) - 3
    del node.attribute[:]
    node.attribute.extend(kept)
    build = Build(trt, model)
    assert [p.geometry for p in created] == [SMALL]
    assert len(bytes(build.run())) > 0


def test_one_profile_for_both_modes_builds(trt: Any) -> None:
    build = Build(trt, qsa_model(1))
    assert len(bytes(build.run(both=(0, 2, MAX_BATCH)))) > 0
    assert first_error() is None


@pytest.mark.parametrize("layers", [1, 3])
def test_aliased_pools_build_with_the_preview_feature_only(trt: Any, layers: int) -> None:
    model = qsa_model(layers, geometry=replace(SMALL, pool_io=int(PoolIO.ALIAS)))
    assert len(bytes(Build(trt, model).run(alias=True))) > 0
    assert first_error() is None
    assert Build(trt, model).run(alias=False) is None


def test_copied_pools_build(trt: Any) -> None:
    assert len(bytes(Build(trt, qsa_model(1, geometry=replace(SMALL, pool_io=int(PoolIO.COPY)))).run())) > 0


@pytest.mark.pitfall(31)
def test_kind_31_fp32_surface_fails_with_the_plugins_own_error(trt: Any) -> None:
    build = Build(trt, qsa_model(1, surface=TensorProto.FLOAT))
    assert not build.parsed
    error = first_error()
    assert error is not None
    assert (error.layer, error.method) == ("qsa_0", "get_output_data_types")
    assert isinstance(error.error, ContractError)


@pytest.mark.pitfall(31)
def test_kind_31_an_impossible_attribute_fails_with_the_plugins_own_error(trt: Any) -> None:
    model = qsa_model(1)
    node = next(n for n in model.graph.node if n.op_type == "QsaAttention")
    next(a for a in node.attribute if a.name == "indexer_budget").i = 63
    assert not Build(trt, model).parsed
    assert str(first_error()) == (
        "plugin layer 'qsa_0', create_plugin: attribute indexer_budget: got 63; expected a multiple of "
        "indexer_compress_ratio (4); correct the budget"
    )


@pytest.mark.pitfall(31)
def test_kind_31_a_profile_that_does_not_fit_fails_with_the_plugins_own_error(trt: Any) -> None:
    build = Build(trt, qsa_model(1))
    assert build.run(positions=MAX_SEQ - 1) is None
    error = first_error()
    assert error is not None
    assert error.method == "configure_plugin"
    assert "rope_rotary_cos_sin: got [1, 255, 32]; expected at least S = 256 positions (axis 1)" in str(error)


@pytest.mark.pitfall(31)
def test_kind_31_a_node_beyond_the_kernels_fails_with_the_plugins_own_error(trt: Any) -> None:
    build = Build(trt, qsa_model(1, geometry=replace(SMALL, head_size=96)))
    assert build.run() is None
    error = first_error()
    assert error is not None
    assert isinstance(error.error, RefusedError)
    assert "head_size: got 96" in str(error)


def test_without_the_unversioned_library_parsing_fails_but_does_not_abort(tmp_path: Path) -> None:
    """TensorRT-RTX's parser ends the process right after it created a plugin when it cannot find the library."""
    path = tmp_path / "model.onnx"
    onnx.save(qsa_model(1), path)
    code = """
import sys, qsa_plugin.creator as creator
from qsa_plugin import first_error, register, tensorrt
from qsa_plugin.errors import InputError
def refuse(): raise InputError("libtensorrt_rtx.so", "none", "a link", "make one")
creator.ensure_rtx_library = refuse
register("tensorrt_rtx")
trt = tensorrt("tensorrt_rtx")
log = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(log)
network = builder.create_network(0)
print(trt.OnnxParser(network, log).parse_from_file(sys.argv[1]), first_error())
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "False plugin layer 'qsa_0', create_plugin: libtensorrt_rtx.so: got none; expected a link; make one"
    )
