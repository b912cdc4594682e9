"""Mutations of `qsa_lm`: small edits of layer 0 that keep the graph runnable.

Names such as `cat_9` are those of the committed model; `THROUGH` tells what each of them holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .graphs import add_constant, insert, node, reroute

Mutate = Callable[[onnx.ModelProto], object]
#: What the tensors of layer 0 hold that mutants send through another node.
THROUGH = {
    "q_proj": "linear_4", "k_proj": "linear_5", "v_proj": "linear_6", "index_qk_proj": "linear_3",
    "query": "split_split_0", "gate": "split_split_1",
    "q_heads": "view_8", "k_heads": "view_9", "v_heads": "view_10", "index_q_heads": "view_5",
    "raw_index_k": "split_with_sizes_split_1", "block_mean": "mean_3",
    "q_normed": "mul_636", "k_normed": "mul_668", "index_q_normed": "mul_326", "block_key_normed": "mul_420",
    "q_roped": "cat_7", "k_roped": "cat_9", "index_q_roped": "cat_3", "block_key": "cat_5",
    "v": "transpose_4", "k_repeated": "_unsafe_view_2", "v_repeated": "_unsafe_view_3",
    "index_products": "matmul", "rectified": "relu", "index_sum": "sum_1", "index_scores": "div_2",
    "logits": "val_738", "masked_logits": "val_739", "weights": "val_742",
    "heads_out": "scaled_dot_product_attention", "attention": "view_12", "gated": "mul_926",
    "sigmoid": "sigmoid_2", "cos": "cat_1", "sin": "cat", "key_cos": "unsqueeze_20", "block_cos": "slice_29",
    "q_first_half": "slice_43", "k_rotated": "cat_8", "q_rotated": "cat_6", "index_q_rotated": "cat_2",
    "k_cos_product": "mul_742", "k_sin_product": "mul_758",
}  # fmt: skip


def through(where: str, op: str, *constants: Any, only: str | None = None, first: bool = False, **more: Any) -> Mutate:
    """All readers of a tensor (or the maker of `only`) read op(tensor, constants) instead."""

    def mutate(model: onnx.ModelProto) -> None:
        tensor = THROUGH[where]
        names = [add_constant(model, f"mutant_{i}", np.asarray(c)) for i, c in enumerate(constants)]
        inputs = [*names, tensor] if first else [tensor, *names]
        insert(model, helper.make_node(op, inputs, ["mutant"], name="mutant_node", **more), after=tensor)
        reroute(model, tensor, "mutant", only=only)

    return mutate


def operands(output: str, *inputs: str) -> Mutate:
    """The node that makes `output` reads other tensors."""

    def mutate(model: onnx.ModelProto) -> None:
        node(model, output).input[:] = inputs

    return mutate


def becomes(output: str, op: str, **attributes: Any) -> Mutate:
    """The node that makes `output` is another operator, or has other attributes."""

    def mutate(model: onnx.ModelProto) -> None:
        changed = node(model, output)
        changed.op_type = op
        for name, value in attributes.items():
            for attribute in [a for a in changed.attribute if a.name == name]:
                changed.attribute.remove(attribute)
            changed.attribute.append(helper.make_attribute(name, value))

    return mutate


def constant(output: str, operand: int, value: Any) -> Mutate:
    """One constant operand has another value, in this node alone."""

    def mutate(model: onnx.ModelProto) -> None:
        node(model, output).input[operand] = add_constant(model, "mutant", np.asarray(value))

    return mutate


def both(*mutations: Mutate) -> Mutate:
    def mutate(model: onnx.ModelProto) -> None:
        for mutation in mutations:
            mutation(model)

    return mutate


def f32(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


S2, HALF, NEG = np.float32(2), np.float32(0.5), np.float32(-1)


# --- mutants that are more than one node


def key_theta(model: onnx.ModelProto) -> None:
    """Keys are rotated by other frequencies than queries."""
    other = add_constant(model, "other_scale", np.float32(0.7))
    frequencies = helper.make_node("Mul", ["mul_77", other], ["other_angles"])
    insert(model, frequencies, after="mul_77")
    for kind, used, product in (("Cos", "cat_1", "mul_742"), ("Sin", "cat", "mul_758")):
        axis = add_constant(model, f"axes_{kind}", np.array([0]))
        chain = [
            helper.make_node(kind, ["other_angles"], [f"k_{kind}_3d"]),
            helper.make_node("Gather", [f"k_{kind}_3d", axis], [f"k_{kind}_1"], axis=0),
            helper.make_node("Squeeze", [f"k_{kind}_1", axis], [f"k_{kind}_0"]),
            helper.make_node("Concat", [f"k_{kind}_0", f"k_{kind}_0"], [f"k_{kind}"], axis=-1),
            helper.make_node("Unsqueeze", [f"k_{kind}", "val_28"], [f"k_{kind}_heads"]),
        ]
        for before, new in zip([used, *(c.output[0] for c in chain)], chain, strict=False):
            insert(model, new, after=before)
        target = node(model, product)
        target.input[1] = f"k_{kind}_heads"


def tiled_heads(unsqueezed: str, repeated: str) -> Mutate:
    """KV head h serves query heads h, h + Hkv, ...: tile instead of repeat."""

    def mutate(model: onnx.ModelProto) -> None:
        shape = node(model, "val_677")
        insert(
            model,
            helper.make_node(
                "Concat", [shape.input[0], shape.input[2], shape.input[1], *shape.input[3:]], ["tiles"], axis=0
            ),
            after="val_677",
        )
        node(model, unsqueezed).input[1] = "val_28"
        node(model, repeated).input[1] = "tiles"

    return mutate


def tile_op(model: onnx.ModelProto) -> None:
    """The same by a Tile node."""
    repeats = add_constant(model, "repeats", np.array([1, 4, 1, 1]))
    insert(model, helper.make_node("Tile", ["cat_9", repeats], ["tiled"]), after="cat_9")
    reroute(model, "_unsafe_view_2", "tiled")


def concat_heads(model: onnx.ModelProto) -> None:
    insert(model, helper.make_node("Concat", ["transpose_4"] * 4, ["tiled"], axis=1), after="transpose_4")
    reroute(model, "_unsafe_view_3", "tiled")


def interleaved(model: onnx.ModelProto) -> None:
    """Pairs (2i, 2i + 1), taken apart by a reshape: dims are permuted before and after the rotation."""
    pairs, halves = (add_constant(model, n, np.array(v)) for n, v in (("s1", [0, 0, 0, 16, 2]), ("s2", [0, 0, 0, 32])))
    for i, (tensor, only) in enumerate((("slice_41", "q"), ("slice_45", "k"))):
        before = [
            helper.make_node("Reshape", [tensor, pairs], [f"{only}_pairs"]),
            helper.make_node("Transpose", [f"{only}_pairs"], [f"{only}_apart"], perm=[0, 1, 2, 4, 3]),
            helper.make_node("Reshape", [f"{only}_apart", halves], [f"{only}_halves"]),
        ]
        previous = tensor
        for new in before:
            insert(model, new, after=previous)
            previous = new.output[0]
        for reader in (("mul_707", "slice_43", "slice_44"), ("mul_742", "slice_47", "slice_48"))[i]:
            reroute(model, tensor, previous, only=reader)


def pairs_by_gather(model: onnx.ModelProto) -> None:
    """The key's pairs are (2i, 2i + 1): reshape to [..., 16, 2] and pick both columns."""
    shape, columns = add_constant(model, "s1", np.array([0, 0, 0, 16, 2])), ("zero", "one")
    steps = [helper.make_node("Reshape", ["slice_45", shape], ["k_pairs"])]
    for i, name in enumerate(columns):
        column = add_constant(model, name, np.array(i))
        steps.append(helper.make_node("Gather", ["k_pairs", column], [f"k_{name}"], axis=4))
    previous = "slice_45"
    for new in steps:
        insert(model, new, after=previous)
        previous = new.output[0]
    reroute(model, "slice_47", "k_zero")
    reroute(model, "slice_48", "k_one")


