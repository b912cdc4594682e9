"""Attributes come from the graph; the config fills gaps, decides between findings, and may not contradict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qsa_plugin.contract import Geometry
from qsa_plugin.errors import InputError, RefusedError
from qsa_trt.patching.attributes import Attributes, read_attributes
from qsa_trt.patching.config import config_value, load_config
from qsa_trt.patching.verify import check_layer
from tests.support.graphs import LAYER, add_constant, anchors_of, first_layer, load, node
from tests.support.originals import MODELS

TINY = Geometry(4, 2, 32, 4, 32, 16, 4, float(np.float32(1 / math.sqrt(32))), float(np.float32(1e-6)))
REAL = Geometry(24, 2, 256, 4, 128, 2048, 4, 0.0625, float(np.float32(1e-6)))
LM = Geometry(8, 2, 64, 2, 64, 64, 4, 0.125, float(np.float32(1e-6)))
CONFIG = json.loads((MODELS / "qsa_lm.config.json").read_text())


def read(model: onnx.ModelProto, config: Mapping[str, Any] | None = None) -> Attributes:
    index, anchors = anchors_of(model)
    return read_attributes(index, check_layer(index, anchors[0]), config or {}, 0)


def refusal(model: onnx.ModelProto, config: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(RefusedError) as error:
        read(model, config)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "geometry", "rotary"),
    [
        ("layer-dynamo-18-eager", TINY, 8),
        ("layer-dynamo-20-sdpa", TINY, 8),
        ("layer-dynamo-23-sdpa", TINY, 8),
        ("layer-script-18-eager", TINY, 8),
        ("qsa2_raw", TINY, 8),
        ("qsa2_decode", TINY, 8),
        ("real_layer_fp16", REAL, 64),
        ("qsa_lm", LM, 32),
    ],
)
def test_everything_is_in_the_graph(name: str, geometry: Geometry, rotary: int) -> None:
    attributes = read(load(name))
    assert (attributes.geometry, attributes.rotary_dims) == (geometry, rotary)
    assert not any("config" in place for place in attributes.where.values())


def test_where_names_the_place() -> None:
    where = read(load()).where
    assert where["head_size"] == "size of the q_norm weight"
    assert where["num_q_heads"] == "width 1024 of q_proj"
    assert where["indexer_budget"].startswith("K 16 of node_topk")


def test_config_agrees() -> None:
    assert read(load(), CONFIG) == read(load())


def hide_budget(model: onnx.ModelProto) -> None:
    """K becomes a graph input: the graph does not tell the budget any more."""
    index, anchors = anchors_of(model)
    for a in anchors:
        node(model, check_layer(index, a).topks[0].output).input[1] = "k"
    model.graph.input.append(onnx.helper.make_tensor_value_info("k", onnx.TensorProto.INT64, [1]))


def test_missing_budget_needs_the_config() -> None:
    model = load()
    hide_budget(model)
    assert refusal(model) == (
        f"layer {LAYER}: indexer_budget: the graph says nothing; give --config with the model's config.json;"
        " nothing was patched"
    )
    attributes = read(model, CONFIG)
    assert attributes.geometry == LM and attributes.where["indexer_budget"] == "config indexer_budget"


@pytest.mark.parametrize(
    ("key", "value", "attribute"),
    [
        ("num_attention_heads", 16, "num_q_heads"),
        ("num_key_value_heads", 4, "num_kv_heads"),
        ("head_dim", 128, "head_size"),
        ("indexer_n_heads", 4, "indexer_n_heads"),
        ("indexer_head_dim", 32, "indexer_head_dim"),
        ("indexer_budget", 128, "indexer_budget"),
        ("indexer_compress_ratio", 8, "indexer_compress_ratio"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps"),
    ],
)
def test_config_of_another_model(key: str, value: float, attribute: str) -> None:
    text = refusal(load(), CONFIG | {key: value})
    assert text.startswith(f"layer {LAYER}: {attribute}: the graph says ")
    assert f"but --config says {value:g} (config {key})" in text


def test_config_with_other_rotary_dims() -> None:
    rope = CONFIG["rope_parameters"] | {"partial_rotary_factor": 0.25}
    assert "rotary_dims: the graph says 32" in refusal(load(), CONFIG | {"rope_parameters": rope})


def test_norms_with_different_epsilons_are_refused_whatever_the_config() -> None:
    model = load()
    layer = first_layer()
    index, _ = anchors_of(model)
    add = next(n for n in index.readers(layer.norms["k_norm"].node.output) if n.op == "Add")
    node(model, add.output).input[1] = add_constant(model, "other_eps", np.array(1e-5, np.float32))
    for config in ({}, CONFIG):
        text = refusal(model, config)
        assert "rms_norm_eps: the graph says 1e-06" in text and "and 1e-05" in text and "a node has one" in text


def test_value_projection_of_another_width() -> None:
    """Fewer value than key heads: the packed qkv could not hold them."""
    model = load()
    weight = node(model, first_layer().projections["v_proj"]).input[1]
    tensor = next(t for t in model.graph.initializer if t.name == weight)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:, :64], weight))
    del model.graph.value_info[:]
    text = refusal(model)
    assert "num_kv_heads: the graph says 2 (width 128 of k_proj) and 1 (width 64 of v_proj)" in text


def test_scale_forms() -> None:
    """One factor, its root on both operands, a division: all read the same; another scale is kept."""
    model = load("layer-dynamo-18-eager")
    index, anchors = anchors_of(model)
    softmax = check_layer(index, anchors[0]).softmax
    scaled = next(
        n for n in model.graph.node if n.op_type == "Mul" and n.output[0] in node(model, softmax.inputs[0]).input
    )
    assert read(model).geometry.attention_scale == TINY.attention_scale
    scaled.op_type = "Div"
    scaled.input[1] = add_constant(model, "root", np.array(math.sqrt(32), np.float32))
    assert read(model).geometry.attention_scale == TINY.attention_scale
    scaled.input[1] = add_constant(model, "other", np.array(8, np.float32))
    assert read(model).geometry.attention_scale == 0.125


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "a readable file"), ("{", "a JSON file"), ("[1]", "a JSON object"), ("\udcff", "a JSON file")],
)
def test_unusable_config_files(content: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=expected) as error:
        load_config(path)
    assert str(error.value).startswith(f"--config: got {path}; expected")
    assert str(error.value).endswith("give the model's config.json")


def test_another_json_object_is_no_config(tmp_path: Path) -> None:
    """An ENGINE.json, say, would otherwise count as a config that says nothing."""
    path = tmp_path / "m.engine.json"
    path.write_text(json.dumps({"format": 1, "profiles": []}))
    with pytest.raises(InputError) as error:
        load_config(path)
    assert str(error.value) == (
        f"--config: got {path} (nothing about a model); expected a config.json; give the model's config.json"
    )


def test_config_of_a_multimodal_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen4_exp", "text_config": CONFIG}))
    assert load_config(path) == CONFIG


@pytest.mark.parametrize("value", ["8", [8], True, -1, 0, 10**400, math.inf, math.nan])
def test_config_values_are_positive_numbers(value: object) -> None:
    with pytest.raises(InputError, match=r"config num_attention_heads: got .*; expected a positive number"):
        config_value({"num_attention_heads": value}, "num_q_heads")


@pytest.mark.parametrize("name", ["text_config", "rope_parameters", "rope_scaling"])
def test_config_sections_are_objects(name: str) -> None:
    with pytest.raises(InputError) as error:
        load_config({name: [1]})
    assert str(error.value) == (
        f"config {name}: got [1]; expected a JSON object; correct the config, or give the right file"
    )


def test_config_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    with pytest.raises(InputError, match="expected a JSON file; give the model's config"):
        load_config(path)
