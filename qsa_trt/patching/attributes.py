"""Reads a layer's attributes from what the graph holds: weights' widths, gammas, constants; never from a default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsa_plugin.contract import Geometry
from qsa_plugin.errors import ContractError

from .anchors import last_axis_slice, refuse
from .config import KEYS, Config, config_value
from .graph_index import Dim, GraphIndex, Node
from .verify import PlainCut

_VIEWS = frozenset({"Transpose", "Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Expand"})
#: Exporters write a scale as a float of the graph's dtype, or its square root twice: fp16 is off by up to 1e-3.
_TOLERANCE = {"rms_norm_eps": 1e-3, "attention_scale": 2e-3}
#: Read by recognising a pattern, which can mislead: the config may decide between findings. The others cannot.
_RECOGNISED = frozenset({"indexer_compress_ratio", "indexer_budget", "rotary_dims", "attention_scale"})


@dataclass(frozen=True)
class Finding:
    """One value and where it stands."""

    value: float
    where: str

    def __str__(self) -> str:
        return f"{self.value:g} ({self.where})"


@dataclass(frozen=True)
class Attributes:
    """A layer's attributes, and the rotary dims that the rope table needs."""

    geometry: Geometry
    rotary_dims: int
    where: Mapping[str, str]  # attribute -> where it was found


def read_attributes(index: GraphIndex, cut: PlainCut, config: Config, pool_io: int) -> Attributes:
    """Read one layer's attributes and check them against each other and against the config.

    Raises:
        RefusedError: an attribute is nowhere, contradicts itself or the config, or describes an impossible layer.
    """
    reader = _Reader(index, cut)
    for name, find in reader.places().items():
        reader.found[name] = _resolve(cut.layer, name, list(find()), config)
    return _checked(cut.layer, reader.found, pool_io)


def settle(layer: str, findings: Mapping[str, Sequence[Finding]], config: Config, pool_io: int) -> Attributes:
    """The same from findings that are known beforehand, one list an attribute.

    Raises:
        RefusedError: as `read_attributes`.
    """
    return _checked(layer, {n: _resolve(layer, n, list(f), config) for n, f in findings.items()}, pool_io)


def _checked(layer: str, found: Mapping[str, Finding], pool_io: int) -> Attributes:
    values = {name: finding.value for name, finding in found.items()}
    rotary = int(values.pop("rotary_dims"))
    for name in ("rms_norm_eps", "attention_scale"):
        values[name] = float(np.float32(values[name]))  # as the node will hold it
    try:
        geometry = Geometry.from_attributes({**values, "pool_io": pool_io})
    except ContractError as error:
        refuse(layer, error.what, f"the graph says {error.value}, which cannot be ({error.expected})")
    return Attributes(geometry, rotary, {name: finding.where for name, finding in found.items()})


def _resolve(layer: str, name: str, findings: list[Finding], config: Config) -> Finding:
    """One value out of what the graph and the config say."""
    said = config_value(config, name)
    wanted = None if said is None else Finding(said, f"config {KEYS[name]}")
    distinct = [f for i, f in enumerate(findings) if not any(_same(name, f, g) for g in findings[:i])]
    seen = " and ".join(map(str, distinct)) or "nothing"
    if len(distinct) > 1 and name not in _RECOGNISED:
        refuse(layer, name, f"the graph says {seen}; a node has one")
    if wanted is None and len(distinct) != 1:
        refuse(layer, name, f"the graph says {seen}; give --config with the model's config.json")
    if wanted is None or not distinct:
        return wanted or distinct[0]
    agreeing = [f for f in distinct if _same(name, f, wanted)]
    if not agreeing:
        refuse(layer, name, f"the graph says {seen}, but --config says {wanted}")
    return agreeing[0]


def _same(name: str, a: Finding, b: Finding) -> bool:
    return math.isclose(a.value, b.value, rel_tol=_TOLERANCE.get(name, 0.0))


