"""The plain-op body in onnxruntime against the NumPy reference, and the form in which a model carries it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from qsa_plugin import register, tensorrt
from qsa_plugin.contract import EDGE_LLM_DOMAIN, EDGE_LLM_NAME, ONNX_DOMAIN, Geometry, Mode
from qsa_plugin.errors import InputError
from qsa_trt.metrics import BF16_TIE_BAND, FP16_TIE_BAND, row_error, tie_rows
from qsa_trt.patching.reference_body import add_reference_function, reference_function
from qsa_trt.reference import QsaResult, qsa_attention
from tests.support.cases import GEOMETRIES, INT32_MAX, REAL, SMALL, TINY, decode_step, geometry, random_inputs
from tests.support.plugin_host import error_logger
from tests.support.qsa_graphs import qsa_model
from tests.support.reference_body import SURFACES, BodyResult, bits, body_model, run_body, selection_mask
from tests.support.requirements import needs_rtx

#: fp32: only the order of sums differs. Halves: the same roundings, so a result differs where a sum's last bit tips one
#: of them; a unit in the last place of the output, and one of q, k or a weight that is not averaged away.
ERROR = {"fp32": 1e-5, "fp16": 2 * 2.0**-10, "bf16": 2 * 2.0**-7}
BAND = {"fp32": 1e-5, "fp16": FP16_TIE_BAND, "bf16": BF16_TIE_BAND}
#: One unit in the last place of a stored value.
ULP = {"fp32": 1e-5, "fp16": 2.0**-10, "bf16": 2.0**-7}
#: Head sizes, ratios and groups that the presets leave out.
MORE_GEOMETRIES = {
    "32": geometry("4/4", 32, "2x64", 32, 2),
    "64": geometry("12/1", 64, "2x64", 64, 4),
    "128": geometry("8/4", 128, "4x64", 64, 8),
    "256": geometry("6/2", 256, "4x128", 128, 4),
}


def check(inputs: dict[str, Any], geometry: Geometry, surface: str = "fp32", opset: int = 20) -> BodyResult:
    """Run body and reference, compare selection, output and pool."""
    body, expected = run_body(inputs, geometry, surface, opset), qsa_attention(inputs, geometry)
    same = same_sets(body, expected, geometry, BAND[surface])
    error = row_error(body.attn_output, expected.attn_output)  # [B, S, Hq]
    assert error[same].max(initial=0.0) <= ERROR[surface]
    check_pool(body, expected, inputs["past_key_value"], surface)
    return body


def same_sets(body: BodyResult, expected: QsaResult, geometry: Geometry, band: float) -> np.ndarray:
    """Rows [B, S] whose selection equals the reference's; others must be ties within the band, 5 % at most."""
    want = selection_mask(expected.index_lists, body.selection.shape[-1])
    same = (body.selection == want).all(-1)
    tied = np.stack([tie_rows(scores, geometry.budget_blocks, band) for scores in expected.scores])
    assert (same | tied).all()
    assert same.mean() >= 0.95
    return same


def check_pool(body: BodyResult, expected: QsaResult, past: np.ndarray, surface: str) -> None:
    """Slots that the reference leaves alone keep their bits; the others agree to one unit in the last place."""
    untouched = bits(expected.present_key_value) == bits(past)
    assert (bits(body.present_key_value) == bits(past))[untouched].all()
    got, want = (x.present_key_value[~untouched].astype(np.float64) for x in (body, expected))
    np.testing.assert_allclose(got, want, rtol=ULP[surface], atol=ULP[surface])
    if surface != "fp32":  # a missing or additional rounding would change one element in ten or more
        assert (got != want).sum() <= 2 + got.size / 1000


def prefill(geometry: Geometry, lengths: Sequence[int], **more: Any) -> dict[str, Any]:
    return random_inputs(geometry, lengths, Mode.PREFILL, **{"rng": np.random.default_rng(3), **more})


def decode(geometry: Geometry, lengths: Sequence[int], **more: Any) -> dict[str, Any]:
    return random_inputs(geometry, lengths, Mode.DECODE, **{"rng": np.random.default_rng(3), **more})


# Against the reference.


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", [*GEOMETRIES, *MORE_GEOMETRIES])
def test_ragged_batch_in_a_pool_full_of_nan(name: str, surface: str) -> None:
    geometry = (GEOMETRIES | MORE_GEOMETRIES)[name]
    lengths, dtype = [5, 150, 0, 37], SURFACES[surface][0]
    body = check(prefill(geometry, lengths, dtype=dtype, poison=True), geometry, surface)
    for row, length in enumerate(lengths):
        assert not bits(body.attn_output[row, length:]).any()  # exact zeros although the activations are NaN
    check(decode(geometry, lengths, dtype=dtype, poison=True), geometry, surface)


