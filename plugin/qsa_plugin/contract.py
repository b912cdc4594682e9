"""The QsaAttention contract as one table: inputs, outputs, attributes, geometry and call shapes.

Validation, shape inference, optimization profiles, documentation and the command line all read the tables here;
nothing else repeats a name, a shape or a default.

Notation: B batch, S query tokens of this call, Hq query heads, Hkv KV heads, D head size, Ih indexer heads, Id indexer
head dim, R compress ratio, P tokens a page, N pages a plane, M pages a sequence.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from .errors import ContractError

PLUGIN_NAME = "QsaAttention"
PLUGIN_VERSION = "1"
PLUGIN_NAMESPACE = ""
ONNX_DOMAIN = "qsa"
ONNX_OPSET = 1
#: The same operator as TensorRT Edge-LLM's exporter spells it.
EDGE_LLM_NAME = "QsaAttentionPlugin"
EDGE_LLM_DOMAIN = "trt_edgellm"
PAGE_SIZE = 128

Dim = int | str


class DType(enum.Enum):
    """Element type of a contract tensor; SURFACE is fp16 or bf16, one of the two per node."""

    SURFACE = "surface"
    INT32 = "int32"
    FP32 = "float32"


class PoolIO(enum.IntEnum):
    """How output `present_key_value` relates to input `past_key_value`."""

    IN_PLACE = 0
    ALIAS = 1
    COPY = 2

    @property
    def option(self) -> str:
        """The spelling of the command line: `in-place`, `alias` or `copy`."""
        return self.name.lower().replace("_", "-")


class Mode(enum.Enum):
    """What one enqueue does, told by the runtime shape of `kvcache_start_index`."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Tensor:
    """One input or output: its name, element type, symbolic shape and meaning."""

    name: str
    dtype: DType
    dims: tuple[Dim, ...]
    meaning: str


@dataclass(frozen=True)
class Attribute:
    """One node attribute, which is also a plugin field; `default` None means required."""

    name: str
    kind: type[int] | type[float]
    default: int | float | None
    meaning: str


INPUTS: tuple[Tensor, ...] = (
    Tensor(
        "qkv",
        DType.SURFACE,
        ("B", "S", "(Hq+2*Hkv)*D"),
        "packed raw projections per token: Q heads, K heads, V heads; before norm and RoPE",
    ),
    Tensor("index_qk", DType.SURFACE, ("B", "S", "(Ih+1)*Id"), "Ih raw indexer query heads, then one raw indexer key"),
    Tensor(
        "past_key_value", DType.SURFACE, (2, "N", PAGE_SIZE, "Hkv", "D+Id"), "widened paged pool: plane 0 K, plane 1 V"
    ),
    Tensor("context_lengths", DType.INT32, ("B",), "live lengths; in decode the total length, the new token included"),
    Tensor(
        "rope_rotary_cos_sin",
        DType.FP32,
        (1, "maxPos", "rotary"),
        "cos in the first half of the last dim, sin in the second",
    ),
    Tensor(
        "kvcache_start_index",
        DType.INT32,
        ("start",),
        "its shape selects the mode: [0] prefill, [B] decode; values are not read in decode",
    ),
    Tensor(
        "kv_page_table",
        DType.INT32,
        ("B", 2, "M"),
        "plane 0 K page ids in [0,N), plane 1 V page ids in [N,2N); -1 unused",
    ),
    Tensor("q_norm_gamma", DType.SURFACE, ("D",), "main query RMSNorm weight, already folded to 1+w"),
    Tensor("k_norm_gamma", DType.SURFACE, ("D",), "main key RMSNorm weight, already folded to 1+w"),
    Tensor("indexer_q_norm_gamma", DType.SURFACE, ("Id",), "indexer query RMSNorm weight, raw w"),
    Tensor("indexer_k_norm_gamma", DType.SURFACE, ("Id",), "indexer key RMSNorm weight, raw w"),
)

OUTPUTS: tuple[Tensor, ...] = (
    Tensor(
        "attn_output", DType.SURFACE, ("B", "S", "Hq", "D"), "attention output before the output gate and projection"
    ),
    Tensor(
        "present_key_value",
        DType.SURFACE,
        (2, "N", PAGE_SIZE, "Hkv", "D+Id"),
        "the pool after this call; `pool_io` says where it lives",
    ),
)

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("num_q_heads", int, None, "query heads, Hq"),
    Attribute("num_kv_heads", int, None, "key/value heads, Hkv"),
    Attribute("head_size", int, None, "elements of a query, key or value head, D"),
    Attribute("indexer_n_heads", int, None, "indexer query heads, Ih"),
    Attribute("indexer_head_dim", int, None, "elements of an indexer head, Id"),
    Attribute("indexer_budget", int, None, "tokens selected a row in complete blocks"),
    Attribute("indexer_compress_ratio", int, None, "tokens a block, R"),
    Attribute("attention_scale", float, 0.0, "softmax scale; absent or <= 0 means 1/sqrt(head_size)"),
    Attribute("rms_norm_eps", float, 1e-6, "epsilon of the four RMSNorms"),
    Attribute("pool_io", int, 0, "0 in place, 1 alias, 2 copy"),
)

