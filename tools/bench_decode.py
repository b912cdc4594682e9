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
from qsa_plugin.decode_runner import DecodeParams, QsaSparseDecodeRunner
from qsa_plugin.launch import Launch
from qsa_plugin.specialisation import Specialisation, arch_of
from qsa_plugin.workspace import layout

GEOMETRY = Geometry(24, 2, 256, 4, 128, 2048, 4)
STEPS = 20
CASES: list[tuple[int, int]] = [(b, ctx) for b in (1, 16, 64) for ctx in (2048, 8192, 32768, 131072)]
#: Targets of the whole enqueue in us.
TARGETS = {(1, 2048): 9, (1, 8192): 11, (1, 32768): 12, (1, 131072): 15, (16, 8192): 34, (16, 32768): 38,
           (16, 131072): 65, (64, 8192): 80, (64, 32768): 108, (64, 131072): 205}  # fmt: skip


class Bench:
    """One pool for the largest case; smaller cases use its front."""

    def __init__(self, surface: str) -> None:
        torch.zeros(1, device="cuda")  # makes a context current
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


def profile() -> None:
    """One step of B=64, ctx 32768, for a profiler."""
    CASES[:] = [(64, 32768)]
    bench = Bench("float16")
    params, held = bench.params(64, 32768)
    bench.runner.run(params)
    torch.cuda.synchronize()
    del held


def attend_of(bench: Bench, params: DecodeParams) -> Launch:
    """The attention launch that a call takes."""
    launches, plan = bench.runner.prepare(params), bench.runner.plan(params.call)
    return launches.clustered[plan.splits] if plan.clustered else launches.attend


def measure(bench: Bench, batch: int, ctx: int) -> dict[str, object]:
    """Whole enqueue and stages of one case."""
    params, held = bench.params(batch, ctx)
    runner, stream = bench.runner, params.stream
    runner.run(params)
    whole, spread = bench.microseconds(lambda: runner.run(params))
    attend, plan = attend_of(bench, params), runner.plan(params.call)
    assert runner.launches is not None
    score = runner.launches.score_early if plan.dependent else runner.launches.score
    stages = {"score": bench.microseconds(lambda: score(stream, runner.parameters))[0]}
    if plan.clustered or plan.splits == 1:  # a merge in the workspace needs fresh counters
        stages["attend"] = bench.microseconds(lambda: attend(stream, runner.parameters))[0]
    del held
    split = f"{plan.splits} {'clustered' if plan.clustered else 'in the workspace'}"
    target = TARGETS.get((batch, ctx))
    print(f"B={batch} ctx={ctx}: {whole:.1f} us (+-{spread:.1f}), target {target}; splits {split};", stages)
    return {"batch": batch, "ctx": ctx, "us": whole, "spread_us": spread, "target_us": target, "splits": split,
            "stages_us": stages}  # fmt: skip


def distributions(n: int) -> dict[str, np.ndarray]:
    """Scores of one row whose selection should cost alike."""
    rng = np.random.default_rng(n)
    return {
        "normal": np.abs(rng.standard_normal(n)),
        "all equal": np.full(n, 2.5),
        "five values": rng.integers(0, 5, n),
        "400 high, the rest tied": np.where(rng.permutation(n) < 400, 9.0, 4.0),
        "all best in one place": np.where(np.arange(n) // 600 == 3, 5.0 + rng.random(n), rng.random(n)),
        "tiny steps": 1.0 + rng.permutation(n) * 2.0**-23,
        "sixty decades": 10.0 ** rng.uniform(-30, 30, n),
    }


def measure_selection(bench: Bench, ctx: int) -> dict[str, float]:
    """Attention with selection of one row, in us, for given scores; their blocks are cached alike after the first."""
    params, held = bench.params(1, ctx)
    bench.runner.run(params)
    attend, workspace, n = attend_of(bench, params), held[-1], ctx // GEOMETRY.indexer_compress_ratio
    offsets = layout(GEOMETRY, params.call).offsets
    times = {}
    for kind, scores in distributions(n).items():
        keys = np.asarray(scores, np.float32).view(np.int32) ^ np.int32(
            -(2**31)
        )  # as the sort keys of scores from 0 on
        host = torch.from_numpy(keys)
        for slot, values in (
            ("scores", host),
            ("maxima", torch.from_numpy(keys.view(np.uint32).reshape(-1, 16).max(1).view(np.int32))),
        ):
            raw = values.cuda().view(torch.uint8)
            workspace[offsets[slot] : offsets[slot] + raw.numel()] = raw
        times[kind] = bench.microseconds(lambda: attend(params.stream, bench.runner.parameters))[0]
    print(f"selection and attention, B=1 ctx={ctx}:", {kind: round(us, 2) for kind, us in times.items()})
    return times


def host_time(bench: Bench) -> float:
    """Median time of one enqueue on the host, in us, outside a graph."""
    params, held = bench.params(1, 8192)
    bench.runner.run(params)
    torch.cuda.synchronize()
    times = []
    for _ in range(300):
        start = time.perf_counter()
        bench.runner.run(params)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    del held
    return statistics.median(times)


def main(out: Path) -> None:
    """Run every case."""
    bench = Bench("float16")
    results = [measure(bench, batch, ctx) for batch, ctx in CASES]
    selections = {str(ctx): measure_selection(bench, ctx) for ctx in (8192, 32768, 131072)}
    params, held = bench.params(1, 8192, 131072 * 8)
    bench.runner.run(params)
    wide = bench.microseconds(lambda: bench.runner.run(params))[0]
    del held
    host = host_time(bench)
    print(f"B=1 ctx=8192 in tables for 1M tokens: {wide:.1f} us; host: {host:.1f} us an enqueue")
    record = {"device": torch.cuda.get_device_name(), "steps_a_graph": STEPS, "results": results,
              "selection_and_attention_us": selections, "wide_us": wide, "host_us": host}  # fmt: skip
    out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        profile()
