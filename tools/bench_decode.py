"""Times whole decode enqueues and their kernels from CUDA-graph replays of 20 steps; writes JSON. Needs torch."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from qsa_plugin.contract import Call, Geometry, Mode
from qsa_plugin.decode_runner import DECODE_KERNELS, DecodeParams, QsaSparseDecodeRunner
from qsa_plugin.specialisation import Specialisation, arch_of
from qsa_plugin.workspace import layout

GEOMETRY = Geometry(24, 2, 256, 4, 128, 2048, 4)
STEPS = 20
CASES = [(b, ctx) for b in (1, 16, 64) for ctx in (2048, 8192, 32768, 131072)]
#: Targets of the whole enqueue in us.
TARGETS = {(1, 2048): 9, (1, 8192): 11, (1, 32768): 12, (1, 131072): 15, (16, 8192): 34, (16, 32768): 38,
           (16, 131072): 65, (64, 8192): 80, (64, 32768): 108, (64, 131072): 205}  # fmt: skip


class Bench:
    """One pool for the largest case; smaller cases use its front."""

    def __init__(self, surface: str) -> None:
        spec = Specialisation.of(GEOMETRY, surface, 64, arch_of(torch.cuda.get_device_capability()))
        self.runner = QsaSparseDecodeRunner(spec, GEOMETRY)
        self.runner.preflight()
        self.dtype = getattr(torch, surface)
        pages = max(b * ctx // 128 for b, ctx in CASES)
        row = 128 * GEOMETRY.num_kv_heads * GEOMETRY.pool_width
        self.pool = torch.empty(2 * pages * row, dtype=self.dtype, device="cuda")
        for piece in self.pool.split(1 << 30):
            piece.normal_()
        self.stream = torch.cuda.Stream()

    def params(self, batch: int, ctx: int, capacity: int | None = None) -> tuple[DecodeParams, list]:
        """One call of `batch` rows of `ctx` tokens in tables of `capacity` tokens."""
        g, slots = GEOMETRY, (capacity or ctx) // 128
        live = -(-ctx // 128)
        pages = batch * live
        rng = np.random.default_rng(batch + ctx)
        table = np.full((batch, 2, slots), -1, np.int32)
        for plane in (0, 1):
            table[:, plane, :live] = rng.permutation(pages).reshape(batch, live) + plane * pages
        call = Call(Mode.DECODE, batch, 1, pages, slots, slots * 128, 64)
        new = lambda *shape: torch.randn(*shape, device="cuda").to(self.dtype)  # noqa: E731
        held = [
            new(batch, 1, g.qkv_width),
            new(batch, 1, g.index_width),
            self.pool,
            torch.full((batch,), ctx, dtype=torch.int32, device="cuda"),
            torch.randn(slots * 128, 64, device="cuda"),
            torch.from_numpy(table).cuda(),
            new(g.head_size),
            new(g.head_size),
            new(g.indexer_head_dim),
            new(g.indexer_head_dim),
            new(batch, 1, g.num_q_heads, g.head_size),
            torch.empty(layout(g, call).size, dtype=torch.uint8, device="cuda"),
        ]
        return DecodeParams(call, *(t.data_ptr() for t in held), self.stream.cuda_stream), held

    def microseconds(self, work, repeats: int = 15) -> tuple[float, float]:
        """(median, spread) of one step of `work`, from graph replays."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(STEPS):
                work()
        times = []
        for i in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(start.elapsed_time(end) * 1000 / STEPS)
        return statistics.median(times), max(times) - min(times)


def main(out: Path) -> None:
    """Run every case."""
    bench = Bench("float16")
    results = []
    for batch, ctx in CASES:
        params, held = bench.params(batch, ctx)
        run = bench.runner.run
        run(params)
        whole, spread = bench.microseconds(lambda: run(params))
        stages = {}
        for name, launch in zip(DECODE_KERNELS, bench.runner._launches, strict=True):
            if name == "decode_append":
                continue
            if name == "decode_score" and ctx <= 2048:
                continue
            if name == "decode_attend":  # a merge needs fresh counters: time it with kernel 1 and take the difference
                append = bench.runner._launches[0]

                def both(append=append, launch=launch):
                    append(params.stream, bench.runner._parameters)
                    launch(params.stream, bench.runner._parameters)

                stages["decode_append"] = bench.microseconds(
                    lambda append=append: append(params.stream, bench.runner._parameters)
                )[0]
                stages[name] = bench.microseconds(both)[0] - stages["decode_append"]
            else:
                stages[name] = bench.microseconds(
                    lambda launch=launch: launch(params.stream, bench.runner._parameters)
                )[0]
        target = TARGETS.get((batch, ctx))
        results.append(
            {"batch": batch, "ctx": ctx, "us": whole, "spread_us": spread, "target_us": target, "stages": stages}
        )
        print(
            f"B={batch} ctx={ctx}: {whole:.1f} us (+-{spread:.1f}), target {target}",
            {k: round(v, 1) for k, v in stages.items()},
        )
        del held
    params, held = bench.params(1, 8192, 131072 * 8)
    bench.runner.run(params)
    wide = bench.microseconds(lambda: bench.runner.run(params))[0]
    print(f"B=1 ctx=8192 in tables for 1M tokens: {wide:.1f} us")
    params, held = bench.params(1, 8192)
    torch.cuda.synchronize()
    host = []
    for _ in range(300):
        start = time.perf_counter()
        bench.runner.run(params)
        host.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    print(f"host: {statistics.median(host):.1f} us an enqueue")
    out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results, "wide_us": wide,
                               "host_us": statistics.median(host)}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
