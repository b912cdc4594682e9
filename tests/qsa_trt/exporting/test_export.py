"""The files that an export writes, and what it leaves behind when it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from qsa_plugin.errors import InputError, MissingPackageError, RefusedError
from qsa_trt import cli
from qsa_trt.exporting import export_onnx, requirements
from tests.support import checkpoints
from tests.support.requirements import needs_onnxruntime, needs_oracle, needs_rtx

#: Options of the quickest export there is: the attention of one layer.
QUICK: dict[str, Any] = {"layers": "1", "only_attention": True}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, qsa_trt.exporting, qsa_trt.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dtype": "int8"}, "--dtype"),
        ({"pool_io": "x"}, "--pool-io"),
        ({"rope_table": "x"}, "--rope-table"),
        ({"max_positions": 5}, "--max-positions"),
        ({"rope_table": "initializer", "max_positions": 0}, "--max-positions"),
        ({"plain": True, "pool_io": "copy"}, "--plain"),
        ({"plain": True, "rope_table": "initializer"}, "--plain"),
        ({"plain": True, "reference_body": False}, "--plain"),
        ({"random_init": -1}, "--random-init"),
        ({}, "--random-init SEED"),  # a config alone
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    config = tmp_path / "model.json"
    config.write_text('{"model_type": "qwen4_exp_text"}')
    with pytest.raises(InputError, match=what):
        export_onnx(config, tmp_path / "out.onnx", **options)
    assert list(tmp_path.iterdir()) == [config]


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen4_exp_text", "quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(RefusedError, match="quantised"):
        export_onnx(tmp_path, tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == [config]


def test_a_missing_package_is_one_line_and_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "PACKAGES", ("a_package_that_nobody_has",))
    with pytest.raises(MissingPackageError):
        requirements.check_packages()
    (tmp_path / "config.json").write_text('{"model_type": "qwen4_exp"}')
    assert cli.main(["export", str(tmp_path), "-o", str(tmp_path / "out.onnx")]) == 2
    assert capsys.readouterr().err == (
        "qsa-trt: error: package a_package_that_nobody_has: got not installed; expected the `export` extra; "
        "run: pip install 'qsa-trt[export]'\n"
    )


class TestFiles:
    pytestmark = needs_oracle

    def test_weights_inside_the_file(self, checkpoint: Any, exported: Path) -> None:
        assert [p.name for p in exported.parent.iterdir()] == [exported.name]
        content = exported.read_bytes()
        onnx.checker.check_model(content, full_check=True)
        assert not re.search(rb"/(home|root|work|tmp|usr|opt|mnt)/|site-packages|stack_trace|File \"| at 0x", content)
        tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(exported).graph.initializer}
        state = checkpoint.lm.state_dict()
        embedding = "model.embed_tokens.weight"
        assert np.array_equal(tensors[embedding], state[embedding].numpy())
        projection = "model.layers.1.self_attn.q_proj.weight"  # MatMul reads it transposed
        assert np.array_equal(tensors[projection], state[projection].numpy().T)

    def test_weights_beside_the_file(self, checkpoint: Any, tmp_path: Path) -> None:
        report = export_onnx(checkpoint.folder, tmp_path / "m.onnx", external_data=True, **QUICK)
        assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}
        assert report.data == tmp_path / "m.onnx.data"
        assert str(report.data) in report.summary()
        onnx.checker.check_model(str(report.output), full_check=True)
        end = 0
        for tensor in onnx.load(report.output, load_external_data=False).graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                entries = {e.key: e.value for e in tensor.external_data}
                assert entries["location"] == "m.onnx.data"
                assert int(entries["offset"]) % 4096 == 0
                assert int(entries["offset"]) >= end  # in order, without overlaps
                end = int(entries["offset"]) + int(entries["length"])
        assert end == report.data.stat().st_size
        inline = export_onnx(checkpoint.folder, tmp_path / "i.onnx", external_data=False, **QUICK).output
        loaded = [onnx.load(path).graph.initializer for path in (report.output, inline)]
        for a, b in zip(*loaded, strict=True):
            assert a.name == b.name
            assert np.array_equal(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b))

    def test_the_size_decides_without_the_option(
        self, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from qsa_trt.exporting import store

        size = export_onnx(checkpoint.folder, tmp_path / "m.onnx", **QUICK).weight_bytes
        for limit, external in ((size, False), (size - 1, True)):
            monkeypatch.setattr(store, "INLINE_BYTES", limit)
            assert (export_onnx(checkpoint.folder, tmp_path / "m.onnx", **QUICK).data is not None) is external
        monkeypatch.setattr(store, "_PROTOBUF_LIMIT", size - 1)
        before = contents(tmp_path)
        with pytest.raises(InputError, match="--no-external-data"):
            export_onnx(checkpoint.folder, tmp_path / "m.onnx", external_data=False, **QUICK)
        assert contents(tmp_path) == before

    def test_the_same_bytes_again(self, tmp_path: Path) -> None:
        config = checkpoints.config_file(tmp_path)
        files = [
            export_onnx(config, tmp_path / f"{n}.onnx", random_init=seed, **QUICK).output
            for n, seed in enumerate((5, 5, 6))
        ]
        first, second, third = (path.read_bytes() for path in files)
        assert first == second != third

    def test_the_command_prints_what_it_made(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config, output = checkpoints.config_file(tmp_path), tmp_path / "m.onnx"
        arguments = ["--random-init", "0", "--layers", "1", "--only-attention", "--rope-table", "initializer"]
        assert cli.main(["export", str(config), "-o", str(output), *arguments, "--max-positions", "300"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        assert captured.out.splitlines()[0] == (f"{config}: layers 1-1 of 2 exported in fp16, with QsaAttention nodes")
        assert "rope: table baked in, 300 positions (" in captured.out
        assert captured.out.endswith(f"written: {output}\n")

    def test_a_hybrid_model_gives_its_qsa_layers(self, tmp_path: Path) -> None:
        types = ["linear_attention", "qwen_sparse_attention", "linear_attention"]
        config = checkpoints.config_file(
            tmp_path, num_hidden_layers=3, layer_types=types, ple_layer_ids=[1], eos_token_id=3, ngram_vocab_size_base=9
        )
        with pytest.raises(RefusedError, match="layer 0: linear attention"):
            export_onnx(config, tmp_path / "m.onnx", random_init=0)
        assert list(tmp_path.iterdir()) == [config]
        report = export_onnx(config, tmp_path / "m.onnx", random_init=0, layers="1")
        assert report.inputs[0] == "hidden_states"
        assert report.outputs == ("hidden_states_out", "present_key_values_0")

    @pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
    def test_dtypes(self, checkpoint: Any, tmp_path: Path, dtype: Any) -> None:
        wanted = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
        path = export_onnx(checkpoint.folder, tmp_path / "m.onnx", dtype=dtype, pool_io="copy", **QUICK).output
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
        for name in ("hidden_states", "past_key_values_0", "hidden_states_out", "present_key_values_0"):
            assert types[name] == wanted
        assert types["rope_rotary_cos_sin"] == TensorProto.FLOAT
        (node,) = (n for n in model.graph.node if n.op_type == "QsaAttention")
        initializers = {t.name: t.data_type for t in model.graph.initializer}
        assert [initializers[name] for name in node.input[7:]] == [wanted] * 4
        assert {a.name: a.i for a in node.attribute}["pool_io"] == 2

    def test_without_the_reference_body(self, checkpoint: Any, tmp_path: Path) -> None:
        model = onnx.load(export_onnx(checkpoint.folder, tmp_path / "m.onnx", reference_body=False, **QUICK).output)
        assert not model.functions
        assert "qsa" in {o.domain for o in model.opset_import}


class TestFailures:
    """Exit code 2, one line, and nothing that was not there before."""

    pytestmark = needs_oracle

    @staticmethod
    def drop_tensor(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        del content["weight_map"]["model.layers.1.self_attn.q_proj.weight"]
        index.write_text(json.dumps(content))

    @staticmethod
    def change_config(folder: Path, **changes: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    @pytest.mark.parametrize(
        ("damage", "what"),
        [
            (lambda folder: (folder / "config.json").unlink(), "config.json"),
            (lambda folder: TestFailures.change_config(folder, model_type="qwen3_next"), "qwen3_next"),
            (lambda folder: TestFailures.drop_tensor(folder), "no tensor model.layers.1.self_attn.q_proj.weight"),
            (lambda folder: TestFailures.change_config(folder, head_dim=32), "which config.json asks for"),
            (lambda folder: (folder / "model-00001-of-00004.safetensors").unlink(), "model-00001-of-00004"),
            (lambda folder: (folder.parent / "out.onnx.data").write_bytes(b"x"), "half of another export"),
            (lambda folder: (folder.parent / "out.onnx").mkdir(), "OUT"),
        ],
    )
    def test_bad_inputs(
        self,
        checkpoint: Any,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        damage: Callable[[Path], object],
        what: str,
    ) -> None:
        folder = checkpoints.save(checkpoint.lm, tmp_path / "checkpoint")
        damage(folder)
        before = contents(tmp_path)
        assert cli.main(["export", str(folder), "-o", str(tmp_path / "out.onnx")]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert what in captured.err
        assert contents(tmp_path) == before

    def test_a_transformers_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers.models.qwen4_exp", None)  # as if it were not there
        with pytest.raises(MissingPackageError, match="a version without qwen4_exp"):
            requirements.check_packages()

    def test_a_missing_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["export", str(tmp_path / "absent"), "-o", str(tmp_path / "out.onnx")]) == 2
        assert "absent" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_the_checkpoint_is_not_overwritten(self, checkpoint: Any) -> None:
        before = contents(checkpoint.folder)
        for name in ("config.json", "model-00001-of-00004.safetensors"):
            with pytest.raises(InputError, match="another file than the checkpoint's"):
                export_onnx(checkpoint.folder, checkpoint.folder / name)
        assert contents(checkpoint.folder) == before

    @pytest.mark.parametrize("error", [RefusedError("x"), KeyboardInterrupt(), OSError(28, "No space left")])
    def test_a_failure_in_the_middle_keeps_what_was_there(
        self, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        from qsa_trt.exporting import weights

        output = tmp_path / "m.onnx"
        export_onnx(checkpoint.folder, output, external_data=True, **QUICK)
        before = contents(tmp_path)
        read = weights.Checkpoint.read

        def failing(self: Any, name: str, *args: Any) -> Any:
            if "o_proj" in name:
                raise error
            return read(self, name, *args)

        monkeypatch.setattr(weights.Checkpoint, "read", failing)
        with pytest.raises(BaseException, match=r"x|No space left|^$"):
            export_onnx(checkpoint.folder, output, external_data=True, dtype="fp32", **QUICK)
        assert contents(tmp_path) == before


MEMORY = """
import sys
from pathlib import Path
from qsa_trt.exporting import export_onnx

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) >> 10

