"""The feeds for polygraphy are legal calls of the operator: lengths, pages, padding, rope table, dtypes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qsa_plugin.contract import Mode, check_call
from qsa_plugin.errors import InputError
from qsa_trt import data_loader
from qsa_trt.data_loader import QsaData
from qsa_trt.paging import SequencePages
from tests.support.qsa_graphs import HIDDEN, ROTARY, SMALL, qsa_model

Metadata = dict[str, tuple[Any, list[Any]]]


def metadata(model: onnx.ModelProto) -> Metadata:
    """Input metadata as polygraphy's onnxruntime runner reports it."""
    baked = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: (
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
            [d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim],
        )
        for value in model.graph.input
        if value.name not in baked
    }


def feeds(model: onnx.ModelProto, loader: QsaData | None = None) -> list[dict[str, Any]]:
    loader = loader or QsaData()
    loader.input_metadata = metadata(model)
    return list(loader)


def check(feed: Mapping[str, Any]) -> Any:
    """The call that a feed makes, by the contract's own check; node inputs that are no graph inputs are filled in."""
    batch, seq, _ = feed["hidden_states"].shape
    shapes = {
        "qkv": (batch, seq, SMALL.qkv_width),
        "index_qk": (batch, seq, SMALL.index_width),
        "past_key_value": feed["past_key_values_0"].shape,
        "q_norm_gamma": (SMALL.head_size,),
        "k_norm_gamma": (SMALL.head_size,),
        "indexer_q_norm_gamma": (SMALL.indexer_head_dim,),
        "indexer_k_norm_gamma": (SMALL.indexer_head_dim,),
    }
    for name in ("context_lengths", "rope_rotary_cos_sin", "kvcache_start_index", "kv_page_table"):
        shapes[name] = feed[name].shape
    return check_call(SMALL, shapes)


def test_a_prefill_then_a_decode_step() -> None:
    prefill, decode = feeds(qsa_model(2))
    assert check(prefill).mode is Mode.PREFILL
    assert check(decode).mode is Mode.DECODE
    assert prefill["hidden_states"].shape == (2, 160, HIDDEN)
    assert decode["hidden_states"].shape == (2, 1, HIDDEN)
    assert list(prefill) == list(metadata(qsa_model(2)))


def test_dtypes_are_the_models() -> None:
    model = qsa_model()
    for feed in feeds(model):
        assert {name: array.dtype for name, array in feed.items()} == {
            name: np.dtype(dtype) for name, (dtype, _) in metadata(model).items()
        }


def test_lengths_are_ragged_and_end_inside_the_padding() -> None:
    prefill, decode = feeds(qsa_model(), QsaData(batch=3, seq_len=300))
    assert prefill["context_lengths"].tolist() == [300, 200, 100]
    assert decode["context_lengths"].tolist() == [301, 200, 100]
    assert decode["kvcache_start_index"].tolist() == [300, 199, 99]
    assert prefill["kvcache_start_index"].shape == (0,)


def test_pages_are_shuffled_live_ones_exist_and_dead_ones_are_blank() -> None:
    prefill, decode = feeds(qsa_model(), QsaData(batch=3, seq_len=300))
    table, num_pages = prefill["kv_page_table"], prefill["past_key_values_0"].shape[1]
    assert num_pages == 3 * 3 + 1
    for sequence, length in enumerate(prefill["context_lengths"]):
        assert SequencePages.of(table, sequence, SMALL.head_size).in_range(int(length), num_pages)
    live = table[table >= 0]
    assert len(set(live.tolist())) == len(live)
    assert (table[2, :, 1:] == -1).all()
    assert table[:, 0][table[:, 0] >= 0].tolist() != sorted(table[:, 0][table[:, 0] >= 0].tolist())
    assert (table[:, 1] - num_pages != table[:, 0])[table[:, 0] >= 0].any(), "K and V ids are independent"
    np.testing.assert_array_equal(decode["kv_page_table"], table)


