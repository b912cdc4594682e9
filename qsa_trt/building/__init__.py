"""Builds TensorRT engines from patched ONNX files."""

from __future__ import annotations

from .engine import BuildPlan, BuildReport, build_engine, parse_bytes, plan_build, run_build

__all__ = ["BuildPlan", "BuildReport", "build_engine", "parse_bytes", "plan_build", "run_build"]
