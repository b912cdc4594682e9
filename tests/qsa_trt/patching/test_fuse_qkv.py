"""`--fuse-qkv`: one product a layer, equal results, and refusals where the projections are not alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.errors import FailedError, InputError, RefusedError
from qsa_trt.comparison import validate
from qsa_trt.patching import patch_onnx
from qsa_trt.patching.files import load_model
from tests.support.forms import as_sparse_ops
from tests.support.graphs import add_constant, anchors_of, first_layer, insert, load, node, reroute, retype
from tests.support.originals import MODELS, model_path
from tests.support.requirements import needs_onnxruntime

pytestmark = needs_onnxruntime
LM = MODELS / "qsa_lm.onnx"
SMALL: dict[str, Any] = {"lengths": (50, 21), "decode_steps": 6}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "index_qk_proj")
#: (q, k, v: 8 + 2 + 2 heads of 64; index_qk: 3 of 64; gate: 8 heads of 64)
WIDTH = 12 * 64 + 3 * 64 + 8 * 64


def save(model: onnx.ModelProto, path: Path, **options: Any) -> Path:
    onnx.save(model, path, **options)
    return path


def fused(path: Path) -> list[tuple[onnx.NodeProto, ...]]:
    """(MatMul, Split, QsaAttention) of every layer of a patched file."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    makers = {output: n for n in nodes for output in n.output}
    found = []
    for attention in (n for n in nodes if n.op_type == "QsaAttention"):
        split = attention.input[0]
        while makers[split].op_type == "Cast":
            split = makers[split].input[0]
        product = makers[split].input[0]
        while makers[product].op_type == "Add":
            product = makers[product].input[0]
        found.append((makers[product], makers[split], attention))
    return found


def weights(model: onnx.ModelProto, layer: int = 0) -> list[TensorProto]:
    """The stored weights of one layer's projections, in order."""
    stored = {t.name: t for t in model.graph.initializer}
    name = f"layers.{layer}.self_attn"
    products = [
        n
        for n in model.graph.node
        if n.op_type == "MatMul" and any(name in p.value for p in n.metadata_props) and n.input[1] in stored
    ]
    by_output = {n.output[0]: stored[n.input[1]] for n in products}
    anchors = anchors_of(model)[1][layer]
    return [by_output[anchors.projections[p]] for p in PROJECTIONS]


def value(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def test_one_product_a_layer_that_splits_as_the_node_takes_it(tmp_path: Path) -> None:
    report = patch_onnx(LM, tmp_path / "f.onnx", fuse_qkv=True)
    assert report.fused_widths == (WIDTH, WIDTH)
    assert f"fused: q, k, v, index_qk and gate of a layer are one MatMul, {WIDTH} columns" in report.summary()
    plain = onnx.load(patch_onnx(LM, tmp_path / "p.onnx").output)
    model = onnx.load(report.output)
    for product, split, _ in fused(report.output):
        assert (product.op_type, split.op_type) == ("MatMul", "Split")
        assert value(model, split.input[1]).tolist() == [12 * 64, 3 * 64, 8 * 64]
        readers = [n for n in model.graph.node if product.input[0] in n.input]
        assert [n.op_type for n in readers] == ["MatMul"]  # nothing of the layer reads its input but the fused product
    products = [sum(n.op_type == "MatMul" for n in m.graph.node) for m in (model, plain)]
    assert products[0] == products[1] - 2 * 3
    kept = {t.name for t in model.graph.initializer}
    assert kept.isdisjoint(t.name for t in weights(load()))


def test_the_columns_are_those_of_the_projections(tmp_path: Path) -> None:
    model = onnx.load(patch_onnx(LM, tmp_path / "f.onnx", fuse_qkv=True).output)
    product, _, _ = fused(tmp_path / "f.onnx")[0]
    columns = value(model, product.input[1])
    q, k, v, index_qk = map(numpy_helper.to_array, weights(load()))
    halves = q.reshape(32, 8, 2, 64)
    assert np.array_equal(columns[:, :512], halves[:, :, 0].reshape(32, 512))
    assert np.array_equal(columns[:, 512:960], np.concatenate([k, v, index_qk], axis=1))
    assert np.array_equal(columns[:, 960:], halves[:, :, 1].reshape(32, 512))


@pytest.mark.parametrize(
    "name",
    [
        "qsa_lm",
        "real_layer_fp16",
        "layer-dynamo-18-eager",
        "layer-dynamo-23-sdpa",
        "layer-script-18-eager",
        "qsa2_raw",
        "qsa2_decode",
    ],
)
def test_results_are_equal(name: str, tmp_path: Path) -> None:
    patched = patch_onnx(model_path(name), tmp_path / "f.onnx", fuse_qkv=True).output
    report = validate(patched, original=model_path(name), **SMALL)
    assert report.passed, report.summary()


def test_bf16(tmp_path: Path) -> None:
    path = save(retype(load("layer-dynamo-20-sdpa"), TensorProto.FLOAT, TensorProto.BFLOAT16), tmp_path / "b.onnx")
    patched = patch_onnx(path, tmp_path / "f.onnx", fuse_qkv=True).output
    assert validate(patched, original=path, **SMALL).passed


def with_biases(names: Sequence[str]) -> onnx.ModelProto:
    """The sample, projections of its first layer with biases."""
    model, rng = load(), np.random.default_rng(3)
    anchors = first_layer()
    for name in names:
        tensor = anchors.projections[name]
        weight = next(t for t in model.graph.initializer if t.name == node(model, tensor).input[1])
        bias = add_constant(model, f"{name}.bias", rng.standard_normal(weight.dims[1]).astype(np.float32) / 4)
        insert(model, helper.make_node("Add", [tensor, bias], [f"{name}/biased"]), after=tensor)
        reroute(model, tensor, f"{name}/biased")
    return model


def test_biases_are_fused_too(tmp_path: Path) -> None:
    path = save(with_biases(PROJECTIONS), tmp_path / "m.onnx")
    patched = patch_onnx(path, tmp_path / "f.onnx", fuse_qkv=True).output
    assert validate(patched, original=path, **SMALL).passed
    first = next(n for n in onnx.load(patched).graph.node if n.output[0] == fused(patched)[0][1].input[0])
    assert first.op_type == "Add"


def test_stored_transposes(tmp_path: Path) -> None:
    """Weights [N, K] behind a Transpose, as torch stores them."""
    model = load()
    for tensor in weights(model):
        turned = numpy_helper.to_array(tensor).T
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(turned), f"{tensor.name}.T"))
        original = tensor.name.removesuffix(".T")
        model.graph.node.insert(0, helper.make_node("Transpose", [tensor.name], [original], perm=[1, 0]))
    path = save(model, tmp_path / "m.onnx")
    patched = patch_onnx(path, tmp_path / "f.onnx", fuse_qkv=True).output
    assert validate(patched, original=path, **SMALL).passed
    assert not any(n.op_type == "Transpose" and n.input[0].endswith(".T") for n in onnx.load(patched).graph.node)