@pytest.mark.parametrize("length", [*range(1, 14), 127, 128, 129, 256])
def test_lengths_at_block_and_page_ends(length: int) -> None:
    check(prefill(SMALL, [length], poison=True), SMALL)
    check(decode(SMALL, [length], poison=True), SMALL)


def test_contexts_around_the_real_budget() -> None:
    check(decode(REAL, [2047, 2048, 2051, 2052, 2053], poison=True), REAL)


@pytest.mark.parametrize("rotary", [2, 8])
def test_rotary_dims_from_one_pair_to_the_whole_indexer_head(rotary: int) -> None:
    check(prefill(SMALL, [70], rotary_dims=rotary), SMALL)


@pytest.mark.parametrize("opset", [17, 18, 20, 23, 24])
def test_opsets_compute_the_same(opset: int) -> None:
    inputs = prefill(SMALL, [40, 7], dtype=np.float16, poison=True)
    body, usual = run_body(inputs, SMALL, "fp16", opset), run_body(inputs, SMALL, "fp16")
    for name, array in vars(body).items():
        assert np.array_equal(array.view(np.uint8), getattr(usual, name).view(np.uint8)), name


def test_lengths_beyond_the_activations_are_cut() -> None:
    inputs = prefill(SMALL, [20, 9])
    longer = inputs | {"context_lengths": np.array([INT32_MAX, 9], np.int32)}
    assert np.array_equal(run_body(longer, SMALL).attn_output, run_body(inputs, SMALL).attn_output)


@pytest.mark.parametrize("name", ["small", "ratio-1", "ratio-8", "multi-query"])
def test_decode_steps_equal_prefill_rows(name: str) -> None:
    geometry = GEOMETRIES[name]
    lengths, start = [70, 133], [3, 125]
    whole = prefill(geometry, lengths, spare_pages=2)
    want = run_body(whole, geometry)
    first = whole | {"context_lengths": np.array(start, np.int32)}
    first |= {n: whole[n][:, : max(start)] for n in ("qkv", "index_qk")}
    pool = run_body(first, geometry).present_key_value
    for step in range(8):
        rows = [(b, length + step) for b, length in enumerate(start)]
        tokens = (np.stack([whole[n][row] for row in rows])[:, None] for n in ("qkv", "index_qk"))
        body = run_body(decode_step(whole, pool, [t + 1 for _, t in rows], *tokens), geometry)
        pool = body.present_key_value
        for row in rows:
            assert np.array_equal(body.selection[row[0], 0], want.selection[row])
            assert row_error(body.attn_output[row[0], 0], want.attn_output[row]).max() <= ERROR["fp32"]


# Rows that the device alone can judge.


@pytest.mark.parametrize(
    ("plane", "page"),
    [(0, -1), (0, "N"), (0, INT32_MAX), (1, -1), (1, "N-1"), (1, "2N"), (1, INT32_MAX)],
)
@pytest.mark.parametrize("mode", list(Mode))
def test_a_live_page_out_of_range_silences_its_sequence_alone(mode: Mode, plane: int, page: int | str) -> None:
    inputs = random_inputs(SMALL, [140, 140], mode, rng=np.random.default_rng(3))
    pages = inputs["past_key_value"].shape[1]
    inputs["kv_page_table"][0, plane, 1] = {"N": pages, "N-1": pages - 1, "2N": 2 * pages}.get(page, page)
    body = check(inputs, SMALL)
    assert not body.attn_output[0].any()
    assert body.attn_output[1].any()


def test_decode_beyond_a_table_writes_nothing() -> None:
    for inputs in (
        decode(SMALL, [128, 100], max_positions=999) | {"context_lengths": np.array([129, 100], np.int32)},
        decode(SMALL, [128, 100], max_positions=127),  # beyond the rope table
        decode(SMALL, [128, 100]) | {"context_lengths": np.array([INT32_MAX, 100], np.int32)},
        decode(SMALL, [128, 100]) | {"context_lengths": np.array([-1, 100], np.int32)},
    ):
        body = check(inputs, SMALL)
        assert not body.attn_output[0].any()
        assert body.attn_output[1].any()
    alone = {n: inputs[n][:1] for n in ("qkv", "index_qk", "context_lengths", "kvcache_start_index", "kv_page_table")}
    body = run_body(inputs | alone, SMALL)
    assert np.array_equal(bits(body.present_key_value), bits(inputs["past_key_value"]))


