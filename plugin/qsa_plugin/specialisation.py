"""What one compilation of the kernels is specialised for, and the table of those that are tested.

A `Specialisation` validates itself (the limits stand in `kernel_limits`), renders its defines, and is both the cache
key and the log line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .contract import PAGE_SIZE, Geometry
from .errors import QsaError, RefusedError
from .kernel_limits import kernel_refusals

#: Compute capability to NVRTC target. 9.0 needs the `a` target for its own instructions (wgmma, setmaxnreg).
ARCHES: Mapping[tuple[int, int], str] = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_103",
    (11, 0): "sm_110",
    (12, 0): "sm_120",
    (12, 1): "sm_121",
}
#: Dynamic shared memory a block may have, in KiB, by compute capability; 99 where it is not listed.
_SHARED_LIMITS = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of dynamic shared memory that a thread block may use."""
    return _SHARED_LIMITS.get(capability, 99) * 1024


def arch_of(compute_capability: tuple[int, int]) -> str:
    """NVRTC target of a device.

    Raises:
        RefusedError: the kernels were never compiled for this compute capability.
    """
    if compute_capability not in ARCHES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHES)
        major, minor = compute_capability
        raise RefusedError(f"compute capability {major}.{minor} is not supported; the kernels support {known}")
    return ARCHES[compute_capability]


@dataclass(frozen=True)
class Specialisation:
    """Everything that is a compile-time constant of the kernels, except the tuning of one kernel.

    `attention_scale` and `rms_norm_eps` are run-time values and not part of it.

    Args:
        surface: "float16" or "bfloat16".
        arch: NVRTC target, one of `ARCHES`.

    Raises:
        ContractError: the values contradict each other, whatever the kernels can do.
        RefusedError: the limits of the kernels that the values break, all of them.
    """

    surface: str
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    rotary_dims: int
    arch: str

    def __post_init__(self) -> None:
        if self.arch not in ARCHES.values():
            raise RefusedError(f"target {self.arch} is not supported; the kernels support {', '.join(ARCHES.values())}")
        refusals = kernel_refusals(self.geometry, self.surface, self.rotary_dims)
        if refusals:
            raise RefusedError("; ".join(refusals))

    @classmethod
    def of(cls, geometry: Geometry, surface: str, rotary_dims: int, arch: str) -> Specialisation:
        """The specialisation that computes `geometry` on `arch`."""
        return cls(
            surface=surface,
            num_q_heads=geometry.num_q_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_size=geometry.head_size,
            indexer_n_heads=geometry.indexer_n_heads,
            indexer_head_dim=geometry.indexer_head_dim,
            indexer_budget=geometry.indexer_budget,
            indexer_compress_ratio=geometry.indexer_compress_ratio,
            rotary_dims=rotary_dims,
            arch=arch,
        )

    @property
    def geometry(self) -> Geometry:
        """The contract's geometry, with default scale, epsilon and pool mode."""
        return Geometry(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            indexer_n_heads=self.indexer_n_heads,
            indexer_head_dim=self.indexer_head_dim,
            indexer_budget=self.indexer_budget,
            indexer_compress_ratio=self.indexer_compress_ratio,
        )

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of `arch`."""
        return next(capability for capability, arch in ARCHES.items() if arch == self.arch)

    @property
    def hopper(self) -> bool:
        """Whether kernels may use what only compute capability 9.0 has."""
        return self.arch == "sm_90a"

    def on(self, arch: str) -> Specialisation:
        """The same specialisation for another target."""
        return replace(self, arch=arch)

    def defines(self) -> dict[str, int]:
        """The macros that every kernel file may use."""
        return {
            "QSA_BF16": int(self.surface == "bfloat16"),
            "QSA_HQ": self.num_q_heads,
            "QSA_HKV": self.num_kv_heads,
            "QSA_D": self.head_size,
            "QSA_IH": self.indexer_n_heads,
            "QSA_ID": self.indexer_head_dim,
            "QSA_BUDGET": self.indexer_budget,
            "QSA_R": self.indexer_compress_ratio,
            "QSA_ROTARY": self.rotary_dims,
            "QSA_PAGE": PAGE_SIZE,
        }


def refusal(geometry: Geometry, surface: str, rotary_dims: int, arch: str) -> str | None:
    """Why the kernels refuse this node on this target; None when they run it."""
    try:
        Specialisation.of(geometry, surface, rotary_dims, arch)
    except QsaError as error:
        return str(error)
    return None


def _spec(
    surface: str, hq: int, hkv: int, d: int, ih: int, di: int, budget: int, ratio: int, rot: int
) -> Specialisation:
    """One row of the table below, for the oldest target."""
    return Specialisation(surface, hq, hkv, d, ih, di, budget, ratio, rot, "sm_80")


#: Compiled for every target by the tests: the real geometry in both surfaces, and every extreme of every limit.
SPECIALISATIONS: Mapping[str, Specialisation] = {
    "real-fp16": _spec("float16", 24, 2, 256, 4, 128, 2048, 4, 64),
    "real-bf16": _spec("bfloat16", 24, 2, 256, 4, 128, 2048, 4, 64),
    "smallest": _spec("float16", 1, 1, 32, 1, 32, 2, 2, 2),
    "largest": _spec("bfloat16", 128, 8, 256, 8, 128, 8192, 8, 128),
    "group-1": _spec("float16", 4, 4, 128, 4, 64, 64, 4, 64),
    "group-16": _spec("float16", 32, 2, 128, 4, 128, 2048, 4, 128),
    "group-7": _spec("bfloat16", 14, 2, 64, 2, 64, 512, 4, 16),
    "head-32": _spec("bfloat16", 8, 2, 32, 4, 128, 256, 4, 32),
    "head-64": _spec("float16", 8, 2, 64, 4, 32, 256, 4, 24),
    "head-256-index-32": _spec("float16", 8, 1, 256, 3, 32, 1024, 4, 32),
    "ratio-2": _spec("float16", 8, 2, 128, 4, 128, 2048, 2, 64),
    "ratio-8": _spec("bfloat16", 8, 2, 128, 8, 128, 2048, 8, 64),
    "budget-8192": _spec("float16", 24, 2, 256, 4, 128, 8192, 2, 64),
    "budget-odd-blocks": _spec("float16", 6, 2, 64, 5, 64, 36, 4, 30),
    "index-heads-1": _spec("bfloat16", 16, 2, 128, 1, 128, 2048, 4, 64),
    "index-heads-8": _spec("float16", 16, 2, 128, 8, 64, 2048, 4, 64),
}
