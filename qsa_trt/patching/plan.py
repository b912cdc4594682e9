"""Everything that is decided about a model before anything in it is changed."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from qsa_plugin.contract import PoolIO

from . import sparse_ops
from .anchors import refuse
from .attributes import Attributes, read_attributes
from .bodies import check_bodies
from .config import Config
from .cut import Cut
from .detect import find_layers
from .graph_index import GraphIndex
from .layout import check_layout
from .meaning import check_meaning
from .rewrite import LayerPlan
from .rope_source import check_one_rope
from .verify import PlainCut, cache_outputs, check_coverage, check_layer

TYPES: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16, "fp32": TensorProto.FLOAT}
TYPE_NAMES = {elem_type: name for name, elem_type in TYPES.items()}


@dataclass(frozen=True)
class Plan:
    """The layers that become nodes, in graph order, and the graph outputs that held their dense caches."""

    layers: list[LayerPlan]
    cache_outputs: tuple[str, ...]


def make_plan(index: GraphIndex, config: Config, dtype: str | None, pool_io: PoolIO) -> Plan:
    """Find the layers of a model and check that all of them can be cut.

    Args:
        index: the model.
        config: its config; empty when none is given.
        dtype: element type at the nodes, a key of `TYPES`; None as `patch_onnx` says.
        pool_io: the node attribute of that name.

    Raises:
        RefusedError: there is no layer, or one that cannot be cut safely.
    """
    check_bodies(index)
    layers = sparse_ops.find_layers(index, config, pool_io)
    plain = [] if layers else [check_layer(index, anchors) for anchors in find_layers(index)]
    cuts = [*plain, *(cut for cut, _ in layers)]
    check_coverage(index, cuts)
    caches = cache_outputs(index, cuts)
    layers += [(cut, plain_attributes(index, cut, config, pool_io)) for cut in plain]
    plans: list[LayerPlan] = []
    for number, (cut, attributes) in enumerate(layers):
        plan = LayerPlan(number, cut, attributes, *_element_types(index, cut, dtype))
        if attributes.rotary_dims != (plans or [plan])[0].attributes.rotary_dims:
            refuse(cut.layer, "rotary_dims", "differs from the first layer's; one rope table serves all layers")
        plans.append(plan)
    check_one_rope(index, cuts, plans[0].attributes.rotary_dims)
    return Plan(plans, caches)


def plain_attributes(index: GraphIndex, cut: PlainCut, config: Config, pool_io: PoolIO) -> Attributes:
    """What the plain operators of a layer say, once they are seen to be QSA and nothing else."""
    attributes = read_attributes(index, cut, config, pool_io)
    check_layout(index, cut, attributes.geometry)
    check_meaning(index, cut, attributes.geometry, attributes.rotary_dims)
    return attributes


def _element_types(index: GraphIndex, cut: Cut, dtype: str | None) -> tuple[int, int]:
    """Element types of the layer's activations in the graph and at the node."""
    key = cut.qkv[-1]
    graph_type = index.elem_type(key)
    if graph_type not in TYPE_NAMES:
        refuse(cut.layer, key, "its element type is not known to be float, float16 or bfloat16")
    if dtype is not None:
        return graph_type, TYPES[dtype]
    return graph_type, TensorProto.FLOAT16 if graph_type == TensorProto.FLOAT else graph_type