INPUT_INDEX: Mapping[str, int] = {t.name: i for i, t in enumerate(INPUTS)}
OUTPUT_INDEX: Mapping[str, int] = {t.name: i for i, t in enumerate(OUTPUTS)}


@dataclass(frozen=True)
class Geometry:
    """The attributes of one QsaAttention node. Field names and order are those of `ATTRIBUTES`.

    Raises:
        ContractError: a value that no kernel and no reference could compute (the limits of the CUDA kernels are
            narrower, and are checked by `kernel_limits`).
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    attention_scale: float = 0.0
    rms_norm_eps: float = 1e-6
    pool_io: int = 0

    def __post_init__(self) -> None:
        for attribute in ATTRIBUTES:
            value = getattr(self, attribute.name)
            if attribute.default is None and value < 1:
                raise ContractError(
                    f"attribute {attribute.name}", value, "a positive integer", "correct the node attribute"
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ContractError(
                "attribute num_q_heads",
                self.num_q_heads,
                f"a multiple of num_kv_heads ({self.num_kv_heads})",
                "correct the head counts",
            )
        if PAGE_SIZE % self.indexer_compress_ratio:
            raise ContractError(
                "attribute indexer_compress_ratio",
                self.indexer_compress_ratio,
                f"a divisor of the page size {PAGE_SIZE}",
                "correct the compress ratio",
            )
        if self.indexer_budget % self.indexer_compress_ratio:
            raise ContractError(
                "attribute indexer_budget",
                self.indexer_budget,
                f"a multiple of indexer_compress_ratio ({self.indexer_compress_ratio})",
                "correct the budget",
            )
        if not math.isfinite(self.attention_scale):
            raise ContractError(
                "attribute attention_scale",
                self.attention_scale,
                "a finite number",
                "correct the scale, or leave it out for 1/sqrt(head_size)",
            )
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ContractError(
                "attribute rms_norm_eps", self.rms_norm_eps, "a finite number >= 0", "correct the epsilon"
            )
        if self.pool_io not in tuple(PoolIO):
            raise ContractError(
                "attribute pool_io", self.pool_io, "0 (in place), 1 (alias) or 2 (copy)", "correct the attribute"
            )

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, int | float]) -> Geometry:
        """Build a geometry from node attributes or plugin fields; names that are not in `ATTRIBUTES` are ignored.

        Raises:
            ContractError: a required attribute is missing, or a value is impossible.
        """
        values: dict[str, int | float] = {}
        for attribute in ATTRIBUTES:
            if attribute.name in attributes:
                values[attribute.name] = attribute.kind(attributes[attribute.name])
            elif attribute.default is None:
                raise ContractError(
                    f"attribute {attribute.name}",
                    "nothing",
                    f"{attribute.meaning} ({attribute.kind.__name__})",
                    "add the attribute to the node",
                )
        return cls(**values)  # type: ignore[arg-type]

    def to_attributes(self) -> dict[str, int | float]:
        """All ten attributes by name, in table order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return self.attention_scale if self.attention_scale > 0 else 1.0 / math.sqrt(self.head_size)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        """Last dim of `qkv`."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def index_width(self) -> int:
        """Last dim of `index_qk`."""
        return (self.indexer_n_heads + 1) * self.indexer_head_dim

    @property
    def pool_width(self) -> int:
        """Last dim of the pool."""
        return self.head_size + self.indexer_head_dim

    @property
    def budget_blocks(self) -> int:
        """Complete blocks selected a row at most."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def list_width(self) -> int:
        """Width W of an index list: the budget and the longest causal tail."""
        return self.indexer_budget + self.indexer_compress_ratio - 1


#: Dims that follow from the geometry. Every other symbolic dim (B, S, N, M, maxPos, rotary, start) is a run-time size.
GEOMETRY_DIMS: Mapping[str, Callable[[Geometry], int]] = {
    "(Hq+2*Hkv)*D": lambda g: g.qkv_width,
    "(Ih+1)*Id": lambda g: g.index_width,
    "Hq": lambda g: g.num_q_heads,
    "Hkv": lambda g: g.num_kv_heads,
    "D": lambda g: g.head_size,
    "Id": lambda g: g.indexer_head_dim,
    "D+Id": lambda g: g.pool_width,
}


