"""Strategy: onnxruntime's own operators, `SparseAttentionIndexer` with `DynamicSparseAttention` (com.microsoft).

onnxruntime-genai writes the indexer in two revisions: the schema of onnxruntime 1.32 takes raw projections, an older
one takes queries that are normed already. The operators' attributes tell everything; nothing is read from structure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsa_plugin.contract import PoolIO
from qsa_plugin.errors import RefusedError

from .anchors import NORMS, refuse
from .attributes import Attributes, Finding, settle
from .config import Config
from .cut import Cut
from .graph_index import GraphIndex, Node
from .norms import find_norms

NAME = "com.microsoft operators"
INDEXER, ATTENTION = "SparseAttentionIndexer", "DynamicSparseAttention"
_TOKEN_PACKED = frozenset({"PackedSparseAttentionIndexer", "SparsePagedAttention"})
#: Inputs of the attention by position; the first three hold everything packed where the others are left out.
_QUERY, _KEY, _VALUE, _SELECTED, _COUNTS, _COS, _SIN, _Q_GAMMA, _K_GAMMA = 0, 1, 2, 7, 8, 11, 12, 14, 15
_REFUSED_INPUTS = {5: "auxiliary_key", 6: "auxiliary_value", 16: "head_sink", 18: "key_scale", 19: "value_scale"}
#: What the attention's attributes must say, with the default of each.
_REQUIRED = {
    "attention_mode": (b"selected_only", b"selected_only"),
    "selected_kv_source": (b"main", b"main"),
    "is_causal": (1, 1),
    "do_rotary": (1, 0),
    "rotary_interleaved": (0, 0),
    "rotary_offset": (0, 0),
    "smooth_softmax": (0, 0),
    "output_bf16": (0, 0),
}
#: Between the indexer's choice and the attention: views of it, and the count of its entries that are no padding.
_CHOICE_OPS = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Cast", "Identity", "GreaterOrEqual", "Greater", "Less", "Not", "Where"}
    | {"ReduceSum"}
)
_VIEWS = frozenset({"Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze"})
_TABLE_VIEWS = _VIEWS | {"Tile", "Expand", "Concat"}


@dataclass(frozen=True)
class _Indexer:
    """The parts of either revision."""

    node: Node
    sources: tuple[str, ...]  # raw [B, S, ...]
    gammas: tuple[str, str]
    cos: str
    sin: str
    #: Epsilons of its norms.
    eps: tuple[Finding, ...]
    #: Nodes in front of it that are part of it: the norm of the older revision.
    nodes: frozenset[Node]


def find_layers(index: GraphIndex, config: Config, pool_io: PoolIO) -> list[tuple[Cut, Attributes]]:
    """The layers made of these operators, in graph order.

    Raises:
        RefusedError: one is token-packed, does something that QSA does not, or has readers that need a cut tensor.
    """
    nodes = [node for node in index.nodes if node in index.live]
    for node in nodes:
        if node.op in _TOKEN_PACKED:
            raise RefusedError(
                f"node {node.label}: the token-packed form (com.microsoft::{node.op}) lays the tokens of all sequences"
                " along one axis, and QsaAttention takes [batch, sequence]; export the model without paged attention"
            )
    layers = [_layer(index, node, config, pool_io) for node in nodes if node.op == ATTENTION]
    taken = {node for cut, _ in layers for node in cut.nodes}
    for node in nodes:
        if node.op == INDEXER and node not in taken:
            refuse("unknown", node, f"no {ATTENTION} reads its choice, and a model is patched whole")
    for cut, _ in layers:
        if cut.rope != layers[0][0].rope:
            refuse(cut.layer, " and ".join(cut.rope or ()), "its tables differ from the first layer's; a model has one")
    return layers


def _layer(index: GraphIndex, node: Node, config: Config, pool_io: PoolIO) -> tuple[Cut, Attributes]:
    layer = (node.proto.name or node.output).strip("/").rpartition("/")[0].replace("/", ".") or node.label
    _check_attention(layer, node)
    indexer, choice = _indexer_of(index, layer, node)
    qkv = (_input(node, _QUERY), _input(node, _KEY), _input(node, _VALUE))
    if bool(qkv[1]) != bool(qkv[2]):
        refuse(layer, node, "it has a key without a value, or a value without a key")
    gammas = (_input(node, _Q_GAMMA), _input(node, _K_GAMMA), *indexer.gammas)
    nodes = frozenset({node, indexer.node}) | indexer.nodes | choice
    readers = index.readers(node.output)
    if len(readers) != 1 or node.output in index.outputs:
        refuse(layer, node, f"its output has {len(readers)} readers; one was expected")
    ends = [t for t in (*qkv, *indexer.sources) if t]
    cut = Cut(
        layer=layer,
        strategy=NAME,
        qkv=tuple(t for t in qkv if t),
        index_qk=indexer.sources,
        gammas=dict(zip(NORMS, gammas, strict=True)),
        attention=node.output,
        reader=readers[0],
        nodes=nodes,
        sides=frozenset(index.ancestors([node.output], stop=ends) - nodes),
        rope=(_input(node, _COS), _input(node, _SIN)),
    )
    _check_tables(index, layer, node, indexer)
    attributes = _attributes(index, cut, node, indexer, config, pool_io)
    _check_widths(index, cut, attributes)
    return cut, attributes


def _input(node: Node, position: int) -> str:
    return node.inputs[position] if position < len(node.inputs) else ""


def _check_attention(layer: str, node: Node) -> None:
    for position, name in _REFUSED_INPUTS.items():
        if _input(node, position):
            refuse(layer, node, f"it has the input {name}, which QSA does not have")
    for name, (wanted, default) in _REQUIRED.items():
        value = node.attribute(name, default)
        if value != wanted:
            spelled = [v.decode() if isinstance(v, bytes) else v for v in (name, value, wanted)]
            refuse(layer, node, "its {} is {}; QSA needs {}".format(*spelled))
    for position, name in ((_Q_GAMMA, "q_norm_weight"), (_K_GAMMA, "k_norm_weight"), (_COS, "cos_cache")):
        if not _input(node, position):
            refuse(layer, node, f"it lacks the input {name}")


def _indexer_of(index: GraphIndex, layer: str, node: Node) -> tuple[_Indexer, frozenset[Node]]:
    """The indexer whose choice the attention reads, and the nodes between both."""
    found: set[Node] = set()
    between: set[Node] = set()
    stack = [_input(node, _SELECTED), _input(node, _COUNTS)]
    while stack:
        tensor = stack.pop()
        maker = index.producer(tensor)
        if index.is_constant(tensor) or maker in between:
            continue
        if maker is None:
            refuse(layer, node, f"its choice comes from {tensor}, which no {INDEXER} makes")
        if maker.op == INDEXER and tensor == maker.output:
            found.add(maker)
        elif maker.op in _CHOICE_OPS:
            between.add(maker)
            stack += maker.reads
        else:
            refuse(layer, maker, f"it changes the indexer's choice on its way to {ATTENTION}")
    if len(found) != 1:
        refuse(layer, node, f"its choice comes from {len(found)} {INDEXER} nodes; one was expected")
    indexer = found.pop()
    if indexer.attribute("policy_mode") != b"qsa":
        refuse(layer, indexer, "its policy_mode is not qsa")
    if not indexer.attribute("scale", 1.0) > 0:
        refuse(layer, indexer, "its scale is not positive, which reverses the order of blocks")
    return _read_indexer(index, layer, indexer), frozenset(between)


def _read_indexer(index: GraphIndex, layer: str, node: Node) -> _Indexer:
    """Tell the revisions apart: seven inputs at most in the older one, whose past key stands at position 6."""
    own = Finding(float(node.attribute("epsilon", 1e-6)), f"epsilon of {node.label}")
    if len(node.inputs) > 7:
        query, key, q_gamma, k_gamma, cos, sin = node.inputs[:6]
        sources = (query, key) if key else (query,)
        return _Indexer(node, _joined(index, sources), (q_gamma, k_gamma), cos, sin, (own,), frozenset())
    if len(node.inputs) < 7:
        refuse(layer, node, f"it has {len(node.inputs)} inputs; no revision of {INDEXER} that is known has so few")
    query, key, k_gamma, cos, sin = node.inputs[:5]
    norm = next((n for n in find_norms(index) if n.output == index.back(query, _VIEWS)), None)
    if norm is None:
        refuse(layer, node, "no RMSNorm with a constant weight (gamma) is in front of its queries")
    raw = index.back(norm.source, _VIEWS)
    nodes = index.descendants([raw], follow=index.ancestors([query], stop=[raw]).__contains__)
    eps = (own, Finding(norm.eps, f"epsilon at {norm.node.label}"))
    return _Indexer(
        node, _joined(index, (raw, index.back(key, _VIEWS))), (norm.gamma, k_gamma), cos, sin, eps, frozenset(nodes)
    )


def _joined(index: GraphIndex, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The tensor that was split into exactly these parts along its last axis, else the parts."""
    maker = index.producer(parts[0])
    if len(parts) > 1 and maker is not None and maker.op == "Split" and tuple(maker.outputs) == parts:
        shape = index.shape(maker.inputs[0])
        if maker.attribute("axis", 0) in (-1, len(shape or ()) - 1):
            return (maker.inputs[0],)
    return parts


