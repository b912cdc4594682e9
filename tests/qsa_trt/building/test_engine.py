"""Real builds with TensorRT-RTX, which needs no GPU: engines, manifests, failures that leave nothing behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.callbacks import callback, clear_errors
from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import FailedError
from qsa_plugin.plugin import Callbacks
from qsa_trt.building import BuildReport, build_engine, plan_build
from qsa_trt.building import manifest as manifest_module
from qsa_trt.building.network import _parse as parse_model
from qsa_trt.building.network import start_builder
from qsa_trt.patching import patch_onnx
from tests.support.qsa_graphs import SMALL, qsa_model
from tests.support.requirements import needs_rtx

pytestmark = needs_rtx

MODELS = Path(__file__).parents[3] / "models"
SIZES: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "max_kv_len": 256, "tensorrt": "tensorrt_rtx"}


def failure(path: Path, **options: Any) -> str:
    """The message of a build that fails and leaves nothing behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(FailedError) as error:
        build_engine(path, **SIZES | options)
    assert sorted(path.parent.iterdir()) == before
    return str(error.value)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_two_layers_two_profiles(model_file: Callable[..., Path]) -> None:
    path = model_file(2)
    report = build_engine(path, **SIZES)
    assert report.engine == path.with_name("model.qsa.engine")
    assert report.manifest_file == path.with_name("model.qsa.engine.json")
    assert sorted(f.name for f in path.parent.iterdir()) == [
        "model.qsa.engine",
        "model.qsa.engine.json",
        "model.qsa.onnx",
    ]
    manifest = json.loads(report.manifest_file.read_text())
    assert manifest == report.manifest
    assert manifest["engine"] == {
        "file": "model.qsa.engine",
        "bytes": report.engine.stat().st_size,
        "sha256": sha256(report.engine),
    }
    assert manifest["onnx"] == {"file": "model.qsa.onnx", "sha256": sha256(path), "external_data": []}
    assert [layer["name"] for layer in manifest["layers"]] == ["qsa_0", "qsa_1"]
    assert manifest["layers"][1] == {
        "name": "qsa_1",
        "op_type": "QsaAttention",
        "attributes": pytest.approx(SMALL.to_attributes()),
        "past": "past_key_values_1",
        "present": "present_key_values_1",
        "pool_shape": [2, 4, 128, 2, 128],
        "pool_bytes": 2 * 4 * 128 * 2 * 128 * 2,
    }
    assert manifest["pool"] == {
        "page_size": 128,
        "num_pages": 4,
        "pages_per_seq": 2,
        "total_bytes": 2 * manifest["layers"][0]["pool_bytes"],
    }
    assert manifest["rope"] == {
        "tensor": "rope_rotary_cos_sin",
        "source": "input",
        "rotary_dims": 32,
        "max_positions": 256,
    }
    assert [profile["name"] for profile in manifest["profiles"]] == ["prefill", "decode"]
    assert manifest["profiles"][1]["shapes"]["kvcache_start_index"] == {"min": [1], "opt": [2], "max": [2]}
    assert manifest["flags"] == {
        "strongly_typed": True,
        "preview_features": [],
        "workspace": None,
        "version_compatible": False,
        "hardware_compatible": None,
    }
    assert manifest["plugin"] == {"name": "QsaAttention", "version": "1", "namespace": ""}
    assert manifest["tensorrt"]["flavour"] == "tensorrt_rtx"
    assert (manifest["surface_dtype"], manifest["targets"]) == ("float16", [])
    assert manifest["build_seconds"] > 0


def test_the_documented_keys_are_those_of_the_manifest(model_file: Callable[..., Path]) -> None:
    manifest = build_engine(model_file(), **SIZES).manifest
    document = (Path(__file__).parents[3] / "docs" / "engine-manifest.md").read_text()
    documented = [line.split("`")[1] for line in document.splitlines() if line.startswith("| `")]
    assert [key for key in documented if "." not in key] == list(manifest)
    nested = [f"{key}.{inner}" for key, value in manifest.items() if isinstance(value, dict) for inner in value]
    nested += [f"layers.{key}" for key in manifest["layers"][0]] + [
        f"profiles.{key}" for key in manifest["profiles"][0]
    ]
    assert sorted(key for key in documented if "." in key) == sorted(nested)