def resolve_dims(dims: Sequence[Dim], geometry: Geometry) -> tuple[Dim, ...]:
    """Replace the dims that the geometry fixes by integers; run-time dims stay symbolic."""
    return tuple(GEOMETRY_DIMS[d](geometry) if isinstance(d, str) and d in GEOMETRY_DIMS else d for d in dims)


@dataclass(frozen=True)
class Call:
    """The run-time sizes of one valid enqueue."""

    mode: Mode
    batch: int
    seq_len: int
    num_pages: int
    pages_per_seq: int
    max_positions: int
    rotary_dims: int

    @property
    def max_kv_len(self) -> int:
        """Longest sequence that the page table and the rope table can hold."""
        return min(self.pages_per_seq * PAGE_SIZE, self.max_positions)


def check_call(geometry: Geometry, shapes: Mapping[str, Sequence[int]]) -> Call:
    """Validate the run-time shapes of all eleven inputs and tell the mode.

    Args:
        geometry: the node's attributes.
        shapes: input name to shape, every input of `INPUTS`.

    Raises:
        ContractError: names the tensor, what came and what is legal.
    """
    bound: dict[str, int] = {}
    first_use: dict[str, str] = {}
    for tensor in INPUTS:
        shape = tuple(int(d) for d in shapes[tensor.name])
        legal = resolve_dims(tensor.dims, geometry)
        spelled = "[" + ", ".join(str(d) for d in legal) + "]"
        if len(shape) != len(legal):
            raise ContractError(tensor.name, list(shape), f"shape {spelled}", "bind a tensor of that rank")
        for axis, (got, want) in enumerate(zip(shape, legal, strict=True)):
            if isinstance(want, int):
                if got != want:
                    raise ContractError(tensor.name, list(shape), f"shape {spelled}", f"axis {axis} must be {want}")
            elif bound.setdefault(want, got) != got:
                raise ContractError(
                    tensor.name,
                    list(shape),
                    f"shape {spelled} with {want} = {bound[want]} as in {first_use[want]}",
                    f"make axis {axis} equal",
                )
            else:
                first_use.setdefault(want, tensor.name)
    return _check_sizes(geometry, bound, {name: list(shape) for name, shape in shapes.items()})


def _check_sizes(geometry: Geometry, bound: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> Call:
    """The rules of the contract that relate sizes to each other."""
    batch, seq_len, start = bound["B"], bound["S"], bound["start"]
    call = Call(
        mode=Mode.PREFILL if start == 0 else Mode.DECODE,
        batch=batch,
        seq_len=seq_len,
        num_pages=bound["N"],
        pages_per_seq=bound["M"],
        max_positions=bound["maxPos"],
        rotary_dims=bound["rotary"],
    )
    if batch < 1 or seq_len < 1:
        raise ContractError("qkv", shapes["qkv"], "B >= 1 and S >= 1", "bind at least one token of one sequence")
    if start not in (0, batch):
        raise ContractError(
            "kvcache_start_index",
            shapes["kvcache_start_index"],
            f"shape [0] (prefill) or [{batch}] (decode)",
            "bind one of these two shapes",
        )
    if call.mode is Mode.DECODE and seq_len != 1:
        raise ContractError(
            "qkv",
            shapes["qkv"],
            f"S = 1 in decode (kvcache_start_index has shape [{batch}])",
            "decode one token a sequence, or bind kvcache_start_index of shape [0] for prefill",
        )
    if call.num_pages < 1:
        raise ContractError(
            "past_key_value", shapes["past_key_value"], "at least one page a plane (axis 1)", "allocate a pool"
        )
    limit = min(geometry.head_size, geometry.indexer_head_dim)
    if call.rotary_dims % 2 or not 2 <= call.rotary_dims <= limit:
        raise ContractError(
            "rope_rotary_cos_sin",
            shapes["rope_rotary_cos_sin"],
            f"an even last dim from 2 to {limit}",
            "bind the table of the model's rotary dims",
        )
    if call.mode is Mode.PREFILL:
        if seq_len > call.max_positions:
            raise ContractError(
                "rope_rotary_cos_sin",
                shapes["rope_rotary_cos_sin"],
                f"at least S = {seq_len} positions (axis 1)",
                "bind a longer rope table or a shorter prompt",
            )
        if math.ceil(seq_len / PAGE_SIZE) > call.pages_per_seq:
            raise ContractError(
                "kv_page_table",
                shapes["kv_page_table"],
                f"at least ceil(S / {PAGE_SIZE}) = {math.ceil(seq_len / PAGE_SIZE)} pages (axis 2)",
                "bind a wider page table or a shorter prompt",
            )
    return call
