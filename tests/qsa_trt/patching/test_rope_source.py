"""The baked rope table: from the model's inv_freq or the config, and never for rope types it cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import InputError, RefusedError
from qsa_trt.patching import patch_onnx
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.patching.plan import make_plan
from qsa_trt.recording import PatchedSession, qsa_nodes
from qsa_trt.rope import default_inv_freq, rope_table
from tests.support.compare import BOUND, errors, patch
from tests.support.graphs import add_constant, insert, load, node, reroute
from tests.support.originals import MODELS, Original

CONFIG: dict[str, Any] = json.loads((MODELS / "qsa_lm.config.json").read_text())
REAL_CONFIG: dict[str, Any] = json.loads((MODELS / "real_layer_fp16.config.json").read_text())


def bake(model: onnx.ModelProto, folder: Path, config: dict[str, Any] | None = None) -> tuple[np.ndarray, str]:
    """The table in the patched file, and what the report says."""
    onnx.save(model, folder / "in.onnx")
    report = patch_onnx(
        folder / "in.onnx", folder / "out.onnx", rope_table="initializer", max_positions=300, config=config
    )
    patched = onnx.load(folder / "out.onnx")
    name = qsa_nodes(patched)[0].inputs["rope_rotary_cos_sin"]
    assert name not in [v.name for v in patched.graph.input]
    return numpy_helper.to_array(next(t for t in patched.graph.initializer if t.name == name)), report.rope


def with_rope(**changes: Any) -> dict[str, Any]:
    return CONFIG | {"rope_parameters": CONFIG["rope_parameters"] | changes}


@pytest.mark.parametrize("config", [None, CONFIG])
def test_from_the_model(config: dict[str, Any] | None, tmp_path: Path) -> None:
    table, said = bake(load(), tmp_path, config)
    assert table.dtype == np.float32
    assert np.array_equal(table, rope_table(300, default_inv_freq(32, 1e7)))
    assert said == "baked in, 300 positions, rotary dims 32, from the model's lm.model.rotary_emb.inv_freq"


def test_from_the_config(tmp_path: Path) -> None:
    """A layer graph holds no frequencies."""
    table, said = bake(load("real_layer_fp16"), tmp_path, REAL_CONFIG)
    assert np.array_equal(table, rope_table(300, default_inv_freq(64, 1e7)))
    assert said.endswith("from the config's rope parameters")


def test_baked_model_runs_without_a_table(tmp_path: Path) -> None:
    bake(load(), tmp_path)
    original = Original("qsa_lm")
    tokens = original.tokens(np.random.default_rng(0), 1, 80)
    step = PatchedSession(tmp_path / "out.onnx", batch=1, max_kv_len=80).prefill(tokens, [80])
    patch_onnx(original.path, tmp_path / "input.onnx")
    fed = PatchedSession(tmp_path / "input.onnx", batch=1, max_kv_len=80, rope=original.rope(300))
    assert np.array_equal(step.outputs["logits"], fed.prefill(tokens, [80]).outputs["logits"])


def test_nothing_to_bake_from(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        bake(load("real_layer_fp16"), tmp_path)
    assert str(error.value) == (
        "--rope-table: got initializer; expected a model with an inv_freq weight, or --config; give the model's"
        " config.json, or leave the rope table a graph input"
    )
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("positions", [2**24, 2**31, 10**20])
def test_more_positions_than_a_file_holds(positions: int, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        patch_onnx(MODELS / "qsa_lm.onnx", tmp_path / "out.onnx", rope_table="initializer", max_positions=positions)
    assert str(error.value) == (
        f"--max-positions: got {positions}; expected at most 16777215, since an ONNX file holds 2 GB; lower it, or"
        " leave the rope table a graph input"
    )


def test_config_with_another_theta(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="inverse frequencies are not those of the config's rope parameters"):
        bake(load(), tmp_path, with_rope(rope_theta=1e4))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_rope_types_that_cannot_be_baked(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"config rope_type: got {kind}"):
        bake(load(), tmp_path, with_rope(rope_type=kind))


def cosines(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.op_type == "Cos")


def test_scaled_cosines(tmp_path: Path) -> None:
    """The attention factor of longrope and yarn."""
    model = load()
    factor = add_constant(model, "factor", np.array(1.2, np.float32))
    cos = cosines(model).output[0]
    insert(model, helper.make_node("Mul", [cos, factor], ["scaled"], name="node_scaled"), after=cos)
    reroute(model, cos, "scaled")
    with pytest.raises(RefusedError, match=r"node_scaled \(Mul\): the cosines are scaled by 1\.2"):
        bake(model, tmp_path)


def test_two_sets_of_frequencies(tmp_path: Path) -> None:
    """Longrope chooses by length."""
    model = load()
    angles = node(model, cosines(model).input[0])
    short = next(t for t in angles.input if t.endswith("inv_freq"))
    long = add_constant(model, "long_inv_freq", default_inv_freq(32, 1e5))
    flag = add_constant(model, "flag", np.array(True))
    position = next(i for i, n in enumerate(model.graph.node) if n is angles)
    model.graph.node.insert(position, helper.make_node("Where", [flag, short, long], ["chosen"]))
    reroute(model, short, "chosen", only=angles.output[0])
    with pytest.raises(RefusedError, match="several sets of inverse frequencies"):
        bake(model, tmp_path)


@pytest.mark.parametrize("theta", [1e7, 1e4])
def test_layers_of_other_frequencies(theta: float, tmp_path: Path) -> None:
    """Layer 1 computes its own cosines; with another theta, one table could not serve both layers."""
    model, index = load(), GraphIndex(load())
    inv_freq = next(t for t in index.initializers if t.endswith("inv_freq"))
    shape = index.initializers[inv_freq].dims
    add_constant(model, "own_freq", default_inv_freq(32, theta).reshape(shape))
    own = {inv_freq: "own_freq"}
    second = make_plan(index, {}, None, PoolIO.IN_PLACE).layers[1].cut
    for n in sorted(second.sides & index.descendants([inv_freq]), key=lambda n: n.position):
        copy = helper.make_node(n.op, [own.get(t, t) for t in n.inputs], [f"own_{t}" for t in n.outputs])
        copy.attribute.extend(n.proto.attribute)
        own |= {t: f"own_{t}" for t in n.outputs}
        insert(model, copy, after=n.output)
    for n in second.nodes:
        changed = node(model, n.output)
        changed.input[:] = [own.get(t, t) for t in n.inputs]
    if theta == 1e7:
        assert max(errors(model, tmp_path)) <= BOUND
    else:
        with pytest.raises(
            RefusedError, match=r"layers\.1\.self_attn: own_freq: it rotates by other frequencies than the"
        ):
            patch(model, tmp_path)