def sign_of_rotation(concat: str, neg: str, first: str, second: str) -> Mutate:
    """y_i = x_i*c + x_j*s: the other way round."""

    def mutate(model: onnx.ModelProto) -> None:
        node(model, neg).input[0] = first
        node(model, concat).input[:] = [second, neg]
        ordered = node(model, neg)
        model.graph.node.remove(ordered)
        position = next(i for i, n in enumerate(model.graph.node) if concat in n.output)
        model.graph.node.insert(position, ordered)

    return mutate


def gate_before(model: onnx.ModelProto) -> None:
    """sigmoid(gate) multiplies the query instead of the attention."""
    gate = node(model, "sigmoid_2")
    gate.input[0] = "split_split_1"
    shape = add_constant(model, "gate_shape", np.array([0, 0, 8, 64]))
    model.graph.node.remove(node(model, "mul_926"))
    reroute(model, "mul_926", "view_12")
    model.graph.node.remove(gate)
    insert(model, gate, after="split_split_0")
    insert(model, helper.make_node("Mul", ["split_split_0", "sigmoid_2"], ["gated_query"]), after="sigmoid_2")
    insert(model, helper.make_node("Reshape", ["gated_query", shape], ["view_8_new"]), after="gated_query")
    reroute(model, "view_8", "view_8_new")