class TestShared:
    """Two layers that share weights."""

    @staticmethod
    def shared(count: int) -> onnx.ModelProto:
        model = load()
        first, second = weights(model), weights(model, 1)
        for keep, drop in list(zip(first, second, strict=True))[:count]:
            reroute(model, drop.name, keep.name)
        return model

    def test_all_of_them(self, tmp_path: Path) -> None:
        path = save(self.shared(4), tmp_path / "m.onnx")
        report = patch_onnx(path, tmp_path / "f.onnx", fuse_qkv=True)
        first, second = fused(report.output)
        assert first[0].input[1] == second[0].input[1]
        assert validate(report.output, original=path, **SMALL).passed

    def test_some_of_them(self, tmp_path: Path) -> None:
        path = save(self.shared(2), tmp_path / "m.onnx")
        report = patch_onnx(path, tmp_path / "f.onnx", fuse_qkv=True)
        first, second = fused(report.output)
        assert first[0].input[1] != second[0].input[1]
        assert validate(report.output, original=path, **SMALL).passed

    def test_a_weight_that_something_else_reads_stays(self, tmp_path: Path) -> None:
        model = load()
        name = weights(model)[1].name
        model.graph.node.append(helper.make_node("Identity", [name], ["seen"]))
        model.graph.output.append(helper.make_tensor_value_info("seen", TensorProto.FLOAT, [32, 128]))
        report = patch_onnx(save(model, tmp_path / "m.onnx"), tmp_path / "f.onnx", fuse_qkv=True)
        assert f"other nodes read {name} too: the fused weights are copies of them" in report.warnings
        assert np.array_equal(value(onnx.load(report.output), name), value(load(), name))


