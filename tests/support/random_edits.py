"""Random edits of `qsa_lm`, drawn by a number: some keep its answer, others may change it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qsa_plugin.contract import PoolIO
from qsa_trt.patching.graph_index import GraphIndex
from qsa_trt.patching.meaning import check_meaning
from qsa_trt.patching.plan import make_plan
from qsa_trt.patching.verify import PlainCut

from . import mutations, projections
from .graphs import add_constant, anchors_of, insert, load, node, reroute, strip_names

Edit = Callable[[onnx.ModelProto, random.Random], None]


@cache
def judged_tensors() -> tuple[str, ...]:
    """The tensors of both layers that the patcher must understand: not the mask, nor what the mask is made from."""
    index = GraphIndex(load())
    found: dict[str, None] = {}
    for plan in make_plan(index, {}, None, PoolIO.IN_PLACE).layers:
        cut = plan.cut
        assert isinstance(cut, PlainCut)
        meanings = check_meaning(index, cut, plan.attributes.geometry, plan.attributes.rotary_dims)
        found.update({t: None for t, meaning in meanings.items() if meaning.name != "mask" and index.producer(t)})
        for norm in cut.anchors.norms.values():
            inside = index.ancestors([norm.output], stop=[norm.source]) & cut.nodes
            found.update({t: None for node in sorted(inside, key=lambda n: n.position) for t in node.outputs})
    return tuple(found)


@cache
def _kept_tensors() -> tuple[str, ...]:
    """What feeds the projections, and what they make: tensors that no cut takes away."""
    model = load()
    made = [t for layer in anchors_of(model)[1] for t in layer.projections.values()]
    return (*made, *dict.fromkeys(node(model, t).input[0] for t in made))


def _judged_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    judged = set(judged_tensors())
    return [n for n in model.graph.node if judged.intersection(n.output)]


def _fresh(model: onnx.ModelProto, rng: random.Random) -> str:
    return f"edit_{len(model.graph.node)}_{rng.randrange(1 << 30)}"


def _width(model: onnx.ModelProto, tensor: str) -> int:
    return GraphIndex(model).last_dim(tensor) or 1


# --- edits that keep the answer


def renamed(model: onnx.ModelProto, rng: random.Random) -> None:
    """Every tensor but the graph's inputs and outputs has another name; names of nodes and metadata go."""
    kept = {v.name for v in (*model.graph.input, *model.graph.output)}
    makers = [*model.graph.initializer, *model.graph.node]
    old = [t for m in makers for t in (m.output if isinstance(m, onnx.NodeProto) else [m.name]) if t not in kept]
    new = {t: f"t{i}" for i, t in enumerate(rng.sample(old, len(old)))}
    strip_names(model)
    for n in model.graph.node:
        n.input[:] = [new.get(t, t) for t in n.input]
        n.output[:] = [new.get(t, t) for t in n.output]
    for tensor in model.graph.initializer:
        tensor.name = new.get(tensor.name, tensor.name)
    del model.graph.value_info[:]


def reordered(model: onnx.ModelProto, rng: random.Random) -> None:
    """Any topological order."""
    nodes, made = list(model.graph.node), {t for n in model.graph.node for t in n.output}
    del model.graph.node[:]
    readers: dict[str, list[int]] = {}
    missing = [len({t for t in n.input if t in made}) for n in nodes]
    for i, n in enumerate(nodes):
        for t in {t for t in n.input if t in made}:
            readers.setdefault(t, []).append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    while ready:
        chosen = ready.pop(rng.randrange(len(ready)))
        model.graph.node.append(nodes[chosen])
        for i in (i for t in nodes[chosen].output for i in readers.get(t, ())):
            missing[i] -= 1
            if missing[i] == 0:
                ready.append(i)