def swap_initializers(a: str, b: str) -> Mutate:
    def mutate(model: onnx.ModelProto) -> None:
        tensors = {t.name: t for t in model.graph.initializer}
        first, second = numpy_helper.to_array(tensors[a]), numpy_helper.to_array(tensors[b])
        tensors[a].CopyFrom(numpy_helper.from_array(second.copy(), a))
        tensors[b].CopyFrom(numpy_helper.from_array(first.copy(), b))

    return mutate


def norm_before_mean(model: onnx.ModelProto) -> None:
    """Raw index keys are normed first, then averaged."""
    node(model, "pow_3").input[0] = "view_6"
    node(model, "mul_416").input[0] = "view_6"
    mean = node(model, "mean_3")
    model.graph.node.remove(mean)
    mean.input[0] = "mul_420"
    insert(model, mean, after="mul_420")
    reroute(model, "mul_420", "mean_3", only="unsqueeze_15")


def sink(model: onnx.ModelProto) -> None:
    """One more logit a row takes weight away (an attention sink)."""
    logit = add_constant(model, "sink", np.full((1, 1, 1, 1), 0.5, np.float32))
    steps = [
        helper.make_node("ReduceMax", ["val_739", "val_270"], ["row"], keepdims=1),
        helper.make_node("Mul", ["row", "val_483"], ["zeros"]),
        helper.make_node("Add", ["zeros", logit], ["sink_column"]),
        helper.make_node("Concat", ["val_739", "sink_column"], ["with_sink"], axis=-1),
    ]
    previous = "val_739"
    for new in steps:
        insert(model, new, after=previous)
        previous = new.output[0]
    reroute(model, "val_739", "with_sink", only="val_740")
    ends = add_constant(model, "sink_end", np.array([-1]))
    insert(model, helper.make_node("Slice", ["val_742", "val_35", ends, "val_270"], ["no_sink"]), after="val_742")
    reroute(model, "val_742", "no_sink", only="scaled_dot_product_attention")


def value_norm(model: onnx.ModelProto) -> None:
    """Values are normed, without a weight."""
    steps = [
        helper.make_node("Mul", ["view_10", "view_10"], ["v2"]),
        helper.make_node("ReduceMean", ["v2", "val_270"], ["v_mean"], keepdims=1),
        helper.make_node("Sqrt", ["v_mean"], ["v_rms"]),
        helper.make_node("Div", ["view_10", "v_rms"], ["v_normed"]),
    ]
    previous = "view_10"
    for new in steps:
        insert(model, new, after=previous)
        previous = new.output[0]
    reroute(model, "view_10", "v_normed", only="transpose_4")


def expose(tensor: str) -> Mutate:
    def mutate(model: onnx.ModelProto) -> None:
        model.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))

    return mutate


# --- mutants that change the form alone