def test_pools_are_zero_and_the_rope_table_is_one() -> None:
    for feed in feeds(qsa_model()):
        assert not feed["past_key_values_0"].any()
        table = feed["rope_rotary_cos_sin"]
        assert table.shape == (1, 256, ROTARY)
        np.testing.assert_allclose(table[..., : ROTARY // 2] ** 2 + table[..., ROTARY // 2 :] ** 2, 1, atol=1e-6)


def test_every_pass_yields_the_same() -> None:
    loader = QsaData()
    loader.input_metadata = metadata(qsa_model())
    for first, second in zip(loader, loader, strict=True):
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def test_sizes_can_be_chosen() -> None:
    loader = QsaData(
        batch=1,
        seq_len=9,
        context_length=400,
        pages_per_seq=5,
        num_pages=8,
        max_positions=512,
        modes=[Mode.DECODE],
    )
    (decode,) = feeds(qsa_model(), loader)
    call = check(decode)
    assert (call.pages_per_seq, call.num_pages, call.max_positions) == (5, 8, 512)
    assert decode["context_lengths"].tolist() == [400]


def test_static_dims_win() -> None:
    (prefill,) = feeds(qsa_model(batch=3, seq=12))
    assert prefill["hidden_states"].shape == (3, 12, HIDDEN)
    assert prefill["context_lengths"].tolist() == [12, 8, 4]
    prefill, decode = feeds(qsa_model(seq=1))
    assert (check(prefill).mode, check(decode).mode) == (Mode.PREFILL, Mode.DECODE)
    assert prefill["context_lengths"].tolist() == [1, 1]


def test_a_short_rope_table_shortens_the_sequences() -> None:
    model = qsa_model()
    rope = next(v for v in model.graph.input if v.name == "rope_rotary_cos_sin")
    rope.type.tensor_type.shape.dim[1].dim_value = 100
    prefill, decode = feeds(model)
    assert prefill["hidden_states"].shape[1] == 100
    assert decode["context_lengths"].tolist() == [100, 50]


def test_other_inputs() -> None:
    extra = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, [3, "batch", "seq"]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "seq"]),
    ]
    prefill, decode = feeds(qsa_model(extra_inputs=extra))
    assert prefill["input_ids"].shape == (2, 160)
    assert 0 <= prefill["input_ids"].min() < prefill["input_ids"].max() < data_loader.VOCABULARY
    assert prefill["position_ids"][2, 1].tolist() == list(range(160))
    assert decode["position_ids"].tolist() == [[[160], [79]]] * 3
    assert prefill["mask"].all()


def refusal(model: onnx.ModelProto, loader: QsaData | None = None) -> str:
    with pytest.raises(InputError) as error:
        feeds(model, loader)
    return str(error.value)


def test_models_that_are_not_patched_are_refused() -> None:
    model = qsa_model()
    del model.graph.input[1:]
    assert refusal(model) == (
        "model inputs: got hidden_states; expected those of a patched model; run: qsa-trt patch-onnx MODEL"
    )
    with pytest.raises(InputError, match=r"^model inputs: got none; expected those of a patched model"):
        list(QsaData())


def test_modes_that_static_dims_forbid_are_refused() -> None:
    assert refusal(qsa_model(batch=2, seq=12), data_loader.decode()) == (
        "model inputs: got B = 2, S = 12; expected dims that allow decode; "
        "take a loader function of the other mode, or export with dynamic dims"
    )


def test_inputs_of_unknown_meaning_are_refused() -> None:
    extra = helper.make_tensor_value_info("extra", TensorProto.FLOAT, ["a", "b", "c"])
    assert refusal(qsa_model(extra_inputs=[extra])) == (
        "input extra: got shape ['a', 'b', 'c']; expected at most two open dims, batch and "
        "sequence; feed it from a loader script of your own"
    )


def test_an_open_rotary_dim_is_refused() -> None:
    model = qsa_model()
    rope = next(v for v in model.graph.input if v.name == "rope_rotary_cos_sin")
    rope.type.tensor_type.shape.dim[2].dim_param = "rotary"
    assert refusal(model) == (
        "rope_rotary_cos_sin: got shape [1, 'max_positions', 'rotary']; expected a static last dim, "
        "the model's rotary dims; patch the model again"
    )


def test_bf16_is_refused() -> None:
    from polygraphy.datatype import DataType

    loader = QsaData()
    loader.input_metadata = {"past_key_values_0": (DataType.BFLOAT16, [2, "num_pages", 128, 2, 128])}
    with pytest.raises(InputError) as error:
        list(loader)
    assert str(error.value) == (
        "input past_key_values_0: got bfloat16; expected a dtype that NumPy has, since polygraphy feeds NumPy "
        "arrays; use an fp16 model"
    )


def test_the_functions_polygraphy_calls() -> None:
    assert data_loader.load_data().modes == (Mode.PREFILL, Mode.DECODE)
    assert data_loader.prefill().modes == (Mode.PREFILL,)
    assert data_loader.decode().modes == (Mode.DECODE,)


def test_the_module_prints_its_own_path() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "qsa_trt.data_loader"], check=True, capture_output=True, text=True
    ).stdout
    assert Path(printed.strip()) == Path(data_loader.__file__).resolve()
