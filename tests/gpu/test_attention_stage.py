"""The attention stage against PyTorch's attention in the same dtype, on the same queries, keys and values.

Keys and values are read back from the pool, and queries come from the reference's norm and RoPE, of which two in ten
thousand elements may be rounded the other way; that is far below the rounding of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qsa_plugin.contract import Geometry, Mode
from qsa_trt.metrics import row_error
from qsa_trt.paging import SequencePages, flat_pages
from tests.gpu.conftest import RecordError
from tests.support.node import (
    Inputs,
    call_inputs,
    dtype_of,
    geometry_of,
    listed_blocks,
    needs_node,
    open_node,
    queries_of,
    selected_blocks,
)
from tests.support.requirements import needs_oracle
from tests.support.spot_rows import SpotRows

Array = NDArray[Any]
pytestmark = [*needs_node, *needs_oracle, pytest.mark.pitfall(18)]
#: Of PyTorch's error in the same dtype, both against fp64.
TIMES_PYTORCH = 1.5
#: Weights of the norms, and the softmax scale: as in a model, and raw dots that pass 65,504 with logits as in a model.
SIZES = {"usual": (1.0, 0.0), "large": (40.0, 1 / (40 * 40 * 16))}
NAMES = pytest.mark.parametrize("name", [pytest.param("real-fp16", marks=pytest.mark.quick), "real-bf16", "group-16"])
SIZE = pytest.mark.parametrize("size", list(SIZES))


def sized(name: str, size: str, lengths: list[int], mode: Mode) -> tuple[Geometry, Inputs]:
    """A call whose queries and keys are as large as `size` says."""
    gamma, scale = SIZES[size]
    inputs = call_inputs(name, lengths, mode)
    for weight in ("q_norm_gamma", "k_norm_gamma"):
        inputs[weight] = (inputs[weight].astype(np.float32) * gamma).astype(dtype_of(name))
    return geometry_of(name, attention_scale=scale), inputs


def attend(q: Array, k: Array, v: Array, scale: float, mask: Array | None, dtype: Any) -> Array:
    """PyTorch's attention, `[T, Hq, D]`; causal where there is no mask."""
    import torch

    torch_dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}[str(np.dtype(dtype))]
    group = q.shape[1] // k.shape[1]
    tensors = [torch.from_numpy(x.astype(np.float64)).cuda().transpose(0, 1)[None] for x in (q, k, v)]
    query, key, value = (x.to(torch_dtype).contiguous() for x in tensors)  # [1, H, T, D]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    allowed = None if mask is None else torch.from_numpy(mask).cuda()
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, is_causal=mask is None, scale=scale
    )
    return np.asarray(output[0].transpose(0, 1).double().cpu().numpy())


def record(record_error: RecordError, what: str, ours: Array, theirs: Array, exact: Array) -> None:
    """Both errors against fp64, a row being one head of one token."""
    one, other = row_error(ours, exact), row_error(theirs, exact)
    record_error(f"{what}: largest error over PyTorch's", float(one.max() / other.max()), TIMES_PYTORCH)
    record_error(f"{what}: mean error over PyTorch's", float(one.mean() / other.mean()), TIMES_PYTORCH)
    record_error(f"{what}: largest error against fp64", float(one.max()), None)


@NAMES
@SIZE
def test_prefill(name: str, size: str, record_error: RecordError) -> None:
    """The dense rows, causal, and the sparse ones, with the mask of their lists."""
    g, inputs = sized(name, size, [2300], Mode.PREFILL)
    context = open_node(name, inputs, geometry=g)
    outputs = context.run(inputs)
    lists, flat = listed_blocks(context)[0], flat_pages(outputs.present_key_value)
    positions = np.arange(2300)
    pages = SequencePages.of(inputs["kv_page_table"], 0, g.head_size)
    q = SpotRows(g, inputs, outputs.present_key_value).tokens(0, positions, positions).q
    k, v = flat[pages.key(positions)], flat[pages.value(positions)]
    dense, ours = g.list_width, outputs.attn_output[0].astype(np.float64)
    dtypes = (dtype_of(name), np.float64)
    causal = [attend(q[:dense], k[:dense], v[:dense], g.scale, None, dtype) for dtype in dtypes]
    record(record_error, "dense", ours[:dense], *causal)
    mask = np.zeros((2300 - dense, 2300 // g.indexer_compress_ratio + 1), bool)
    np.put_along_axis(mask, lists.astype(np.int64), True, axis=1)
    ratio = g.indexer_compress_ratio
    rows = positions[dense:]
    mask[np.arange(rows.size), rows // ratio] |= (rows + 1) % ratio != 0
    mask = mask.repeat(ratio, 1)[:, :2300] & (positions <= rows[:, None])
    sparse = [attend(q[dense:], k, v, g.scale, mask, dtype) for dtype in dtypes]
    record(record_error, "sparse", ours[dense:], *sparse)
    if size == "large":
        assert np.abs(q[:100].reshape(-1, g.head_size) @ k[:100, 0].T.astype(np.float32)).max() > 65_504


@NAMES
@SIZE
def test_decode(name: str, size: str, record_error: RecordError) -> None:
    lengths = [700, 2051, 2053, 5000]
    g, inputs = sized(name, size, lengths, Mode.DECODE)
    context = open_node(name, inputs, geometry=g)
    outputs = context.run(inputs)
    flat, queries, ratio = flat_pages(outputs.present_key_value), queries_of(context, inputs), g.indexer_compress_ratio
    ours, theirs, exact = [], [], []
    for row, length in enumerate(lengths):
        blocks = selected_blocks(context, row, length)
        listed = (blocks[:, None] * ratio + np.arange(ratio)).ravel()
        listed = np.concatenate([listed, np.arange(length // ratio * ratio, length)])
        pages = SequencePages.of(inputs["kv_page_table"], row, g.head_size)
        q, k, v = queries[row][None], flat[pages.key(listed)], flat[pages.value(listed)]
        everything = np.ones((1, listed.size), bool)
        ours.append(outputs.attn_output[row].astype(np.float64))
        theirs.append(attend(q, k, v, g.scale, everything, dtype_of(name)))
        exact.append(attend(q, k, v, g.scale, everything, np.float64))
    record(record_error, "decode", *(np.concatenate(x) for x in (ours, theirs, exact)))
