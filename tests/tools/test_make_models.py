"""The files of `models/`: what they hold, that they run, that they equal their modules, and that they can be remade."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from qsa_plugin.contract import Geometry
from qsa_plugin.errors import MissingPackageError
from qsa_plugin.kernel_limits import kernel_refusals
from qsa_trt.metrics import row_error
from tests.support.hf import stable_topk
from tests.support.requirements import needs_oracle
from tools import make_models

NAMES = ("real_layer_fp16", "qsa_lm", "plain_qwen3")
MODELS = make_models.ROOT / "models"


#: fp32: about 1e2 roundings of 6e-8 in a row, each relative to the row's largest value.
FP32_BOUND = 1e-5
#: fp16: exporter and module round at different places; five ulps (9.8e-4) of the row's largest value.
FP16_BOUND = 5e-3


def session(name: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return ort.InferenceSession(MODELS / f"{name}.onnx", options, providers=["CPUExecutionProvider"])


def numpy_feed(name: str, seq_len: int) -> dict[str, np.ndarray]:
    """A feed made without torch: one sequence, all of it visible to a causal mask."""
    rng = np.random.default_rng(seq_len)
    if name != "real_layer_fp16":
        tokens = rng.integers(0, 128, (1, seq_len))
        return {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    angles = np.arange(seq_len)[:, None] * 1e7 ** (-np.arange(32) / 32)
    table = np.concatenate([angles, angles], axis=-1)[None]  # [1, S, 64]
    return {
        "hidden_states": rng.standard_normal((1, seq_len, 64)).astype(np.float16),
        "cos": np.cos(table).astype(np.float16),
        "sin": np.sin(table).astype(np.float16),
        "attention_mask": np.tri(seq_len, dtype=bool)[None, None],
    }


def test_folder_is_small_and_complete() -> None:
    expected = {"README.md", *(f"{name}{suffix}" for name in NAMES for suffix in (".onnx", ".config.json"))}
    assert {path.name for path in MODELS.iterdir()} == expected
    assert sum(path.stat().st_size for path in MODELS.iterdir()) < 4 << 20


@pytest.mark.parametrize("name", NAMES)
def test_file_is_valid_and_names_no_machine(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    content = path.read_bytes()
    onnx.checker.check_model(content, full_check=True)
    assert not re.search(rb"/(home|root|work|tmp|usr|opt|mnt)/|site-packages|stack_trace|File \"| at 0x", content)
    scopes = [entry.value for node in onnx.load(path).graph.node for entry in node.metadata_props]
    assert any("self_attn.q_proj" in scope for scope in scopes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seq_len", [1, 3, 66, 100])
def test_runs_without_torch(name: str, seq_len: int) -> None:
    feed = numpy_feed(name, seq_len)
    (output,) = session(name).run(None, feed)
    assert output.shape[:2] == (1, seq_len)
    assert np.isfinite(output).all()


@pytest.mark.parametrize(
    ("name", "geometry"),
    [("real_layer_fp16", (24, 2, 256, 4, 128, 2048, 4, 64)), ("qsa_lm", (8, 2, 64, 2, 64, 64, 4, 32))],
)
def test_config_gives_a_geometry_that_the_kernels_run(name: str, geometry: tuple[int, ...]) -> None:
    config = json.loads((MODELS / f"{name}.config.json").read_text())
    main = ("num_attention_heads", "num_key_value_heads", "head_dim")
    indexer = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    rotary = config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
    assert (*(config[key] for key in main + indexer), rotary) == geometry
    assert set(config["layer_types"]) == {"indexed_attention"}
    assert kernel_refusals(Geometry(*geometry[:-1]), "float16", geometry[-1]) == []


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(make_models, "PACKAGES", ("a_package_that_nobody_has",))
    with pytest.raises(MissingPackageError):
        make_models.check_packages()
    assert make_models.main([]) == 2
    assert capsys.readouterr().err == (
        "package a_package_that_nobody_has: got nothing installed; expected the `oracle` extra; "
        "pip install 'qsa-trt[oracle]'\n"
    )


def test_runs_as_a_script() -> None:
    script = Path(make_models.__file__)
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--out" in done.stdout


def module_and_inputs(name: str, lengths: list[int]) -> tuple[Any, Any]:
    import torch

    from tools import hf_export

    module = getattr(hf_export, name)()
    if name == "real_layer_fp16":
        return module, hf_export.layer_inputs(module.config, lengths, seed=7, dtype=torch.float16)
    return module, hf_export.lm_inputs(module.config, lengths, seed=7)


def _text(message: Any) -> bytes:
    content: bytes = message.SerializeToString(deterministic=True)
    return content


class TestAgainstTheModules:
    pytestmark = needs_oracle

    @pytest.mark.parametrize(
        ("name", "lengths", "bound"),
        [
            *(("qsa_lm", lengths, FP32_BOUND) for lengths in ([1], [3, 4], [64], [67, 68, 69], [150, 1, 99])),
            *(("plain_qwen3", lengths, FP32_BOUND) for lengths in ([1], [33, 7])),
            *(("real_layer_fp16", lengths, FP16_BOUND) for lengths in ([1], [3, 30])),
            pytest.param("real_layer_fp16", [2060], FP16_BOUND, marks=pytest.mark.slow),
        ],
    )
    def test_equals_the_module(self, name: str, lengths: list[int], bound: float) -> None:
        """Per live row, with the module's own indexer; traced at [13, 10]."""
        import torch

        module, inputs = module_and_inputs(name, lengths)
        with torch.no_grad(), stable_topk():
            expected = module(**inputs).numpy()
        (actual,) = session(name).run(None, {key: value.numpy() for key, value in inputs.items()})
        for row, length in enumerate(lengths):
            assert row_error(actual[row, :length], expected[row, :length]).max() <= bound

    @pytest.mark.slow
    def test_remaking_gives_the_same_files(self, tmp_path: Path) -> None:
        """Ops, edges, attributes, initialisers and metadata, byte for byte."""
        written = make_models.make_models(tmp_path)
        assert len(written) == 2 * len(NAMES)
        for path in written:
            committed = MODELS / path.name
            if path.suffix == ".onnx":
                remade, kept = onnx.load(path).graph, onnx.load(committed).graph
                assert [_text(node) for node in remade.node] == [_text(node) for node in kept.node]
                assert [_text(tensor) for tensor in remade.initializer] == [
                    _text(tensor) for tensor in kept.initializer
                ]
            assert path.read_bytes() == committed.read_bytes(), path.name

    @pytest.mark.parametrize(
        ("exporter", "opset", "attn"),
        [("torchscript", 18, "eager"), ("dynamo", 18, "eager"), ("dynamo", 20, "sdpa"), ("dynamo", 23, "sdpa")],
    )
    def test_other_exports_equal_the_module(self, exporter: Any, opset: int, attn: Any) -> None:
        """What tests of the patcher export for themselves."""
        import torch

        from tools import hf_export

        config = hf_export.text_config(heads=4, head_dim=32, rotary_dims=8, indexer_head_dim=32, budget=16, attn=attn)
        layer = hf_export.attention_layer(config, seed=9)
        model = hf_export.export_layer(layer, opset=opset, exporter=exporter)
        onnx.checker.check_model(model, full_check=True)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
        runner = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for lengths in ([1], [2, 3], [40, 21, 5]):
            inputs = hf_export.layer_inputs(config, lengths, seed=3)
            with torch.no_grad(), stable_topk():
                expected = layer(**inputs).numpy()
            (actual,) = runner.run(None, {key: value.numpy() for key, value in inputs.items()})
            for row, length in enumerate(lengths):
                assert row_error(actual[row, :length], expected[row, :length]).max() <= FP32_BOUND