class TestRefusals:
    """Nothing is written, and the message says which projection differs."""

    @staticmethod
    def refused(model: onnx.ModelProto, folder: Path, reason: str) -> None:
        path = save(model, folder / "m.onnx")
        with pytest.raises(RefusedError, match=reason):
            patch_onnx(path, folder / "f.onnx", fuse_qkv=True)
        assert [p.name for p in folder.iterdir()] == ["m.onnx"]
        patch_onnx(path, dry_run=True)  # without fusing the same model is fine

    @pytest.mark.parametrize("name", PROJECTIONS)
    def test_one_bias(self, name: str, tmp_path: Path) -> None:
        other = "k_proj has no bias" if name == "q_proj" else f"{name} has a bias"
        self.refused(with_biases([name]), tmp_path, f"{other}, unlike q_proj: not fused; nothing was patched")

    def test_a_projection_that_is_read_elsewhere(self, tmp_path: Path) -> None:
        model = load()
        tensor = first_layer().projections["v_proj"]
        model.graph.node.append(helper.make_node("Identity", [tensor], ["values"]))
        model.graph.output.append(helper.make_tensor_value_info("values", TensorProto.FLOAT, None))
        self.refused(model, tmp_path, "v_proj is read by more than the attention: not fused")

    def test_quantised_weights(self, tmp_path: Path) -> None:
        model = load()
        tensor = weights(model)[2]
        name, matrix = tensor.name, numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.round(matrix * 500).clip(-127, 127).astype(np.int8), f"{name}.q"))
        scale = add_constant(model, "scale", np.array(1 / 500, np.float32))
        model.graph.node.insert(0, helper.make_node("DequantizeLinear", [f"{name}.q", scale], [name]))
        self.refused(model, tmp_path, "the weight of v_proj is no stored matrix of floats: not fused")

    def test_operators_of_onnxruntime(self, tmp_path: Path) -> None:
        self.refused(as_sparse_ops(), tmp_path, "only projections of layers in plain operators are fused")

    def test_siblings_that_are_packed_already(self, tmp_path: Path) -> None:
        self.refused(
            load("qsa2_prefill-cpu"), tmp_path, "q_proj is no MatMul with a plain weight of its own: not fused"
        )

    def test_another_source(self, tmp_path: Path) -> None:
        model = load()
        product = node(model, first_layer().projections["k_proj"])
        insert(model, helper.make_node("Identity", [product.input[0]], ["copied"]), after=product.input[0])
        product.input[0] = "copied"
        self.refused(model, tmp_path, "k_proj reads copied, and q_proj reads ")


class TestExternalData:
    """Weights beside the model are read layer by layer, and what is made of them goes to a new file."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        folder = tmp_path / "source"
        folder.mkdir()
        return save(load(), folder / "lm.onnx", save_as_external_data=True, location="lm.data", size_threshold=128)

    @pytest.mark.parametrize("verify", [False, True])
    @pytest.mark.parametrize(("name", "how"), [("f.onnx", "copy"), ("../f.onnx", "reference"), ("../o/f.onnx", "copy")])
    def test_a_new_file(self, source: Path, name: str, how: Any, verify: bool) -> None:
        (source.parent.parent / "o").mkdir()
        output = Path(re.sub(r"/\w+/\.\.", "", f"{source.parent}/{name}"))
        report = patch_onnx(source, output, fuse_qkv=True, external_data=how, verify=verify)
        data = output.with_name("f.onnx.qkv.data")
        assert data.stat().st_size == 2 * 32 * WIDTH * 4
        assert f"fused weights are in {data.name}; what they were made of stays where it was" in (report.warnings)
        assert data.name in load_model(output).external
        assert validate(output, original=source, **SMALL).passed
        assert not list(output.parent.glob(".*"))

    def test_what_is_refused_leaves_the_old_result(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        output = source.with_name("f.onnx")
        patch_onnx(source, output, fuse_qkv=True)
        before = {p.name: p.read_bytes() for p in source.parent.iterdir()}
        monkeypatch.setattr("qsa_trt.comparison.row_error", lambda a, e: np.full(a.shape[:-1], 1e-3))
        with pytest.raises(FailedError, match="would differ"):
            patch_onnx(source, output, fuse_qkv=True, verify=True)
        assert {p.name: p.read_bytes() for p in source.parent.iterdir()} == before

    def test_a_full_disk_leaves_the_old_result(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        output = source.with_name("f.onnx")
        patch_onnx(source, output, fuse_qkv=True)
        before = {p.name: p.read_bytes() for p in source.parent.iterdir()}

        def full(self: Path, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(FailedError, match="No space left on device; nothing was written"):
            patch_onnx(source, output, fuse_qkv=True)
        assert {p.name: p.read_bytes() for p in source.parent.iterdir()} == before

    def test_the_new_file_may_not_be_the_old_weights(self, source: Path) -> None:
        data = source.with_name("lm.data").rename(source.with_name("f.onnx.qkv.data"))
        model = onnx.load(source, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = data.name if entry.key == "location" else entry.value
        source.write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match="expected another file than MODEL and its external data"):
            patch_onnx(source, source.with_name("f.onnx"), fuse_qkv=True)

    def test_a_dry_run_writes_nothing(self, source: Path) -> None:
        report = patch_onnx(source, fuse_qkv=True, dry_run=True)
        assert report.fused_widths == (WIDTH, WIDTH)
        assert sorted(p.name for p in source.parent.iterdir()) == ["lm.data", "lm.onnx"]
