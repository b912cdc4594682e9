"""What this machine has: versions of packages, and the GPU. Nothing here raises, and nothing is loaded onto the GPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from qsa_plugin import flavour_name, flavour_version
from qsa_plugin.errors import QsaError

from . import __version__, device

#: The packages whose versions belong in a bug report.
PACKAGES = (
    "tensorrt",
    "tensorrt-rtx-cu13",
    "tensorrt-lean-cu13-bindings",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "onnx",
    "onnxruntime",
    "onnx-graphsurgeon",
    "polygraphy",
    "numpy",
    "ml-dtypes",
)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """Device 0.

    Attributes:
        name: such as "NVIDIA H200".
        capability: its compute capability.
        memory: bytes.
        cuda: the newest CUDA version that its driver knows, such as "13.0".
    """

    name: str
    capability: tuple[int, int]
    memory: int
    cuda: str

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name}, compute capability {major}.{minor}, {self.memory / (1 << 30):.0f} GiB, CUDA {self.cuda}"


def gpu() -> Gpu | None:
    """Device 0; None where there is no GPU or no driver."""
    capability = device.compute_capability()
    if capability is None:
        return None
    from cuda.bindings import driver

    handle = device.check(driver.cuDeviceGet(0))
    name = device.check(driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode(errors="replace")
    version = int(device.check(driver.cuDriverGetVersion()))
    memory = int(device.check(driver.cuDeviceTotalMem(handle)))
    return Gpu(name, capability, memory, f"{version // 1000}.{version % 1000 // 10}")


def driver_version() -> str | None:
    """The kernel driver's own line; None where there is none."""
    try:
        return _DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ")
    except (OSError, IndexError):
        return None


def packages() -> dict[str, str]:
    """Installed packages and their versions; absent ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def tensorrt_in_use() -> str:
    """Flavour and version that the other commands take, or why there is none."""
    try:
        return f"{flavour_name()} {flavour_version()}"
    except QsaError as error:
        return f"none ({error})"


def description() -> dict[str, str]:
    """What a bug report starts with."""
    return {
        "qsa-trt": f"{__version__}, {Path(__file__).parent}",
        "system": f"Python {platform.python_version()}, {platform.platform()}",
        "TensorRT": tensorrt_in_use(),
        "GPU": str(gpu() or "none"),
        "driver": driver_version() or "none",
        "packages": ", ".join(f"{name} {version}" for name, version in packages().items()),
    }
