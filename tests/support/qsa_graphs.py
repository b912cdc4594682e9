"""Small ONNX models of QsaAttention nodes, made by hand as the patcher writes them (without its local function)."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin import contract
from qsa_plugin.contract import Geometry

SMALL = Geometry(
    num_q_heads=4,
    num_kv_heads=2,
    head_size=64,
    indexer_n_heads=2,
    indexer_head_dim=64,
    indexer_budget=64,
    indexer_compress_ratio=4,
)
ROTARY = 32
HIDDEN = 32
_NUMPY = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}

Dim = int | str


def qsa_model(
    layers: int = 1,
    *,
    geometry: Geometry = SMALL,
    surface: int = TensorProto.FLOAT16,
    domain: str = contract.ONNX_DOMAIN,
    op_type: str = contract.PLUGIN_NAME,
    plugin_attributes: bool = True,
    baked_positions: int | None = None,
    batch: Dim = "batch",
    seq: Dim = "seq",
    extra_inputs: Sequence[onnx.ValueInfoProto] = (),
    extra_nodes: Sequence[onnx.NodeProto] = (),
) -> onnx.ModelProto:
    """A residual stack of attention layers: hidden_states [batch, seq, HIDDEN] to out, with all pools as graph I/O.

    Args:
        layers: QsaAttention nodes, one after another.
        geometry: attributes of every node.
        surface: TensorProto element type of activations, pools and gammas.
        domain: domain of the node; with `op_type` it also spells Edge-LLM's form.
        op_type: type of the node.
        plugin_attributes: write `plugin_version` and `plugin_namespace`, as the patcher does.
        baked_positions: positions of a rope table that is an initializer; None leaves it a graph input.
        batch: batch dim of every tensor that has one; an int makes it static.
        seq: sequence dim.
        extra_inputs: further graph inputs.
        extra_nodes: further nodes, put in front.
    """
    rng = np.random.default_rng(7)
    dtype = _NUMPY[surface]
    pool_shape = [2, "num_pages", contract.PAGE_SIZE, geometry.num_kv_heads, geometry.pool_width]
    inputs = [
        helper.make_tensor_value_info("hidden_states", surface, [batch, seq, HIDDEN]),
        *(helper.make_tensor_value_info(f"past_key_values_{i}", surface, pool_shape) for i in range(layers)),
        helper.make_tensor_value_info("context_lengths", TensorProto.INT32, [batch]),
        helper.make_tensor_value_info("kvcache_start_index", TensorProto.INT32, ["start"]),
        helper.make_tensor_value_info("kv_page_table", TensorProto.INT32, [batch, 2, "pages_per_seq"]),
        *extra_inputs,
    ]
    initializers = [numpy_helper.from_array(np.array([0, 0, -1], np.int64), "merge_heads")]
    if baked_positions is None:
        inputs.append(
            helper.make_tensor_value_info("rope_rotary_cos_sin", TensorProto.FLOAT, [1, "max_positions", ROTARY])
        )
    else:
        table = rng.standard_normal((1, baked_positions, ROTARY)).astype(np.float32)
        initializers.append(numpy_helper.from_array(table, "rope_rotary_cos_sin"))
    nodes = list(extra_nodes)
    for i in range(layers):
        source = "hidden_states" if i == 0 else f"hidden_{i}"
        result = "out" if i == layers - 1 else f"hidden_{i + 1}"
        nodes += _layer(i, source, result, geometry, domain, op_type, plugin_attributes)
        initializers += _weights(i, geometry, dtype, rng)
    outputs = [
        helper.make_tensor_value_info("out", surface, [batch, seq, HIDDEN]),
        *(helper.make_tensor_value_info(f"present_key_values_{i}", surface, pool_shape) for i in range(layers)),
    ]
    graph = helper.make_graph(nodes, "qsa", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="qsa_graphs")


def _layer(
    i: int, source: str, result: str, geometry: Geometry, domain: str, op_type: str, plugin_attributes: bool
) -> list[onnx.NodeProto]:
    gammas = [f"{t.name}_{i}" for t in contract.INPUTS[7:]]
    extra = {"plugin_version": contract.PLUGIN_VERSION, "plugin_namespace": contract.PLUGIN_NAMESPACE}
    return [
        helper.make_node("MatMul", [source, f"qkv_weight_{i}"], [f"qkv_{i}"], name=f"qkv_proj_{i}"),
        helper.make_node("MatMul", [source, f"index_weight_{i}"], [f"index_qk_{i}"], name=f"index_qk_proj_{i}"),
        helper.make_node(
            op_type,
            [
                f"qkv_{i}",
                f"index_qk_{i}",
                f"past_key_values_{i}",
                "context_lengths",
                "rope_rotary_cos_sin",
                "kvcache_start_index",
                "kv_page_table",
                *gammas,
            ],
            [f"attn_output_{i}", f"present_key_values_{i}"],
            name=f"qsa_{i}",
            domain=domain,
            **geometry.to_attributes(),
            **(extra if plugin_attributes else {}),
        ),
        helper.make_node("Reshape", [f"attn_output_{i}", "merge_heads"], [f"merged_{i}"], name=f"merge_{i}"),
        helper.make_node("MatMul", [f"merged_{i}", f"o_weight_{i}"], [f"o_{i}"], name=f"o_proj_{i}"),
        helper.make_node("Add", [source, f"o_{i}"], [result], name=f"residual_{i}"),
    ]


def _weights(i: int, geometry: Geometry, dtype: type, rng: np.random.Generator) -> list[onnx.TensorProto]:
    def random(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((rng.standard_normal(shape) / 8).astype(dtype), f"{name}_{i}")

    def ones(name: str, width: int) -> onnx.TensorProto:
        return numpy_helper.from_array(np.ones(width, dtype), f"{name}_{i}")

    return [
        random("qkv_weight", HIDDEN, geometry.qkv_width),
        random("index_weight", HIDDEN, geometry.index_width),
        random("o_weight", geometry.num_q_heads * geometry.head_size, HIDDEN),
        ones("q_norm_gamma", geometry.head_size),
        ones("k_norm_gamma", geometry.head_size),
        ones("indexer_q_norm_gamma", geometry.indexer_head_dim),
        ones("indexer_k_norm_gamma", geometry.indexer_head_dim),
    ]