def decoys(model: onnx.ModelProto, rng: random.Random) -> None:
    """Beside the attention: a projection of the same states with a norm, a gate, a Relu and a TopK of its own."""
    tensor, name = rng.choice(_kept_tensors()), _fresh(model, rng)
    width = _width(model, tensor)
    weight = np.random.default_rng(rng.randrange(99)).standard_normal((width, 16), np.float32)
    add_constant(model, f"{name}_w", weight)
    add_constant(model, f"{name}_k", np.array([2]))
    steps = [
        ("MatMul", [tensor, f"{name}_w"]),
        ("Relu", [f"{name}_0"]),
        ("Sigmoid", [f"{name}_1"]),
        ("TopK", [f"{name}_1", f"{name}_k"]),
    ]
    previous = tensor
    for i, (op, inputs) in enumerate(steps):
        outputs = [f"{name}_{i}"] if op != "TopK" else [f"{name}_{i}", f"{name}_ids"]
        insert(model, helper.make_node(op, inputs, outputs, name=f"{name}_{op}"), after=previous)
        previous = f"{name}_{i}"
    if rng.random() < 0.5:
        model.graph.output.append(helper.make_tensor_value_info(f"{name}_2", TensorProto.FLOAT, None))


def sprinkled(model: onnx.ModelProto, rng: random.Random) -> None:
    """An Identity or a pair of casts behind some tensors."""
    for tensor in rng.sample(judged_tensors(), 12):
        if not any(tensor in n.output for n in model.graph.node):
            continue
        name = _fresh(model, rng)
        if rng.random() < 0.5:
            insert(model, helper.make_node("Identity", [tensor], [name]), after=tensor)
        else:
            insert(model, helper.make_node("Cast", [tensor], [name], to=TensorProto.FLOAT), after=tensor)
        reroute(model, tensor, name)


def constants(model: onnx.ModelProto, rng: random.Random) -> None:
    rng.choice(
        [mutations.constants_as_nodes, mutations.own_scalars, mutations.initializers_as_inputs, mutations.no_value_info]
    )(model)


def other_projections(model: onnx.ModelProto, rng: random.Random) -> None:
    """Packed, biased, quantised or Gemm projections, some of them."""
    names = rng.sample(projections.ALL, rng.randint(1, 4))
    forms = [projections.biased, projections.gemm(True), projections.gemm(False), projections.n_bits]
    forms += [projections.qdq(activations=False), projections.qdq(activations=True)]
    if rng.random() < 0.5:
        projections.as_form(rng.choice(forms), names)(model)
    else:
        projections.packed((tuple(names),), by=rng.choice(["Split", "Slice"]), bias=rng.random() < 0.5)(model)


def bare(model: onnx.ModelProto, rng: random.Random) -> None:
    strip_names(model)


# --- edits that may change the answer


def inserted(model: onnx.ModelProto, rng: random.Random) -> None:
    """One more operator on the way."""
    tensor, name = rng.choice(judged_tensors()), _fresh(model, rng)
    op = rng.choice(
        ["Neg", "Abs", "Relu", "Tanh", "Sigmoid", "Mul", "Add", "Sub", "Div", "Max", "Min", "Softmax", "Floor"]
    )
    inputs = [tensor]
    if op in ("Mul", "Add", "Sub", "Div", "Max", "Min"):
        size = rng.choice([(), (1,), (_width(model, tensor),)])
        value = np.random.default_rng(rng.randrange(99)).uniform(0.5, 2, size).astype(np.float32)
        inputs.append(add_constant(model, f"{name}_c", value))
        rng.shuffle(inputs)
    insert(model, helper.make_node(op, inputs, [name], name=name), after=tensor)
    readers = [n.output[0] for n in model.graph.node if tensor in n.input and n.output[0] != name]
    reroute(model, tensor, name, only=rng.choice([None, *readers]))


def other_operator(model: onnx.ModelProto, rng: random.Random) -> None:
    """A node computes something else from the same operands."""
    swaps = {
        "Add": ["Sub", "Mul", "Max"], "Sub": ["Add"], "Mul": ["Div", "Add"], "Div": ["Mul", "Sub"],
        "Concat": ["Concat"], "Relu": ["Abs", "Identity", "Elu"], "Neg": ["Identity", "Abs"],
        "Softmax": ["LogSoftmax", "Hardmax"],
        "ReduceSum": ["ReduceMean", "ReduceMax", "ReduceL1"], "ReduceMean": ["ReduceSum", "ReduceMax"],
    }  # fmt: skip
    nodes = [n for n in _judged_nodes(model) if n.op_type in swaps]
    chosen = rng.choice(nodes)
    if chosen.op_type == "Concat":
        chosen.input[:] = list(reversed(chosen.input))
    chosen.op_type = rng.choice(swaps[chosen.op_type])


