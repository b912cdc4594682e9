"""What a runner's `run` takes."""

from __future__ import annotations

from typing import NamedTuple

from .contract import Call


class CallParams(NamedTuple):
    """One call, as a tuple, which costs the host a quarter of a frozen dataclass.

    Device addresses carry the names of the contract; all lie on the device of the current context.

    Attributes:
        call: sizes, as `contract.check_call` returns them.
        qkv: surface `[B, S, (Hq+2*Hkv)*D]`.
        index_qk: surface `[B, S, (Ih+1)*Id]`.
        past_key_value: surface `[2, N, P, Hkv, D+Id]`, updated in place.
        context_lengths: int32 `[B]`.
        rope_rotary_cos_sin: fp32 `[1, maxPos, rotary]`.
        kv_page_table: int32 `[B, 2, M]`.
        q_norm_gamma: surface `[D]`.
        k_norm_gamma: surface `[D]`.
        indexer_q_norm_gamma: surface `[Id]`.
        indexer_k_norm_gamma: surface `[Id]`.
        attn_output: surface `[B, S, Hq, D]`.
        workspace: `workspace.layout(geometry, call).size` bytes at a multiple of 256; its content is garbage.
        stream: raw CUstream handle.
    """

    call: Call
    qkv: int
    index_qk: int
    past_key_value: int
    context_lengths: int
    rope_rotary_cos_sin: int
    kv_page_table: int
    q_norm_gamma: int
    k_norm_gamma: int
    indexer_q_norm_gamma: int
    indexer_k_norm_gamma: int
    attn_output: int
    workspace: int
    stream: int
