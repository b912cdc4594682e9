"""Every form of the projections: packed, biased, as Gemm, quantised. They stay, and the answer is equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from qsa_plugin.errors import RefusedError
from qsa_trt.metrics import row_error
from qsa_trt.patching.linear import behind
from qsa_trt.recording import PatchedSession, open_session
from tests.support.compare import BOUND, errors, feeds, patch
from tests.support.graphs import anchors_of, load, strip_names
from tests.support.mutations import Mutate
from tests.support.originals import Original
from tests.support.projections import (
    ALL,
    as_form,
    biased,
    dynamic_int8,
    gemm,
    n_bits,
    packed,
    qdq,
    quantised_key,
)

FORMS: dict[str, Mutate] = {
    "all packed": packed(),
    "packed in another order": packed((("v_proj", "index_qk_proj", "k_proj", "q_proj"),)),
    "q, k, v packed": packed((("q_proj", "k_proj", "v_proj"),)),
    "k, v packed": packed((("k_proj", "v_proj"),)),
    "index with k": packed((("k_proj", "index_qk_proj"),)),
    "two packs": packed((("q_proj", "index_qk_proj"), ("v_proj", "k_proj"))),
    "packed, taken apart by slices": packed(by="Slice"),
    "k, v taken apart by slices": packed((("k_proj", "v_proj"),), by="Slice"),
    "packed with a bias": packed(bias=True),
    "biases": as_form(biased),
    "bias of one": as_form(biased, ("k_proj",)),
    "Gemm": as_form(gemm(bias=False)),
    "Gemm with biases": as_form(gemm(bias=True)),
    "Gemm for some": as_form(gemm(bias=True), ("index_qk_proj", "v_proj")),
    "int8 weights": as_form(qdq(activations=False)),
    "int8 weights and activations": as_form(qdq(activations=True)),
    "4 bits": as_form(n_bits),
    "4 bits for some": as_form(n_bits, ("q_proj", "k_proj")),
}


@pytest.mark.parametrize("name", FORMS)
def test_same_answer(name: str, tmp_path: Path) -> None:
    model = load()
    FORMS[name](model)
    assert max(errors(model, tmp_path)) <= BOUND


def by_form(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    as_form(dynamic_int8)(model)
    return model


def by_quantize_dynamic(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Every MatMul with a weight, the experts' and the router's too."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8)
    return onnx.load(folder / "int8.onnx")


def by_n_bits_quantizer(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
    quantizer.process()
    return quantizer.model.model


@pytest.mark.parametrize("quantise", [by_form, by_quantize_dynamic, by_n_bits_quantizer])
def test_same_answer_after_quantisers(
    quantise: Callable[[onnx.ModelProto, Path], onnx.ModelProto], tmp_path: Path
) -> None:
    """Dynamic int8 follows the largest value of all tokens of a call: only calls of equal tokens are equal."""
    model = quantise(load(), tmp_path)
    tokens = Original("qsa_lm").tokens(np.random.default_rng(0), 1, 90)
    expected = open_session(model).run(["logits"], feeds(model, tokens["input_ids"], np.array([90])))[0]
    rope = Original("qsa_lm").rope(90)
    session = PatchedSession(patch(model, tmp_path, dtype="fp32").output, batch=1, max_kv_len=90, rope=rope)
    assert row_error(session.prefill(tokens, [90]).outputs["logits"], expected).max() <= BOUND


@pytest.mark.parametrize("name", FORMS)
def test_projections_are_kept(name: str, tmp_path: Path) -> None:
    """What makes the projections' outputs is the same before and after."""
    model = strip_names(load())
    FORMS[name](model)
    index, layers = anchors_of(model)
    report = patch(model, tmp_path)
    assert [layer.strategy for layer in report.layers] == ["structure"] * 2
    assert [layer.geometry.index_width for layer in report.layers] == [192, 192]
    patched = {n.output[0]: n for n in onnx.load(report.output).graph.node}
    for layer in layers:
        for name in ALL:
            for maker in behind(index, layer.projections[name]):
                assert patched[maker.output] == maker.proto


def test_biases_are_reported(tmp_path: Path) -> None:
    model = load()
    as_form(biased, ("k_proj", "v_proj"))(model)
    report = patch(model, tmp_path)
    assert [layer.biases for layer in report.layers] == [("k_proj", "v_proj")] * 2
    assert "  biases stay in the graph: k_proj, v_proj" in report.summary().splitlines()


def test_quantisation_inside_the_attention_is_refused(tmp_path: Path) -> None:
    model = load()
    quantised_key(model)
    with pytest.raises(RefusedError, match=r"kq \(QuantizeLinear\): QSA has no such step on the key; nothing was"):
        patch(model, tmp_path)