def sprinkle(op: str) -> Mutate:
    """An Identity or a Cast to the same type behind every node of the layer's attention."""

    def mutate(model: onnx.ModelProto) -> None:
        inferred = {
            v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(model).graph.value_info
        }
        nodes = list(model.graph.node)
        first, last = (next(i for i, n in enumerate(nodes) if t in n.output) for t in ("linear_3", "mul_926"))
        renamed: dict[str, str] = {}
        new: list[onnx.NodeProto] = []
        for i, n in enumerate(nodes):
            n.input[:] = [renamed.get(t, t) for t in n.input]
            new.append(n)
            for output in n.output if first <= i <= last else ():
                if output and output in inferred:
                    more = {"to": inferred[output]} if op == "Cast" else {}
                    new.append(helper.make_node(op, [output], [f"{output}_x"], name=f"{output}_x", **more))
                    renamed[output] = f"{output}_x"
        del model.graph.node[:]
        model.graph.node.extend(new)

    return mutate


def other_order(model: onnx.ModelProto) -> None:
    """Another topological order: every node as late as possible."""
    nodes = list(model.graph.node)
    wanted: dict[str, int] = {}
    for n in nodes:
        for t in n.input:
            wanted[t] = wanted.get(t, 0) + 1
    ready = [n for n in nodes if not any(wanted.get(t) for t in n.output)]
    backwards = []
    while ready:
        n = ready.pop(0)
        backwards.append(n)
        for t in n.input:
            wanted[t] -= 1
        for maker in nodes:
            if maker not in backwards and maker not in ready and not any(wanted.get(t) for t in maker.output):
                ready.append(maker)
    del model.graph.node[:]
    model.graph.node.extend(reversed(backwards))


def constants_as_nodes(model: onnx.ModelProto) -> None:
    made = [helper.make_node("Constant", [], [t.name], value=t, name=f"c_{t.name}") for t in model.graph.initializer]
    nodes = list(model.graph.node)
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend([*made, *nodes])


def initializers_as_inputs(model: onnx.ModelProto) -> None:
    for t in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))


def unused_inputs(model: onnx.ModelProto) -> None:
    for name in ("position_ids", "context_lengths", "past_key_values_0"):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]))


def taken_names(model: onnx.ModelProto) -> None:
    """Tensors of the model have the names of new ones."""
    names = {
        "mul_282": "context_lengths",
        "mean_1": "kv_page_table",
        "view_13": "qsa_0/qkv",
        "silu": "present_key_values_0",
    }
    names |= {"mul_224": "qsa_0/attn_output", "view_2": "rope_rotary_cos_sin", "linear_7": "qsa_0/flat_shape"}
    for n in model.graph.node:
        n.input[:] = [names.get(t, t) for t in n.input]
        n.output[:] = [names.get(t, t) for t in n.output]
    del model.graph.value_info[:]


def no_value_info(model: onnx.ModelProto) -> None:
    del model.graph.value_info[:]


def shared_gamma(model: onnx.ModelProto) -> None:
    reroute(model, "add_822", "add_771")


def own_scalars(model: onnx.ModelProto) -> None:
    """Every node has its own copy of every small constant."""
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for i, n in enumerate(model.graph.node):
        for k, t in enumerate(n.input):
            if t in values and values[t].size <= 64:
                n.input[k] = add_constant(model, f"own_{i}_{k}", values[t])


def sliding_window(model: onnx.ModelProto) -> None:
    """Rows see the last 16 tokens alone."""
    width = add_constant(model, "window", np.array(16))
    steps = [
        helper.make_node("Sub", ["unsqueeze_8", width], ["window_start"]),
        helper.make_node("Greater", ["unsqueeze_11", "window_start"], ["in_window"]),
        helper.make_node("And", ["bitwise_and_1", "in_window"], ["windowed"]),
    ]
    previous = "bitwise_and_1"
    for new in steps:
        insert(model, new, after=previous)
        previous = new.output[0]
    reroute(model, "bitwise_and_1", "windowed")


def insert_relu(model: onnx.ModelProto) -> None:
    insert(model, helper.make_node("Relu", ["mutant"], ["relu_again"]), after="mutant")
    reroute(model, "mutant", "relu_again")
    node(model, "relu_again").input[0] = "mutant"
    node(model, "mutant").input[0] = "relu"


def reshaped_instead(output: str, *shape: int) -> Mutate:
    """A Reshape takes the place of a Transpose: tokens and heads are mixed up."""

    def mutate(model: onnx.ModelProto) -> None:
        changed = node(model, output)
        changed.op_type = "Reshape"
        del changed.attribute[:]
        changed.input.append(add_constant(model, f"shape_{output}", np.array(shape)))

    return mutate
