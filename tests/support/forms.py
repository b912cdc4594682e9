"""Other forms of the attention of `qsa_lm`, made from its plain one: the answers of both must be equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from qsa_plugin.contract import Geometry, PoolIO
from qsa_trt.patching.anchors import NORMS, Anchors
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.patching.plan import make_plan
from qsa_trt.patching.verify import PlainCut
from qsa_trt.rope import rope_table

from .graphs import add_constant, load
from .originals import Original

POSITIONS = 256
MICROSOFT = "com.microsoft"


def as_sparse_ops(revision: str = "new", *, packed: bool = False) -> onnx.ModelProto:
    """`qsa_lm` with `SparseAttentionIndexer` and `DynamicSparseAttention`, as onnxruntime-genai writes them.

    Args:
        revision: `new`, raw projections packed; `split`, raw projections apart; `old`, queries that are normed before.
        packed: query, key and value packed into one tensor.
    """
    model = load()
    index = GraphIndex(model)
    table = rope_table(POSITIONS, Original("qsa_lm").inv_freq)[0]
    half = table.shape[1] // 2
    add_constant(model, "cos_cache", table[:, :half].copy())
    add_constant(model, "sin_cache", table[:, half:].copy())
    for name, value in {
        "minus_1": np.array([-1]), "flat": np.array([0, 0, -1]), "zero_i": np.array(0, np.int32),
        "one_i": np.array(1, np.int32), "axis_0": np.array([0]), "ones_11": np.array([1, 1]),
    }.items():  # fmt: skip
        add_constant(model, name, value)
    shared = [
        helper.make_node("Cast", ["attention_mask"], ["mask_i"], to=TensorProto.INT32),
        helper.make_node("ReduceSum", ["mask_i", "minus_1"], ["mask_sum"], keepdims=0),
        helper.make_node("Sub", ["mask_sum", "one_i"], ["seqlens_k"]),
        helper.make_node("Shape", ["attention_mask"], ["total_64"], start=1, end=2),
        helper.make_node("Cast", ["total_64"], ["total_length"], to=TensorProto.INT32),
        helper.make_node("Shape", ["input_ids"], ["batch_64"], start=0, end=1),
        helper.make_node("Concat", ["batch_64", "ones_11"], ["repeats"], axis=0),
    ]
    model.graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "seq"]))
    nodes, inserted = list(model.graph.node), dict[int, list[onnx.NodeProto]]({0: shared})
    for number, plan in enumerate(make_plan(index, {}, None, PoolIO.IN_PLACE).layers):
        cut = plan.cut
        assert isinstance(cut, PlainCut)
        layer = _Pair(model, number, cut.anchors, plan.attributes.geometry)
        output = layer.attention(layer.indexer(revision), packed)
        inserted[cut.reader.position] = layer.nodes
        reader = nodes[cut.reader.position]
        reader.input[:] = [output if t == cut.attention else t for t in reader.input]
    del model.graph.node[:]
    for position, node in enumerate(nodes):
        model.graph.node.extend([*inserted.get(position, []), node])
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return drop_dead(model)


class _Pair:
    """The nodes of one layer."""

    def __init__(self, model: onnx.ModelProto, number: int, anchors: Anchors, geometry: Geometry) -> None:
        self.model, self.number, self.anchors, self.geometry = model, number, anchors, geometry
        self.nodes: list[onnx.NodeProto] = []
        self.gammas = {name: anchors.norms[name].gamma for name in NORMS}
        self.element = TensorProto.FLOAT

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        name = f"/model/layers.{self.number}/attn/{output}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def cache(self, kind: str, shape: Sequence[int | str]) -> tuple[str, str]:
        """A dense cache among the graph's inputs and outputs."""
        past, present = f"past_key_values.{self.number}.{kind}", f"present.{self.number}.{kind}"
        graph = self.model.graph
        graph.input.append(helper.make_tensor_value_info(past, self.element, [*shape]))
        graph.output.append(
            helper.make_tensor_value_info(present, self.element, ["batch", *shape[1:-2], "total", shape[-1]])
        )
        return past, present

    def indexer(self, revision: str) -> str:
        g, index_qk = self.geometry, self.anchors.projections["index_qk_proj"]
        past, present = self.cache("indexer_key", ["batch", "past", g.indexer_head_dim])
        q_gamma, k_gamma = self.gammas["indexer_q_norm"], self.gammas["indexer_k_norm"]
        inputs = [index_qk, "", q_gamma, k_gamma, "cos_cache", "sin_cache", "attention_mask", past]
        if revision != "new":
            sizes = np.array([g.indexer_n_heads * g.indexer_head_dim, g.indexer_head_dim])
            parts = [f"/model/layers.{self.number}/attn/indexer/{part}" for part in ("query", "key")]
            name = add_constant(self.model, f"index_sizes_{self.number}", sizes)
            self.nodes.append(helper.make_node("Split", [index_qk, name], parts, axis=-1))
            inputs[:2] = parts
        if revision == "old":
            heads = add_constant(
                self.model, f"heads_{self.number}", np.array([0, 0, g.indexer_n_heads, g.indexer_head_dim])
            )
            four = self.add("Reshape", [inputs[0], heads], "indexer/query/Reshape")
            normed = self.add(
                "SimplifiedLayerNormalization", [four, q_gamma], "indexer/norm", axis=-1, epsilon=1e-6, stash_type=1
            )
            tables = []
            for table in ("cos_cache", "sin_cache"):
                row = self.add("Unsqueeze", [table, "axis_0"], f"indexer/{table}/Unsqueeze")
                tables.append(self.add("Tile", [row, "repeats"], f"indexer/{table}/Tile"))
            inputs = [normed, inputs[1], k_gamma, *tables, "attention_mask", past]
        selected = f"/model/layers.{self.number}/attn/SparseAttentionIndexer/output_0"
        self.nodes.append(
            helper.make_node(
                "SparseAttentionIndexer", inputs, [selected, present], name=selected.removesuffix("/output_0"),
                domain=MICROSOFT, policy_mode="qsa", compress_ratio=g.indexer_compress_ratio,
                token_budget=g.indexer_budget, epsilon=1e-6, scale=g.indexer_head_dim**-0.5,
            )
        )  # fmt: skip
        return selected

    def attention(self, selected: str, packed: bool) -> str:
        g, projections = self.geometry, self.anchors.projections
        valid = self.add("GreaterOrEqual", [selected, "zero_i"], "valid")
        counted = self.add("Where", [valid, "one_i", "zero_i"], "counted")
        counts = self.add("ReduceSum", [counted, "minus_1"], "counts", keepdims=0)
        width = add_constant(self.model, f"width_{self.number}", np.array([-1, g.list_width]))
        choice = [self.add("Reshape", [selected, width], "Flatten"), self.add("Reshape", [counts, "minus_1"], "Counts")]
        query = self.add("Reshape", [self.anchors.gate.query, "flat"], "query")
        qkv = [query, projections["k_proj"], projections["v_proj"]]
        if packed:
            qkv = [self.add("Concat", qkv, "qkv", axis=-1), "", ""]
        caches = [self.cache(kind, ["batch", g.num_kv_heads, "past", g.head_size]) for kind in ("key", "value")]
        name = f"/model/layers.{self.number}/attn/DynamicSparseAttention"
        self.nodes.append(
            helper.make_node(
                "DynamicSparseAttention",
                [*qkv, caches[0][0], caches[1][0], "", "", *choice, "seqlens_k", "total_length",
                 "cos_cache", "sin_cache", "position_ids", self.gammas["q_norm"], self.gammas["k_norm"], ""],
                [f"{name}/output_0", caches[0][1], caches[1][1]], name=name, domain=MICROSOFT,
                num_heads=g.num_q_heads, kv_num_heads=g.num_kv_heads, scale=g.scale, is_causal=1,
                attention_mode="selected_only", selected_kv_source="main", do_rotary=1, rotary_interleaved=0,
                qk_norm_epsilon=1e-6,
            )
        )  # fmt: skip
        self.model.graph.value_info.append(
            helper.make_tensor_value_info(
                f"{name}/output_0", self.element, ["batch", "seq", g.num_q_heads * g.head_size]
            )
        )
        return f"{name}/output_0"


def drop_dead(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the nodes that no output depends on, in place."""
    index = GraphIndex(model)
    live = [node.proto for node in index.nodes if node in index.live]
    del model.graph.node[:]
    model.graph.node.extend(live)
    return model