class _Reader:
    """Looks for each attribute in every place that can hold it; `found` keeps what was settled so far."""

    def __init__(self, index: GraphIndex, cut: PlainCut) -> None:
        self.index, self.cut = index, cut
        self.norms, self.projections = cut.anchors.norms, cut.anchors.projections
        self.found: dict[str, Finding] = {}

    def places(self) -> dict[str, Callable[[], Iterator[Finding]]]:
        """Where each attribute is looked for; later ones depend on earlier ones."""
        return {
            "head_size": lambda: self._gamma_sizes("q_norm", "k_norm"),
            "num_q_heads": lambda: self._heads(2 * self._known("head_size"), "q_proj"),
            "num_kv_heads": lambda: self._heads(self._known("head_size"), "k_proj", "v_proj"),
            "indexer_head_dim": lambda: self._gamma_sizes("indexer_q_norm", "indexer_k_norm"),
            "indexer_n_heads": self._index_heads,
            "indexer_compress_ratio": self._ratio,
            "indexer_budget": self._budget,
            "rms_norm_eps": lambda: (Finding(n.eps, f"epsilon at {n.node.label}") for n in self.norms.values()),
            "attention_scale": self._scale,
            "rotary_dims": self._rotary_dims,
        }

    def _known(self, name: str) -> int:
        return int(self.found[name].value)

    def _gamma_sizes(self, *names: str) -> Iterator[Finding]:
        for name in names:
            gamma = self.index.constant(self.norms[name].gamma)
            if gamma is None:
                refuse(self.cut.anchors.layer, self.norms[name].node, f"the weight of {name} is not a constant")
            yield Finding(gamma.size, f"size of the {name} weight")

    def _heads(self, size: int, *projections: str) -> Iterator[Finding]:
        for name in projections:
            width = self.index.last_dim(self.projections[name])
            if width is not None:
                yield Finding(width / size, f"width {width} of {name}")

    def _index_heads(self) -> Iterator[Finding]:
        for finding in self._heads(self._known("indexer_head_dim"), "index_qk_proj"):
            yield Finding(finding.value - 1, finding.where)

    def _ratio(self) -> Iterator[Finding]:
        """The block axis that the indexer averages over, and the floor divisions that turn tokens into blocks."""
        source = self.norms["indexer_k_norm"].source
        mean = self.index.producer(self.index.back(source, _VIEWS))
        if mean is not None and mean.op == "ReduceMean":
            shape = self.index.shape(mean.inputs[0])
            axes = mean.attribute("axes") or (self.index.integers(mean.inputs[1]) if len(mean.inputs) > 1 else None)
            dims: dict[int | None, Dim] = dict(enumerate(shape or ()))
            dims |= {i - len(dims): dim for i, dim in enumerate(shape or ())}  # as axes may count, from the end
            if axes and isinstance(ratio := dims.get(axes[0]), int):
                yield Finding(ratio, f"block axis of {mean.label}")
        for node in sorted(self.cut.sides | self.cut.nodes, key=lambda n: n.position):
            if node.op == "Div" and any(r.op == "Floor" for r in self.index.readers(node.output)):
                divisor = self.index.scalar(node.inputs[1])
                if divisor is not None and divisor > 1:
                    yield Finding(divisor, f"divisor of {node.label}")

    def _budget(self) -> Iterator[Finding]:
        """The number of blocks that TopK keeps, in tokens."""
        ratio = self._known("indexer_compress_ratio")
        for node in self.cut.topks:
            count = self.index.integers(node.inputs[1])
            if count is not None and count[0] is not None:
                yield Finding(count[0] * ratio, f"K {count[0]} of {node.label} times the ratio {ratio}")

    def _rotary_dims(self) -> Iterator[Finding]:
        """The width of the cosines that the normed query, key and index query are multiplied with."""
        for name in ("q_norm", "k_norm", "indexer_q_norm"):
            for tensor, node in self.index.forward(self.norms[name].output, _VIEWS | {"Slice", "Split"}):
                if node.op == "Mul":
                    other = node.inputs[1] if node.inputs[0] == tensor else node.inputs[0]
                    width = self.index.last_dim(other)
                    if width is not None and width > 1:
                        yield Finding(width, f"cosines at {node.label}")
            for _, node in self.index.forward(self.norms[name].output, _VIEWS):
                bounds = last_axis_slice(self.index, node) if node.op == "Slice" else None
                if bounds is not None and bounds[0] == 0:
                    yield Finding(bounds[1], f"end of {node.label}")

    def _scale(self) -> Iterator[Finding]:
        """The factor between q.k and softmax; the exact 1/sqrt(D) where the graph's constant is a rounded one."""
        softmax, exact = self.cut.softmax, 1 / math.sqrt(self._known("head_size"))
        own = softmax.attribute("scale", exact)  # of Attention, where leaving it out means 1/sqrt(D) too
        scale = own if softmax.op == "Attention" else self._factor(softmax.inputs[0])
        if scale is not None:
            near = math.isclose(scale, exact, rel_tol=_TOLERANCE["attention_scale"])
            yield Finding(exact if near else scale, f"factor {scale:g} at {softmax.label}")

    def _factor(self, tensor: str) -> float | None:
        """The product of the scalar factors between a tensor and the MatMul behind it, and those of its operands."""
        node = self.index.producer(tensor)
        if node is None or node not in self.cut.nodes:
            return None
        if node.op == "MatMul":
            return self._operand_factor(node.inputs[0]) * self._operand_factor(node.inputs[1])
        own = self._own_factor(node)
        if own is not None:
            behind = self._factor(own[1])
            return None if behind is None else own[0] * behind
        if node.op in _VIEWS or node.op in ("Add", "Where"):  # the mask
            return next((f for t in node.inputs if (f := self._factor(t)) is not None), None)
        return None

    def _operand_factor(self, tensor: str) -> float:
        node = self.index.producer(self.index.back(tensor, _VIEWS))
        own = self._own_factor(node) if node is not None else None
        return own[0] * self._operand_factor(own[1]) if own is not None else 1.0

    def _own_factor(self, node: Node) -> tuple[float, str] | None:
        """(factor, other operand) of a Mul or Div by a scalar constant."""
        if node.op not in ("Mul", "Div"):
            return None
        first, second = node.inputs
        scalar = self.index.scalar(second)
        if scalar is not None and scalar != 0:
            return (1 / scalar if node.op == "Div" else scalar), first
        scalar = self.index.scalar(first)
        return (scalar, second) if scalar is not None and node.op == "Mul" else None
