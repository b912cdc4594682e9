"""Weights one at a time: how checkpoints spell and split them, and random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsa_plugin.errors import InputError, RefusedError
from tests.support.requirements import needs_oracle

pytestmark = needs_oracle

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def save_tensors(folder: Path, **tensors: Any) -> Path:
    from safetensors.torch import save_file

    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_every_parameter_of_a_sharded_checkpoint(checkpoint: Any) -> None:
    """Its experts are stored one by one."""
    import torch

    from qsa_trt.exporting.weights import Checkpoint

    weights = Checkpoint(checkpoint.folder)
    assert len(weights.files) > 1
    parameters = dict(checkpoint.lm.named_parameters())
    weights.check({name: tuple(p.shape) for name, p in parameters.items()})
    for name, parameter in parameters.items():
        assert torch.equal(weights.read(name, tuple(parameter.shape), torch.float32), parameter), name


def test_spellings_of_multimodal_and_base_models(checkpoint: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from qsa_trt.exporting.weights import Checkpoint

    state = {name: p.detach().clone() for name, p in checkpoint.lm.named_parameters()}
    spellings = {
        "multimodal": lambda n: n.replace("model.", "model.language_model.") if n.startswith("model.") else n,
        "older": lambda n: f"language_model.{n}",
    }
    for folder, spell in spellings.items():
        (tmp_path / folder).mkdir()
        stored = {spell(name): p for name, p in state.items()} | {
            "model.visual.x": torch.ones(1),
            "mtp.y": torch.ones(1),
        }
        save_file(stored, tmp_path / folder / "model.safetensors")
        weights = Checkpoint(tmp_path / folder)
        weights.check({name: tuple(p.shape) for name, p in state.items()})
        assert torch.equal(weights.read(Q_PROJ, tuple(state[Q_PROJ].shape), torch.float32), state[Q_PROJ])
        fused = "model.layers.1.mlp.experts.gate_up_proj"  # stored whole here
        assert torch.equal(weights.read(fused, tuple(state[fused].shape), torch.float32), state[fused])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "complete safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
            "complete safetensors file",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {Q_PROJ: "absent.safetensors"}})
            ),
            "absent.safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {Q_PROJ: f"../{folder.name}/model.safetensors"}})
            ),
            "a file in ",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {Q_PROJ: "model.safetensors", "model.x": "model.safetensors"}})
            ),
            "no tensor model.x",
        ),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, damage: Any, what: str) -> None:
    import torch

    from qsa_trt.exporting.weights import Checkpoint

    save_tensors(tmp_path, **{Q_PROJ.replace(".", "__"): torch.ones(4, 2)})
    damage(tmp_path)
    with pytest.raises(InputError, match=what):
        Checkpoint(tmp_path).check({Q_PROJ: (4, 2), "model.x": (1,)} if "model.x" in what else {Q_PROJ: (4, 2)})


def test_missing_tensors_and_wrong_shapes(tmp_path: Path) -> None:
    import torch

    from qsa_trt.exporting.weights import Checkpoint

    weights = Checkpoint(save_tensors(tmp_path, model__a=torch.ones(4, 2), model__b=torch.ones(2).to(torch.int8)))
    with pytest.raises(InputError, match=r"no tensor model\.c and 1 more"):
        weights.check({"model.a": (4, 2), "model.c": (1,), "model.d": (1,)})
    with pytest.raises(InputError, match=r"shape \[4, 2\]; expected \[2, 4\]"):
        weights.check({"model.a": (2, 4)})
    with pytest.raises(RefusedError, match="element type I8"):
        weights.check({"model.b": (2,)})


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    import torch

    from qsa_trt.exporting.weights import Checkpoint

    values = torch.tensor([1.0, -70000.0])
    weights = Checkpoint(save_tensors(tmp_path, model__a=values.bfloat16(), model__b=torch.tensor([float("inf")])))
    assert weights.read("model.a", (2,), torch.bfloat16).tolist() == [1.0, -70144.0]
    with pytest.raises(RefusedError, match=r"values up to 70144 do not fit torch\.float16"):
        weights.read("model.a", (2,), torch.float16)
    assert weights.read("model.b", (1,), torch.float16).isinf().all()  # its own business


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    import torch

    from qsa_trt.exporting.weights import RandomWeights

    first = RandomWeights(3).read(Q_PROJ, (400, 300), torch.float32)
    assert torch.equal(RandomWeights(3).read(Q_PROJ, (400, 300), torch.float32), first)
    assert not torch.equal(RandomWeights(4).read(Q_PROJ, (400, 300), torch.float32), first)
    assert not torch.equal(RandomWeights(3).read("model.x.weight", (400, 300), torch.float32), first)
    half = RandomWeights(3).read(Q_PROJ, (400, 300), torch.float16)
    assert torch.equal(half, first.half())
    # uniform within sqrt(3 / fan in), so that the variance of 300 products is 1, to 1 % over 120,000 draws
    assert first.abs().max() <= np.sqrt(3 / 300)
    assert abs(float(first.var()) * 300 - 1) < 0.01
    gamma = RandomWeights(3).read("model.norm.weight", (1000,), torch.float32)
    assert gamma.abs().max() <= 0.5 < 2 * float(gamma.std()) * np.sqrt(3)