@pytest.mark.parametrize(
    ("batch", "seq_len", "start"), [(2, 6, 1), (2, 6, 3), (1, 2, 1), (2, 2, 2), (1, 2, 2), (2, 1, 1), (4, 1, 2)]
)
def test_calls_that_are_neither_prefill_nor_decode_fail(batch: int, seq_len: int, start: int) -> None:
    inputs = prefill(SMALL, [seq_len] * batch) | {"kvcache_start_index": np.zeros(start, np.int32)}
    with pytest.raises(RuntimeError, match=r"(Split|Reshape) node. Name:'\w+QsaAttention_"):
        run_body(inputs, SMALL)


# Ties and NaN.


def without_rope(inputs: dict[str, Any]) -> dict[str, Any]:
    """A rope table of angle 0, under which equal raw keys make equal block keys."""
    table = np.zeros_like(inputs["rope_rotary_cos_sin"])
    table[..., : table.shape[-1] // 2] = 1
    return inputs | {"rope_rotary_cos_sin": table}


def selected_blocks(body: BodyResult, geometry: Geometry, row: int) -> list[int]:
    ratio = geometry.indexer_compress_ratio
    blocks = body.selection[0, row].reshape(-1, ratio)[: (row + 1) // ratio]
    return np.flatnonzero(blocks.all(-1)).tolist()


@pytest.mark.parametrize("geometry", [SMALL, TINY, replace(REAL, indexer_budget=64)], ids=["small", "tiny", "real"])
def test_equal_scores_give_the_lowest_ids(geometry: Geometry) -> None:
    inputs = without_rope(prefill(geometry, [251]))
    keys = inputs["index_qk"][..., -geometry.indexer_head_dim :]
    keys[:] = keys[:, :1]  # every block has the same key, and a score above 0 in most rows
    body = run_body(inputs, geometry)
    for row in range(251):
        visible = (row + 1) // geometry.indexer_compress_ratio
        assert selected_blocks(body, geometry, row) == list(range(min(geometry.budget_blocks, visible)))
    last = {n: inputs[n][:, -1:] for n in ("qkv", "index_qk")}
    step = run_body(decode_step(inputs, body.present_key_value, [251], **last), geometry)
    assert np.array_equal(step.selection[0, 0], body.selection[0, 250])


def test_zero_scores_give_the_lowest_ids() -> None:
    inputs = without_rope(prefill(SMALL, [100]))
    queries, keys = np.split(inputs["index_qk"], [-SMALL.indexer_head_dim], axis=-1)
    inputs["index_qk"] = np.concatenate([-np.abs(queries), np.abs(keys)], -1)  # every dot is below 0
    inputs["indexer_q_norm_gamma"][:] = 0
    inputs["indexer_k_norm_gamma"][:] = 0
    assert selected_blocks(run_body(inputs, SMALL), SMALL, 99) == list(range(SMALL.budget_blocks))


def test_indexer_queries_are_rounded_before_the_dot() -> None:
    """Block keys along dims 0 and 1, and a query whose two elements differ only before they are rounded to fp16."""
    inputs = without_rope(prefill(TINY, [8], dtype=np.float16))  # 2 blocks of 4, 1 in the budget
    inputs["index_qk"][:] = 0
    inputs["index_qk"][0, :4, TINY.indexer_head_dim] = 1
    inputs["index_qk"][0, 4:, TINY.indexer_head_dim + 1] = 1
    query = inputs["index_qk"][0, 7, : TINY.indexer_head_dim]
    query[:] = 1.9375  # near 2, where fp16 is fine; the norm takes it to 1, where it is coarse
    query[1] = np.nextafter(query[0], np.float16(2))
    for name in ("indexer_q_norm_gamma", "indexer_k_norm_gamma"):
        inputs[name][:] = 0
    exact = query.astype(np.float64) / np.sqrt(np.mean(query.astype(np.float64) ** 2))
    assert exact[0] < exact[1]
    assert exact[0].astype(np.float16) == exact[1].astype(np.float16)
    assert selected_blocks(check(inputs, TINY, "fp16"), TINY, 7) == [0]  # a tie


def test_nan_scores_rank_lowest_and_lower_ids_first() -> None:
    inputs = prefill(SMALL, [100])  # 25 blocks, 8 in the budget
    inputs["index_qk"][0, np.arange(0, 80), -1] = np.nan  # the keys of blocks 0 to 19
    body = check(inputs, SMALL)
    assert selected_blocks(body, SMALL, 99) == [0, 1, 2, 20, 21, 22, 23, 24]
    inputs["index_qk"][0, 99, 0] = np.nan  # the query: every score is NaN
    assert selected_blocks(check(inputs, SMALL), SMALL, 99) == list(range(8))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_reaches_the_rows_that_list_it_and_no_other(value: float) -> None:
    inputs = prefill(SMALL, [100])
    inputs["qkv"][0, 17, -1] = value  # the last value head's last element
    body = run_body(inputs, SMALL)
    listed = body.selection[0, :, 17]  # [S]
    assert 0 < listed[40:].sum() < 60
    assert np.array_equal(~np.isfinite(body.attn_output[0]).all((-1, -2)), listed)
    assert np.isfinite(body.attn_output[0, :, :2]).all()  # query heads of the other KV head


# The form in which a model carries it.


@pytest.mark.parametrize("opset", [17, 20, 23, 24])
def test_checker_and_shape_inference(opset: int) -> None:
    model = body_model(SMALL, "bf16", opset)
    onnx.checker.check_model(model, full_check=True)
    for output in model.graph.output:
        output.type.Clear()
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    types = [o.type.tensor_type for o in inferred.graph.output]
    assert [t.elem_type for t in types] == [TensorProto.BFLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL]
    assert [len(t.shape.dim) for t in types] == [4, 5, 3]


def test_the_body_is_modest_and_says_its_steps() -> None:
    function = reference_function(20)
    assert len(function.node) < 400
    assert function.ByteSize() < 40_000
    steps = list(dict.fromkeys(n.name.split("/")[0] for n in function.node if "/" in n.name))
    assert steps[:3] == ["attributes", "mode", "pages"]
    assert steps[-3:] == ["scores", "select", "attend"]


def test_layers_of_different_attributes_share_one_function() -> None:
    """Two nodes in one model, each equal to its own model; what has a default may be left out."""
    other = replace(SMALL, indexer_budget=16, attention_scale=0.1, rms_norm_eps=1e-3)
    model = body_model(SMALL)
    node = copy.deepcopy(model.graph.node[0])
    del node.attribute[:]
    for name, value in other.to_attributes().items():
        node.attribute.append(helper.make_attribute(name, value))
    node.output[:] = [f"other_{name}" for name in node.output]
    model.graph.node.append(node)
    model.graph.output.append(
        helper.make_tensor_value_info("other_attn_output", TensorProto.FLOAT, ["B", "S", "Hq", "D"])
    )
    for name in ("attention_scale", "rms_norm_eps", "pool_io", "plugin_version", "plugin_namespace"):
        first = model.graph.node[0].attribute
        first.remove(next(a for a in first if a.name == name))
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = prefill(SMALL, [60])
    outputs = session.run(["attn_output", "other_attn_output"], inputs)
    for got, geometry_of_node in zip(outputs, (SMALL, other), strict=True):
        want = qsa_attention(inputs, geometry_of_node).attn_output
        assert row_error(got, want).max() <= ERROR["fp32"]


@needs_rtx[0]
@needs_rtx[1]
def test_tensorrt_takes_the_plugin_and_not_the_body() -> None:
    model = qsa_model(2)
    add_reference_function(model)
    trt = tensorrt(register("tensorrt_rtx").flavour)
    builder = trt.Builder(error_logger())
    network = builder.create_network(0)
    assert trt.OnnxParser(network, error_logger()).parse(model.SerializeToString())
    layers = [network.get_layer(i).type for i in range(network.num_layers)]
    assert layers.count(trt.LayerType.PLUGIN_V3) == 2
    assert trt.LayerType.TOPK not in layers


def test_added_once_with_its_domain() -> None:
    graph = helper.make_graph([], "empty", [], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=7)
    for _ in range(2):
        add_reference_function(model)
    assert [(f.domain, f.name) for f in model.functions] == [("qsa", "QsaAttention")]
    assert {o.domain: o.version for o in model.opset_import} == {"": 18, ONNX_DOMAIN: 1}
    assert [(o.domain, o.version) for o in model.functions[0].opset_import] == [("", 18)]
    assert model.ir_version == 8  # the first with local functions
    add_reference_function(model, name=EDGE_LLM_NAME, domain=EDGE_LLM_DOMAIN)
    assert (model.functions[1].domain, model.functions[1].name) == ("trt_edgellm", "QsaAttentionPlugin")


@pytest.mark.parametrize("opset", [16, 25])
def test_other_opsets_are_refused(opset: int) -> None:
    model = helper.make_model(helper.make_graph([], "empty", [], []), opset_imports=[helper.make_opsetid("", opset)])
    before = model.SerializeToString()
    with pytest.raises(InputError) as error:
        add_reference_function(model)
    assert str(error.value) == (
        f"opset of the default ONNX domain: got {opset}; expected 17 to 24; "
        "export the model again with such an opset, or patch it without the reference body"
    )
    assert model.SerializeToString() == before