def test_single_profile_bf16_baked_rope_table(model_file: Callable[..., Path]) -> None:
    path = model_file(surface=TensorProto.BFLOAT16, baked_positions=300)
    manifest = build_engine(path, **SIZES, single_profile=True).manifest
    assert [profile["name"] for profile in manifest["profiles"]] == ["all"]
    assert manifest["surface_dtype"] == "bfloat16"
    assert manifest["rope"]["source"] == "initializer"
    assert manifest["rope"]["max_positions"] == 300


@pytest.mark.parametrize("pool_io", PoolIO)
def test_every_pool_io_builds(model_file: Callable[..., Path], pool_io: PoolIO) -> None:
    """Without the preview feature an aliased pool is a build error, so this build proves that it was switched on."""
    manifest = build_engine(model_file(2, geometry=dataclasses.replace(SMALL, pool_io=pool_io)), **SIZES).manifest
    expected = ["ALIASED_PLUGIN_IO_10_03"] if pool_io is PoolIO.ALIAS else []
    assert manifest["flags"]["preview_features"] == expected


@pytest.mark.parametrize(("dtype", "surface"), [(None, "float16"), ("bf16", "bfloat16")])
@pytest.mark.parametrize("name", ["qsa_lm", "real_layer_fp16"])
def test_patched_models_build(tmp_path: Path, name: str, dtype: Any, surface: str) -> None:
    """Each carries the local function, which TensorRT must not take."""
    path = patch_onnx(MODELS / f"{name}.onnx", tmp_path / "model.qsa.onnx", dtype=dtype).output
    report = build_engine(path, **SIZES)
    assert report.engine.read_bytes().count(b"indexer_budget") >= len(report.manifest["layers"])
    assert report.manifest["surface_dtype"] == surface


def test_edge_llm_spelling_builds(model_file: Callable[..., Path]) -> None:
    path = model_file(domain="trt_edgellm", op_type="QsaAttentionPlugin", plugin_attributes=False)
    assert build_engine(path, **SIZES).manifest["layers"][0]["op_type"] == "QsaAttentionPlugin"