def _check_tables(index: GraphIndex, layer: str, node: Node, indexer: _Indexer) -> None:
    """Attention and indexer rotate with the same tables."""
    for name, main, other in (("cos", _COS, indexer.cos), ("sin", _SIN, indexer.sin)):
        if index.back(_input(node, main), _TABLE_VIEWS) != index.back(other, _TABLE_VIEWS):
            refuse(layer, indexer.node, f"its {name}_cache is not the one that {node.label} rotates with")


def _attributes(
    index: GraphIndex, cut: Cut, node: Node, indexer: _Indexer, config: Config, pool_io: PoolIO
) -> Attributes:
    sizes: dict[str, int] = {}
    for name, gamma in cut.gammas.items():
        value = index.constant(gamma)
        if value is None or value.ndim != 1:
            refuse(cut.layer, gamma or node, f"the weight of {name} is not a constant vector")
        sizes[name] = value.size
    if sizes["q_norm"] != sizes["k_norm"] or sizes["indexer_q_norm"] != sizes["indexer_k_norm"]:
        refuse(cut.layer, node, f"its norm weights have different sizes: {', '.join(map(str, sizes.values()))}")
    exact = 1 / math.sqrt(sizes["q_norm"])
    index_width = _width(index, cut.index_qk)
    if index_width is None:
        refuse(cut.layer, indexer.node, "the width of its queries and key is not known")
    rotary = index.last_dim(_input(node, _COS))
    if rotary is None:
        refuse(cut.layer, node, "the width of its cos_cache is not known")
    eps = float(node.attribute("qk_norm_epsilon", 1e-6))
    found: Mapping[str, Sequence[Finding]] = {
        "num_q_heads": _stated(node, "num_heads"),
        "num_kv_heads": _stated(node, "kv_num_heads"),
        "head_size": [Finding(sizes["q_norm"], f"size of {cut.gammas['q_norm']}")],
        "indexer_n_heads": [Finding(index_width / sizes["indexer_q_norm"] - 1, f"width {index_width} of index_qk")],
        "indexer_head_dim": [Finding(sizes["indexer_q_norm"], f"size of {cut.gammas['indexer_q_norm']}")],
        "indexer_budget": _stated(indexer.node, "token_budget"),
        "indexer_compress_ratio": _stated(indexer.node, "compress_ratio"),
        "rms_norm_eps": [Finding(eps, f"qk_norm_epsilon of {node.label}"), *indexer.eps],
        "attention_scale": [Finding(float(node.attribute("scale", 0.0) or exact), f"scale of {node.label}")],
        "rotary_dims": [Finding(2 * rotary, f"width {rotary} of {_input(node, _COS)}")],
    }
    return settle(cut.layer, found, config, pool_io)


def _stated(node: Node, name: str) -> list[Finding]:
    value = node.attribute(name)
    return [] if value is None else [Finding(value, f"{name} of {node.label}")]


def _width(index: GraphIndex, tensors: Sequence[str]) -> int | None:
    """Elements a token of tensors [B, S, ...]; None where one is not known."""
    total = 0
    for tensor in tensors:
        shape = index.shape(tensor)
        if shape is None or len(shape) not in (3, 4) or not all(isinstance(d, int) for d in shape[2:]):
            return None
        total += math.prod(d for d in shape[2:] if isinstance(d, int))
    return total


def _check_widths(index: GraphIndex, cut: Cut, attributes: Attributes) -> None:
    g = attributes.geometry
    for what, tensors, wanted in (
        ("query, key and value have", cut.qkv, g.qkv_width),
        ("index queries and key have", cut.index_qk, g.index_width),
    ):
        width = _width(index, tensors)
        if width != wanted:
            refuse(cut.layer, tensors[0], f"{what} {width} elements a token; {wanted} were expected")