def operands_swapped(model: onnx.ModelProto, rng: random.Random) -> None:
    chosen = rng.choice([n for n in _judged_nodes(model) if len(n.input) > 1])
    order = list(chosen.input)
    rng.shuffle(order)
    chosen.input[:] = order


def rewired(model: onnx.ModelProto, rng: random.Random) -> None:
    """A node reads another tensor that was made before it."""
    index = GraphIndex(model)
    chosen = rng.choice([n for n in index.nodes if n.output in set(judged_tensors())])
    position = rng.randrange(len(chosen.inputs))
    rank = len(index.shape(chosen.inputs[position]) or ())
    earlier = {t for n in index.nodes[: chosen.position] for t in n.outputs}
    others = [t for t in judged_tensors() if t in earlier and len(index.shape(t) or ()) == rank]
    if others:
        chosen.proto.input[position] = rng.choice(others)


def constant_changed(model: onnx.ModelProto, rng: random.Random) -> None:
    """One small constant operand is another number, in this node alone."""
    values = {t.name: t for t in model.graph.initializer}
    places = [
        (n, i)
        for n in _judged_nodes(model)
        for i, t in enumerate(n.input)
        if t in values and values[t].ByteSize() < 999
    ]
    chosen, position = rng.choice(places)
    value = numpy_helper.to_array(values[chosen.input[position]]).copy()
    changed: Any = value + rng.choice([-1, 1, 2]) if value.dtype.kind in "iu" else value * rng.choice([-1, 0.5, 2])
    chosen.input[position] = add_constant(model, _fresh(model, rng), np.asarray(changed, value.dtype))


def attribute_changed(model: onnx.ModelProto, rng: random.Random) -> None:
    """An axis, a permutation, an order, an epsilon."""
    places = [
        (n, a)
        for n in _judged_nodes(model)
        for a in n.attribute
        if a.name in ("axis", "perm", "largest", "keepdims", "num_outputs")
    ]
    _, attribute = rng.choice(places)
    if attribute.name == "perm":
        order = list(attribute.ints)
        rng.shuffle(order)
        attribute.ints[:] = order
    else:
        attribute.i = rng.choice([-2, -1, 0, 1, 2])


# --- damage, which may leave no legal graph at all


def damaged(model: onnx.ModelProto, rng: random.Random) -> None:
    """A node loses or gets an operand, loses an attribute or an output, or becomes another operator."""
    n, nodes = rng.choice(model.graph.node), model.graph.node
    damage = rng.choice(
        ["no name", "operand gone", "operand more", "weight", "attribute gone", "number", "output gone", "op"]
    )
    if damage == "op":
        n.op_type = rng.choice(nodes).op_type
    elif damage == "operand more":
        n.input.append(rng.choice(nodes).output[0])
    elif damage == "output gone" and len(n.output) > 1:
        n.output.pop()
    elif damage in ("attribute gone", "number") and n.attribute:
        attribute = rng.choice(n.attribute)
        if damage == "number":
            attribute.i = rng.choice([-9, -1, 0, 1, 99])
        else:
            n.attribute.remove(attribute)
    elif n.input:
        position = rng.randrange(len(n.input))
        if damage == "operand gone":
            del n.input[position]
        else:
            n.input[position] = "" if damage == "no name" else rng.choice(model.graph.initializer).name


NEUTRAL: dict[str, Edit] = {
    e.__name__: e for e in (renamed, reordered, decoys, sprinkled, constants, other_projections, bare)
}
CHANGING: dict[str, Edit] = {
    e.__name__: e for e in (inserted, other_operator, operands_swapped, rewired, constant_changed, attribute_changed)
}
