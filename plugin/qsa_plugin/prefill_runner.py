"""Prefill: whole prompts over padded activations.

plan (what is real), write (norm, RoPE, pool), block_pool (block keys), then for rows past the budget qprep_rows,
select_tiles and union, and attention: dense for the rows that see no more than the budget, over unions of block lists
for the others. Four or eight launches, whatever the lengths; grids depend on shapes and the SM count alone.
"""

from __future__ import annotations

from .call_params import CallParams
from .contract import Geometry
from .prefill_launchers import PrefillLaunchers
from .specialisation import Specialisation, refusal
from .workspace import layout, sparse_rows, visible_blocks


class PrefillParams(CallParams):
    """One prefill call."""

    __slots__ = ()


class QsaSparsePrefillRunner:
    """Runs prefill calls of one specialisation. One runner serves one thread at a time.

    Args:
        specialisation: what to compile.
        geometry: gives the softmax scale and the epsilon.
        portable: leave out what only compute capability 9.0 has.
    """

    def __init__(self, specialisation: Specialisation, geometry: Geometry, portable: bool = False) -> None:
        self.specialisation = specialisation
        self._geometry = geometry
        self._portable = portable
        self._launchers: PrefillLaunchers | None = None

    can_implement = staticmethod(refusal)

    def preflight(self) -> None:
        """Compile and load every kernel into the current context; call it before a graph capture."""
        if self._launchers is None:
            self._launchers = PrefillLaunchers(self.specialisation, self._geometry, self._portable)

    def run(self, params: PrefillParams) -> None:
        """Enqueue the call on its stream: no allocation, synchronisation, module load or host copy.

        Raises:
            FailedError: a launch was refused.
        """
        if self._launchers is None:
            self.preflight()
        assert self._launchers is not None
        k, p, call, g, stream = self._launchers, params, params.call, self._geometry, params.stream
        slots = {name: p.workspace + offset for name, offset in layout(g, call).offsets.items()}
        live, past = slots["rows"], slots["rows"] + 4 * call.batch
        pool, table, rope, output = p.past_key_value, p.kv_page_table, p.rope_rotary_cos_sin, p.attn_output
        shape = {"batch": call.batch, "seq_len": call.seq_len}
        paged = shape | {"pages_per_seq": call.pages_per_seq}
        rows = {"live": live, "past": 0}  # no call has a past yet; with one, this is `past`
        k.plan(
            stream,
            context_lengths=p.context_lengths,
            page_table=table,
            past_lengths=0,
            live=live,
            past=past,
            num_pages=call.num_pages,
            max_kv_len=call.max_kv_len,
            **paged,
        )
        k.write(
            stream,
            qkv=p.qkv,
            pool=pool,
            q_out=output,
            page_table=table,
            rope=rope,
            q_gamma=p.q_norm_gamma,
            k_gamma=p.k_norm_gamma,
            **rows,
            **paged,
        )
        k.block_pool(
            stream,
            index_qk=p.index_qk,
            pool=pool,
            page_table=table,
            rope=rope,
            weight=p.indexer_k_norm_gamma,
            **rows,
            **paged,
        )
        k.prefill_attn_dense(stream, q=output, pool=pool, out=output, page_table=table, **rows, **paged)
        if sparse_rows(g, call):
            self._run_sparse(k, params, slots, rows, shape)

    def _run_sparse(
        self, k: PrefillLaunchers, p: PrefillParams, slots: dict[str, int], rows: dict[str, int], shape: dict[str, int]
    ) -> None:
        """The rows from W on: score, select, merge, attend."""
        call, g, stream = p.call, self._geometry, p.stream
        span = {"row_begin": g.list_width, "rows": sparse_rows(g, call)}
        paged = {"pool": p.past_key_value, "page_table": p.kv_page_table, "pages_per_seq": call.pages_per_seq}
        k.qprep_rows(
            stream,
            index_qk=p.index_qk,
            out=slots["index_rows"],
            rope=p.rope_rotary_cos_sin,
            weight=p.indexer_q_norm_gamma,
            **rows,
            **shape,
            **span,
        )
        k.select_tiles(
            stream,
            queries=slots["index_rows"],
            scratch=slots["scores"],
            lists=slots["block_ids"],
            blocks=visible_blocks(g, call),
            **paged,
            **rows,
            **shape,
            **span,
        )
        lists = {"entries": slots["union"], "counts": slots["union_counts"]}
        k.union(stream, lists=slots["block_ids"], **lists, **rows, **shape, **span)
        k.prefill_attn(stream, q=p.attn_output, out=p.attn_output, **lists, **paged, **rows, **shape, **span)


__all__ = ["PrefillParams", "QsaSparsePrefillRunner"]