def test_external_data_is_built_and_hashed(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(qsa_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    manifest = build_engine(path, **SIZES).manifest
    assert manifest["onnx"]["external_data"] == [{"file": "weights.bin", "sha256": sha256(tmp_path / "weights.bin")}]


def test_targets_and_workspace(model_file: Callable[..., Path]) -> None:
    report = build_engine(model_file(), **SIZES, target=["sm_86,sm_120", "sm_86"], workspace=64 << 20)
    assert report.manifest["targets"] == ["SM86", "SM120"]
    assert report.manifest["flags"]["workspace"] == 64 << 20
    assert "targets: SM86, SM120" in report.summary()


def test_overridden_pages_reach_the_manifest(model_file: Callable[..., Path]) -> None:
    pool = "[2,7,128,2,128]"
    manifest = build_engine(model_file(), **SIZES, profile=[f"past_key_values_0:{pool}/{pool}/{pool}"]).manifest
    assert manifest["pool"]["num_pages"] == 7
    assert manifest["layers"][0]["pool_shape"] == [2, 7, 128, 2, 128]


def test_summaries(model_file: Callable[..., Path]) -> None:
    path = model_file()
    plan = plan_build(path, **SIZES, num_pages=3)
    lines = plan.summary().splitlines()
    assert lines[0].split() == ["profile", "input", "min", "opt", "max"]
    assert lines[1].split() == ["prefill", "hidden_states", "[1,1,32]", "[2,32,32]", "[2,64,32]"]
    assert lines[-1].startswith("warning: --num-pages 3 is less than the 4 pages")
    report = build_engine(path, **SIZES)
    text = report.summary()
    assert str(report.engine) in text
    assert str(report.manifest_file) in text
    assert "1 QsaAttention layer, float16" in text


def test_verbose_prints_tensorrts_log_to_stderr(
    model_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(model_file(), **SIZES)
    assert "[TensorRT]" not in capsys.readouterr().err
    build_engine(model_file(), **SIZES, verbose=True)
    captured = capsys.readouterr()
    assert "[TensorRT] VERBOSE: " in captured.err
    assert "[TensorRT]" not in captured.out


def test_unsupported_node_types_are_all_named(model_file: Callable[..., Path]) -> None:
    value = helper.make_tensor_value_info("matrix", TensorProto.FLOAT, ["batch", 3, 3])
    nodes = [
        helper.make_node("Det", ["matrix"], ["det"], name="det_0"),
        helper.make_node("Unique", ["det"], ["unique"], name="unique_0", sorted=0),
        helper.make_node("Det", ["matrix"], ["unused"], name="det_1"),
    ]
    path = model_file(extra_inputs=[value], extra_nodes=nodes)
    message = failure(path)
    assert message == f"{path}: this TensorRT cannot parse Det (node det_0, and 1 more), Unique (node unique_0)"


def test_operators_of_onnxruntime_are_named_with_a_way_out(model_file: Callable[..., Path]) -> None:
    value = helper.make_tensor_value_info("matrix", TensorProto.FLOAT, ["batch", 3, 3])
    node = helper.make_node("FusedMatMul", ["matrix", "matrix"], ["f"], name="f0", domain="com.microsoft")
    path = model_file(extra_inputs=[value], extra_nodes=[node])
    assert failure(path) == (
        f"{path}: this TensorRT cannot parse FusedMatMul (node f0: unknown); files optimised by onnxruntime hold "
        "operators of its own: patch the file as exported"
    )


def test_node_types_that_the_parser_finds_late_are_named_too(model_file: Callable[..., Path]) -> None:
    nodes = [
        helper.make_node("Constant", [], ["i"], value=helper.make_tensor("i", TensorProto.INT64, [1, 1, 1], [0])),
        helper.make_node("Constant", [], ["u"], value=helper.make_tensor("u", TensorProto.FLOAT16, [1, 1, 1], [1])),
        helper.make_node("ScatterElements", ["hidden_states", "i", "u"], ["s"], name="s0", reduction="add"),
    ]
    path = model_file(extra_nodes=nodes)
    proto = onnx.load(path)
    proto.graph.output.append(helper.make_tensor_value_info("s", TensorProto.FLOAT16, ["batch", "seq", 32]))
    onnx.save(proto, path)
    assert failure(path) == f"{path}: this TensorRT cannot parse ScatterElements (Unsupported reduction type)"


def test_inlined_nodes_are_an_error(model_file: Callable[..., Path]) -> None:
    """A node without plugin_namespace beside a local function of its name never becomes a plugin layer."""
    path = model_file(2, plugin_attributes=False)
    proto = onnx.load(path)
    node = next(n for n in proto.graph.node if n.op_type == "QsaAttention")
    body = [
        helper.make_node("Shape", ["qkv"], ["sizes"], start=0, end=2),
        helper.make_node("Constant", [], ["heads"], value_ints=[SMALL.num_q_heads, SMALL.head_size]),
        helper.make_node("Concat", ["sizes", "heads"], ["shape"], axis=0),
        helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("zero", TensorProto.FLOAT16, [1], [0.0])),
        helper.make_node("Expand", ["zero", "shape"], ["attn_output"]),
        helper.make_node("Identity", ["past"], ["present"]),
    ]
    inputs = ["qkv", "index_qk", "past", *(f"input_{i}" for i in range(3, len(node.input)))]
    opsets = [helper.make_opsetid("", 20)]
    proto.functions.append(
        helper.make_function("qsa", "QsaAttention", inputs, ["attn_output", "present"], body, opsets)
    )
    onnx.save(proto, path)
    assert failure(path) == (
        f"{path}: 0 plugin layers after parsing for 2 QsaAttention nodes: TensorRT inlines the local function where a "
        "node has no attribute plugin_namespace (qsa_0, qsa_1); patch the original model again"
    )


def test_shape_inputs_are_refused(model_file: Callable[..., Path]) -> None:
    sizes = helper.make_tensor_value_info("sizes", TensorProto.INT64, [2])
    nodes = [helper.make_node("Reshape", ["hidden_states", "sizes"], ["flat"], name="flatten")]
    path = model_file(extra_inputs=[sizes], extra_nodes=nodes)
    proto = onnx.load(path)
    proto.graph.output.append(helper.make_tensor_value_info("flat", TensorProto.FLOAT16, ["rows", "columns"]))
    onnx.save(proto, path)
    assert failure(path) == (
        "graph input sizes: TensorRT needs its values to know shapes; make it a constant of the model"
    )


@pytest.mark.parametrize("method", ["configure_plugin", "get_workspace_size", "get_output_shapes"])
def test_the_plugins_own_exception_is_the_cause(
    model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise RuntimeError("injected fault")

    fail.__name__ = method
    monkeypatch.setattr(Callbacks, method, callback(fail))
    path = model_file()
    with pytest.raises(FailedError) as error:
        build_engine(path, **SIZES)
    assert f"{method}: injected fault" in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert list(path.parent.iterdir()) == [path]


def test_a_callback_that_fails_silently_does_not_pass(
    model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bindings turn an exception of get_workspace_size into 0 bytes and build on."""
    monkeypatch.setattr(Callbacks, "get_workspace_size", callback(lambda self, *args: 1 // 0))
    assert "integer division or modulo by zero" in failure(model_file())


def test_tensorrts_own_error_is_shown(model_file: Callable[..., Path]) -> None:
    hint = r" with at most 1 bytes of workspace \(raise --workspace or leave it out\)"
    assert re.fullmatch(rf"the build failed{hint}: .+Error Code \d+: .+", failure(model_file(), workspace=1))


def test_a_failed_build_of_several_layers_leaves_the_process_whole(model_file: Callable[..., Path]) -> None:
    """In a process of its own: without `clone`'s reference TensorRT frees a plugin twice, and glibc aborts."""
    code = f"""
import sys
from qsa_trt.cli import main
sys.exit(main(["build-engine", {str(model_file(2))!r}, "--max-kv-len", "256", "--workspace", "1"]))
"""
    environment = os.environ | {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "qsa-trt: error: the build failed with at most 1 bytes of workspace" in done.stderr


def test_a_failed_build_keeps_an_older_engine(model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file()
    report = build_engine(path, **SIZES)
    before = report.engine.read_bytes(), report.manifest_file.read_text()
    failure(path, workspace=1)
    assert (report.engine.read_bytes(), report.manifest_file.read_text()) == before


def test_a_parser_that_gives_no_reason(model_file: Callable[..., Path]) -> None:
    clear_errors()
    path = model_file()
    parser = SimpleNamespace(parse_from_file=lambda _: False, num_errors=0)
    with pytest.raises(FailedError) as error:
        parse_model(parser, SimpleNamespace(path=path), SimpleNamespace(errors=[]))
    assert str(error.value) == f"TensorRT's ONNX parser rejects {path}: TensorRT gave no reason"


def test_a_builder_that_cannot_start_says_why() -> None:
    """As TensorRT does on a machine with no GPU: an error in the log, then a null pointer."""

    def null_pointer(log: Any) -> Any:
        log.errors.append("CUDA initialization failure with error: 100")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    clear_errors()
    trt = SimpleNamespace(__name__="tensorrt", Builder=null_pointer)
    with pytest.raises(FailedError) as error:
        start_builder(trt, SimpleNamespace(errors=[]))
    assert str(error.value) == ("tensorrt could not start its builder: CUDA initialization failure with error: 100")


def test_a_full_disk_leaves_nothing(model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str, **_: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(manifest_module.Path, "write_text", full)
    message = failure(model_file())
    assert message.startswith("cannot write ")
    assert message.endswith(": No space left on device; nothing was written")


def test_engine_and_manifest_appear_together(model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def fail_for_the_manifest(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(5, "Input/output error", str(target))
        return replace(self, target)

    monkeypatch.setattr(manifest_module.Path, "replace", fail_for_the_manifest)
    assert failure(model_file()).endswith("model.qsa.engine.json: Input/output error; nothing was written")


def test_reports_are_what_the_names_say(model_file: Callable[..., Path], tmp_path: Path) -> None:
    report = build_engine(model_file(), tmp_path / "other.plan", **SIZES)
    assert isinstance(report, BuildReport)
    assert (report.engine.name, report.manifest_file.name) == ("other.plan", "other.plan.json")