export_onnx(*sys.argv[1:], dtype="bf16")  # imports, and what the tracer keeps
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
before = memory("VmRSS")
export_onnx(*sys.argv[1:], dtype="fp16")
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
class TestMemory:
    pytestmark = needs_oracle

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
    def test_memory_stays_near_one_layer(self, tmp_path: Path) -> None:
        """Three bf16 layers of 64 MiB each, in one file."""
        import torch
        from safetensors.torch import save_file

        from qsa_trt.exporting.config import hugging_face_config, load_source
        from qsa_trt.exporting.stage import Stage
        from qsa_trt.exporting.weights import RandomWeights

        config = checkpoints.config_file(
            tmp_path,
            num_hidden_layers=3,
            layer_types=["full_attention"] * 3,
            hidden_size=1024,
            num_experts=4,
            moe_intermediate_size=2560,
        )
        with torch.device("meta"):
            stage = Stage(hugging_face_config(load_source(config)), range(3))
        shapes = {name: tuple(p.shape) for name, p in stage.named_parameters()}
        layer = sum(np.prod(shape) * 2 for name, shape in shapes.items() if ".layers.0." in name) >> 20
        weights = RandomWeights(0)
        tensors = {name: weights.read(name, shape, torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path), str(tmp_path / "m.onnx")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # Of the largest weight, 5/8 of a layer, the page cache and the converted copy; the rest is for the graph.
        assert int(done.stdout) < 2 * layer, done.stdout
        assert (tmp_path / "m.onnx.data").stat().st_size > 3 * layer << 20


class TestUse:
    """What works on patched files works on these."""

    pytestmark = needs_oracle

    @needs_onnxruntime
    def test_the_data_loader_feeds_it(self, exported: Path) -> None:
        from qsa_trt.data_loader import QsaData
        from qsa_trt.onnx_model import open_session

        model = onnx.load(exported)
        data = QsaData()
        data.input_metadata = {
            v.name: (
                np.dtype(onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)),
                [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
            )
            for v in model.graph.input
        }
        session = open_session(model)
        feeds = list(data)
        assert len(feeds) == 2
        for feed in feeds:
            assert all(np.isfinite(output).all() for output in session.run(None, feed))

    @needs_onnxruntime
    def test_recording_sees_all_inputs_of_its_nodes(self, exported: Path) -> None:
        from qsa_trt.recording import PatchedSession
        from qsa_trt.reference import qsa_attention

        rope = np.zeros((1, 128, 32), np.float32)
        rope[..., :16] = 1
        session = PatchedSession(exported, batch=1, max_kv_len=128, rope=rope, record=True)
        step = session.prefill({"input_ids": np.arange(9)[None]}, [9])
        assert len(step.calls) == 2
        for call in step.calls:
            expected = qsa_attention(call.inputs, call.node.geometry).attn_output
            assert np.abs(call.attn_output - expected).max() <= 1e-5 * np.abs(expected).max()


class TestEngine:
    pytestmark: ClassVar = [*needs_oracle, *needs_rtx]

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    def test_an_engine_is_built_from_it(self, checkpoint: Any, tmp_path: Path, dtype: Any) -> None:
        from qsa_trt.building import build_engine

        export_onnx(checkpoint.folder, tmp_path / "m.onnx", dtype=dtype, layers="1", external_data=True)
        report = build_engine(tmp_path / "m.onnx", max_batch=2, max_seq_len=256, max_kv_len=512)
        assert report.engine.stat().st_size > 0
