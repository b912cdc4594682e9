"""One BLAS thread a test process: the products are small, and threads that wait for each other under pytest-xdist made
the slowest tests ten times slower. It must be said before NumPy and torch are loaded."""

import os
from pathlib import Path

import pytest

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-results", metavar="FILE", type=Path, help="write what the GPU tests found as JSON")
    parser.addoption("--nvrtc", metavar="MAJOR.MINOR", help="the NVRTC that the compile tests must run with")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the compiler where a test run asks for one."""
    if config.getoption("--nvrtc") is None:
        return None
    from importlib.metadata import version

    names = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "cuda-core", "cuda-bindings")
    return "compiler: " + ", ".join(f"{name} {version(name)}" for name in names)


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--gpu-results"):
        from tests.support.gpu_results import GpuResults

        config.pluginmanager.register(GpuResults(path))
