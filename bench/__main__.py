"""`make bench`: the engine on SmolLM2 in float32 against a bare loop over the same model, each as a ratio in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from weft.llm import BLAS, LLM  # binds the BLAS before mlx is imported

import mlx.core as mx  # isort: skip
import numpy as np

from bench import blas, front, gated_delta, grammar, overload, prefixes, speculation
from bench.shapes import bare_step, dense_caches, engine_at, median_ms
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.kernels.attention import grouped_attention
from weft.model.adapter import Adapter

SHORT, LONG = 100, 2048
ROUNDS = 15


def main() -> None:
    """Print every ratio with its bar."""
    llm = LLM("smollm2")
    adapter = llm.engine.adapter
    print(f"smollm2, float32, {BLAS.name} with {BLAS.threads} threads; medians of {ROUNDS} alternating rounds")
    decode(llm, adapter)
    one_long_row(llm, adapter)
    held_bytes(llm, adapter)
    token_gaps(llm, adapter)
    blas.whole_product()
    gated_delta.main()
    grammar.constrained_batch(llm)
    front.main()
    prefixes.main()
    overload.main()
    speculation.main()


def say(what: str, ratio: float, bar: str, detail: str = "") -> None:
    """One line of the table."""
    print(f"  {what:68} {ratio:6.2f}   wanted {bar:8} {detail}", flush=True)


def alternate(sides: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Median of each side's round medians, the sides taking turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, step in sides.items():
            times[name].append(median_ms(step, steps))
    return {name: statistics.median(found) for name, found in times.items()}


def decode(llm: LLM, adapter: Adapter) -> None:
    """The engine's tokens per second over a bare loop `model(tokens, cache)` + argmax at the same batch size."""
    for rows in (1, 8):
        bare = bare_step(adapter.model, dense_caches(adapter.model, rows, SHORT), rows)
        engine = engine_at(adapter, llm.config, [SHORT] * rows)
        found = alternate({"bare": bare, "engine": engine.turn}, 6)
        detail = f"({found['engine']:.1f} ms a step against {found['bare']:.1f})"
        say(f"decode tokens/s at batch {rows}: engine over bare loop", found["bare"] / found["engine"], "≥ 0.95", detail)


def one_long_row(llm: LLM, adapter: Adapter) -> None:
    """What seven short rows pay for a long neighbour: no more than its own attention."""
    eight = engine_at(adapter, llm.config, [SHORT] * 8)
    mixed = engine_at(adapter, llm.config, [SHORT] * 7 + [LONG])
    layers = [spec for spec in adapter.specs if hasattr(spec, "keys")]
    keys = [mx.random.normal((1, spec.keys.heads, LONG, spec.keys.dim)) for spec in layers]
    queries = mx.random.normal((1, llm.loaded.config["num_attention_heads"], 1, layers[0].keys.dim))
    mx.eval(keys, queries)
    found = alternate(
        {
            "eight": eight.turn,
            "mixed": mixed.turn,
            "attention": lambda: mx.eval([grouped_attention(queries, key, key, 0.125, None) for key in keys]),
        },
        5,
    )
    detail = f"({found['mixed']:.1f} ms against {found['eight']:.1f} + {found['attention']:.1f})"
    say(
        "step of 7 short rows and one of 2,048 over 8 short + its attention",
        found["mixed"] / (found["eight"] + found["attention"]),
        "≤ 1.35",
        detail,
    )


def held_bytes(llm: LLM, adapter: Adapter) -> None:
    """Bytes of slabs over bytes their tokens need, while requests of mixed lengths come and go."""
    rng = np.random.default_rng(0)
    engine = Engine(adapter, llm.config)
    held, needed = [], []
    waiting = [int(length) for length in np.exp(rng.uniform(np.log(30), np.log(2000), 24))]
    while waiting or not engine.idle:
        if waiting and len(engine.scheduler.running) < 8:
            engine.submit([1] * waiting.pop(), Sampling(temperature=0.0, max_tokens=int(rng.integers(10, 60)), ignore_eos=True))
        engine.turn()
        if engine.runner.pool.rows:
            held.append(engine.runner.pool.bytes_held)
            pool = engine.runner.pool
            needed.append(sum(spec.bytes_at(row.length) for row in pool.rows for spec in pool.specs))
    say(
        "bytes held by live rows over what their tokens need, mixed load",
        sum(held) / sum(needed),
        "≤ 1.5",
        f"(24 requests, {len(held)} steps, prompts 30 to 2,000)",
    )


def token_gaps(llm: LLM, adapter: Adapter) -> None:
    """The gap between a neighbour's tokens while a prompt of 2,048 tokens is computed, over its quiet gap."""
    engine = engine_at(adapter, llm.config, [SHORT] * 4)
    engine = _with_gap(engine, llm)
    quiet, busy = [], []
    for _ in range(30):
        start = time.perf_counter()
        engine.turn()
        quiet.append(time.perf_counter() - start)
    prompt = engine.submit([1] * LONG, Sampling(temperature=0.0, max_tokens=4, ignore_eos=True))
    begun = time.perf_counter()
    while not prompt.output:
        start = time.perf_counter()
        engine.turn()
        busy.append(time.perf_counter() - start)
    took = time.perf_counter() - begun
    ratio = float(np.percentile(busy, 95) / np.median(quiet))
    say(
        "p95 token gap beside a 2,048-token prefill over the quiet gap",
        ratio,
        "≤ 3",
        f"({len(busy)} tokens meanwhile, {LONG / took:.0f} prompt tok/s)",
    )


def _with_gap(engine: Engine, llm: LLM) -> Engine:
    engine.scheduler.config = llm.config  # `engine_at` puts prompts first; here the default is what is measured
    return engine


if __name__ == "__main__":
    main()
