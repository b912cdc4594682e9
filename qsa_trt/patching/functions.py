"""Puts the bodies of local functions where they are called: a layer may lie in one, or be made of several."""

from __future__ import annotations

import onnx
from onnx import inliner

from qsa_plugin.contract import EDGE_LLM_NAME, PLUGIN_NAME
from qsa_plugin.errors import RefusedError


def inline_functions(model: onnx.ModelProto) -> tuple[str, ...]:
    """Inline, in place, every local function but definitions of QsaAttention; returns their names.

    Raises:
        RefusedError: onnx cannot inline them.
    """
    functions = [f for f in model.functions if f.name not in (PLUGIN_NAME, EDGE_LLM_NAME)]
    if not functions:
        return ()
    try:
        inlined = inliner.inline_selected_functions(model, [(f.domain, f.name) for f in functions])
    except Exception as error:  # whatever onnx's C++ code raises
        text = " ".join(str(error).split())
        raise RefusedError(f"local function {functions[0].name}: onnx cannot inline it ({text})") from error
    model.CopyFrom(inlined)
    return tuple(f.name for f in functions)
