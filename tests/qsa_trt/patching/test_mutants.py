"""Mutants of `qsa_lm`: each is patched to the same answer, or refused by name; never patched to another answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qsa_plugin.errors import RefusedError
from tests.support.compare import BOUND, errors
from tests.support.graphs import load, strip_names
from tests.support.mutations import (
    HALF,
    NEG,
    S2,
    Mutate,
    becomes,
    both,
    concat_heads,
    constant,
    constants_as_nodes,
    expose,
    f32,
    gate_before,
    initializers_as_inputs,
    insert_relu,
    interleaved,
    key_theta,
    no_value_info,
    norm_before_mean,
    operands,
    other_order,
    own_scalars,
    pairs_by_gather,
    reshaped_instead,
    shared_gamma,
    sign_of_rotation,
    sink,
    sprinkle,
    swap_initializers,
    taken_names,
    through,
    tile_op,
    tiled_heads,
    unused_inputs,
    value_norm,
)
from tests.support.originals import MODELS

#: Equal answers are demanded.
EQUAL: dict[str, Mutate] = {
    "untouched": lambda model: None,
    "bias of k_proj": through("k_proj", "Add", f32(128)),
    "bias of v_proj": through("v_proj", "Add", f32(128)),
    "bias of q_proj": through("q_proj", "Add", f32(1024)),
    "bias of index_qk_proj": through("index_qk_proj", "Add", f32(192)),
    "gammas of q and k swapped": swap_initializers("add_771", "add_822"),
    "gamma shared by q and k": shared_gamma,
    "scores scaled": through("logits", "Mul", S2),
    "scores scaled behind the mask": through("masked_logits", "Mul", HALF),
    "roped key scaled": through("k_roped", "Mul", S2),
    "index scores scaled": through("index_scores", "Mul", S2),
    "index scores divided by something else": constant("div_2", 1, np.float32(3)),
    "index products scaled": through("index_products", "Mul", S2),
    "index heads averaged": becomes("sum_1", "ReduceMean"),
    "budget of one layer": both(constant("topk__0", 1, np.array([8])), no_value_info),
    "unsorted TopK": becomes("topk__0", "TopK", sorted=0),
    "identities": sprinkle("Identity"),
    "casts": sprinkle("Cast"),
    "other order": other_order,
    "constants as nodes": constants_as_nodes,
    "initializers as inputs": initializers_as_inputs,
    "unused inputs": unused_inputs,
    "taken names": taken_names,
    "no value info": no_value_info,
    "own scalars": own_scalars,
}

#: Another answer, or one that the patcher cannot see to be the same, and what the refusal says where nodes have names.
REFUSED: dict[str, tuple[Mutate, str]] = {
    "bias of query": (through("query", "Add", f32(128)[:64]), "mutant_node (Add): QSA has no such step on the query"),
    "bias of q heads": (through("q_heads", "Add", f32(64)), "mutant_node (Add): QSA has no such step on the query"),
    "bias of k heads": (through("k_heads", "Add", f32(64)), "mutant_node (Add): QSA has no such step on the key"),
    "bias of v heads": (through("v_heads", "Add", f32(64)), "mutant_node (Add): QSA has no such step on the value"),
    "scalar bias of v heads": (through("v_heads", "Add", HALF), "mutant_node (Add): QSA has no such step on the value"),
    "bias of index q heads": (
        through("index_q_heads", "Add", f32(64)),
        "mutant_node (Add): index_qk_proj is not seen to hold its queries first,",
    ),
    "bias of raw index key": (
        through("raw_index_k", "Add", f32(64)),
        "mutant_node (Add): QSA has no such step on the raw index projection",
    ),
    "bias of block mean": (through("block_mean", "Add", f32(64)), "indexer_compress_ratio: the graph says nothing"),
    "bias of normed query": (
        through("q_normed", "Add", f32(64)),
        "mutant_node (Add): QSA has no such step on the query",
    ),
    "bias of roped key": (through("k_roped", "Add", f32(64)), "mutant_node (Add): QSA has no such step on the key"),
    "bias of roped index query": (
        through("index_q_roped", "Add", f32(64)),
        "mutant_node (Add): QSA has no such step on the index query",
    ),
    "bias of block key": (
        through("block_key", "Sub", f32(64)),
        "mutant_node (Sub): QSA has no such step on the block key",
    ),
    "bias of attention": (
        through("attention", "Add", f32(512)),
        "mutant_node (Add): QSA has no such step on the output of the attention",
    ),
    "bias of heads out": (
        through("heads_out", "Add", f32(64)),
        "mutant_node (Add): QSA has no such step on the output of the attention",
    ),
    "values scaled": (through("v_heads", "Mul", S2), "mutant_node (Mul): QSA has no such step on the value"),
    "values scaled by a vector": (through("v", "Mul", f32(64)), "mutant_node (Mul): QSA has no such step on the value"),
    "repeated values scaled": (
        through("v_repeated", "Mul", S2),
        "mutant_node (Mul): QSA has no such step on the value",
    ),
    "weights scaled": (
        through("weights", "Mul", S2),
        "mutant_node (Mul): QSA has no such step on the attention weights",
    ),
    "attention scaled": (
        through("attention", "Div", S2),
        "mutant_node (Div): QSA has no such step on the output of the attention",
    ),
    "normed query scaled": (through("q_normed", "Mul", S2), "mutant_node (Mul): QSA has no such step on the query"),
    "normed key scaled by a vector": (
        through("k_normed", "Mul", f32(64)),
        "rotary_dims: the graph says 32 (cosines at node_mul_707 (Mul)) and 64",
    ),
    "roped query scaled by a vector": (
        through("q_roped", "Mul", f32(64)),
        "mutant_node (Mul): QSA has no such step on the query",
    ),
    "scores scaled by head": (through("logits", "Mul", f32(8, 1, 1)), "attention_scale: the graph says nothing"),
    "scores biased by head": (
        through("logits", "Add", f32(8, 1, 1)[:, :, :]),
        "mutant_node (Add): QSA has no such step on the attention scores",
    ),
    "scores capped": (through("logits", "Tanh"), "attention_scale: the graph says nothing"),
    "scores clipped": (through("logits", "Clip", NEG, np.float32(1)), "attention_scale: the graph says nothing"),
    "scores negated": (through("logits", "Neg"), "attention_scale: the graph says nothing"),
    "softmax over queries": (
        becomes("val_740", "Softmax", axis=-2),
        "node_Softmax_740 (Softmax): QSA has no such step on the attention scores",
    ),
    "index scores negated": (through("index_scores", "Neg"), "mutant_node (Neg): QSA has no such step on scores"),
    "index scores scaled by -1": (
        through("index_scores", "Mul", NEG),
        "mutant_node (Mul): QSA has no such step on scores",
    ),
    "index heads weighted": (
        through("rectified", "Mul", np.abs(f32(2, 1, 1))),
        "mutant_node (Mul): QSA has no such step on rectified",
    ),
    "index heads biased": (
        through("index_products", "Add", f32(2, 1, 1)),
        "mutant_node (Add): QSA has no such step on products",
    ),
    "index products negated": (
        through("index_products", "Mul", NEG),
        "mutant_node (Mul): QSA has no such step on products",
    ),
    "index heads by maximum": (
        becomes("sum_1", "ReduceMax"),
        "node_sum_1 (ReduceMax): QSA has no such step on rectified",
    ),
    "index heads by squares": (
        becomes("sum_1", "ReduceSumSquare"),
        "node_sum_1 (ReduceSumSquare): QSA has no such step on rectified",
    ),
    "index without Relu": (becomes("relu", "Identity"), "node_sum_1 (ReduceSum): QSA has no such step on products"),
    "index by Abs": (becomes("relu", "Abs"), "node_relu (Abs): QSA has no such step on products"),
    "index by Softplus": (becomes("relu", "Softplus"), "node_relu (Softplus): QSA has no such step on products"),
    "Relu twice with a shift": (
        both(through("rectified", "Sub", HALF), insert_relu),
        "mutant_node (Sub): QSA has no such step on rectified",
    ),
    "index query scaled by a vector": (
        through("index_q_roped", "Mul", f32(64)),
        "mutant_node (Mul): QSA has no such step on the index query",
    ),
    "index query negated": (
        through("index_q_roped", "Neg"),
        "mutant_node (Neg): QSA has no such step on the index query",
    ),
    "block maximum": (becomes("mean_3", "ReduceMax"), "indexer_compress_ratio: the graph says nothing"),
    "norm before mean": (norm_before_mean, "indexer_compress_ratio: the graph says nothing"),
    "smallest blocks": (becomes("topk__0", "TopK", largest=0), "node_topk__1 (TopK): QSA has no such step on scores"),
    "key rotated with another theta": (
        key_theta,
        "node_mul_742 (Mul): it rotates the key by other cos values than cat_1",
    ),
    "key cosines scaled": (
        through("key_cos", "Mul", S2, only="mul_742"),
        "node_mul_742 (Mul): it rotates the key by other cos values than cat_1",
    ),
    "block key rotated at its last token": (
        both(
            constant("slice_29", 1, np.array([3])), operands("slice_31", "cat", "mutant", "val_32", "val_28", "val_388")
        ),
        "node_slice_29 (Slice): it picks other positions for the block key than the",
    ),
    "key not rotated": (
        operands("unsqueeze_22", "transpose_3", "val_111"),
        "node_Transpose_728 (Transpose): QSA has no such step on the key",
    ),
    "query not rotated": (
        operands("val_732", "transpose_2", "val_731"),
        "node_Mul_732 (Mul): QSA has no such step on the query",
    ),
    "values rotated": (operands("unsqueeze_23", "cat_9", "val_111"), "v_proj: 0 tensors leave this module"),
    "key and query rotated in pairs": (interleaved, "q_pairs (Reshape): QSA has no such step on the query"),
    "query rotated backwards": (
        sign_of_rotation("cat_6", "neg_4", "slice_43", "slice_44"),
        "node_neg_4 (Neg): QSA has no such step on the query",
    ),
    "key rotated backwards": (
        sign_of_rotation("cat_8", "neg_5", "slice_47", "slice_48"),
        "node_neg_5 (Neg): QSA has no such step on the key",
    ),
    "index query rotated backwards": (
        sign_of_rotation("cat_2", "neg_1", "slice_26", "slice_27"),
        "node_neg_1 (Neg): QSA has no such step on the index query",
    ),
    "block key rotated backwards": (
        sign_of_rotation("cat_4", "neg_3", "slice_35", "slice_36"),
        "node_neg_3 (Neg): QSA has no such step on the block key",
    ),
    "rotation with cosines and sines swapped": (
        both(operands("mul_742", "slice_45", "unsqueeze_21"), operands("mul_758", "cat_8", "unsqueeze_20")),
        "node_mul_742 (Mul): it rotates the key by other cos values than cat_1",
    ),
    "rotation subtracted": (becomes("add_961", "Sub"), "node_add_961 (Sub): QSA has no such step on k1 cos and k1 sin"),
    "rotated half at the end": (
        operands("cat_9", "slice_46", "add_961"),
        "node_cat_9 (Concat): QSA has no such step on k1 and k1 rotated",
    ),
    "keys tiled": (
        both(tiled_heads("unsqueeze_22", "expand_4"), no_value_info),
        "node_expand_4 (Expand): QSA has no such step on the key",
    ),
    "values tiled": (
        both(tiled_heads("unsqueeze_23", "expand_5"), no_value_info),
        "node_expand_5 (Expand): QSA has no such step on the value",
    ),
    "keys tiled by a Tile": (tile_op, "tiled (Tile): QSA has no such step on the key"),
    "values tiled by a Concat": (concat_heads, "tiled (Concat): QSA has no such step on the value"),
    "gate before attention": (
        gate_before,
        "gated_query (Mul): the attention does not depend on q_proj (split_split_0)",
    ),
    "gate without sigmoid": (
        becomes("sigmoid_2", "Tanh"),
        "view_7: neither half of q_proj reaches a Sigmoid (the output gate)",
    ),
    "values reordered by head": (
        through("v", "Gather", np.array([1, 0]), axis=1),
        "mutant_node (Gather): QSA has no such step on the value",
    ),
    "output reordered by head": (
        through("heads_out", "Gather", np.arange(8)[::-1].copy(), axis=1),
        "mutant_node (Gather): QSA has no such step on the output of the attention",
    ),
    "values not transposed": (
        reshaped_instead("transpose_4", 0, 2, -1, 64),
        "node_scaled_dot_product_attention (MatMul): QSA has no such step on",
    ),
    "queries not transposed": (reshaped_instead("transpose_2", 0, 8, -1, 64), "(MatMul): QSA has no such step on"),
    "output not transposed": (
        reshaped_instead("transpose_5", 0, -1, 8, 64),
        "the gate does not multiply the output of the attention",
    ),
    "scores transposed": (through("logits", "Transpose", perm=[0, 1, 3, 2]), "(Transpose): QSA has no such step on"),
    "keys shifted": (
        through("k_roped", "Pad", np.array([0, 0, 1, 0, 0, 0, -1, 0])),
        "mutant_node (Pad): QSA has no such step on the key",
    ),
    "key pairs taken apart by a reshape": (pairs_by_gather, "k_pairs (Reshape): QSA has no such step on the key"),
    "attention sink": (sink, "attention_scale: the graph says nothing"),
    "values normed without weight": (value_norm, "v2 (Mul): QSA has no such step on the value"),
    "block keys of another sequence": (
        becomes("transpose_1", "Transpose", perm=[1, 0, 3, 2]),
        "node_transpose_1 (Transpose): QSA has no such step on the block key",
    ),
    "keys not turned": (
        becomes("val_728", "Transpose", perm=[0, 1, 2]),
        "node_MatMul_738 (MatMul): QSA has no such step on q2 and k2",
    ),
    "void blocks chosen first": (
        constant("pad_1", 2, np.float32(np.inf)),
        "(Pad): QSA has no such step on scores",
    ),
    "query normed over its heads": (
        constant("mean_5", 1, np.array([2])),
        "self_attn.q_norm: no RMSNorm with a constant weight (gamma) was found there",
    ),
    "softmax as graph output": (
        expose("val_740"),
        "node_Softmax_740 (Softmax): graph output val_740 is a tensor that the cut",
    ),
}


@pytest.mark.parametrize("bare", [False, True], ids=["scopes", "structure"])
@pytest.mark.parametrize("name", EQUAL)
def test_same_answer(name: str, bare: bool, tmp_path: Path) -> None:
    model = load()
    EQUAL[name](model)
    if bare:
        strip_names(model)
    assert max(errors(model, tmp_path)) <= BOUND


@pytest.mark.parametrize("bare", [False, True], ids=["scopes", "structure"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, bare: bool, tmp_path: Path) -> None:
    model = load()
    mutate, reason = REFUSED[name]
    mutate(model)
    if bare:
        strip_names(model)
    texts = []
    for config in (None, MODELS / "qsa_lm.config.json"):  # a config settles what attributes the graph does not tell
        with pytest.raises(RefusedError) as refusal:
            pytest.fail(f"patched, error {max(errors(model, tmp_path, config=config)):.1e}")
        texts.append(str(refusal.value))
        assert texts[-1].startswith("layer ") and texts[-1].endswith("; nothing was patched")
    assert bare or reason in texts[0]  # without names, the node is called something else
