"""SmolLM2 on a CPU from its packed file against a float32 copy of it: steps, prefill, bytes; `python -m bench.packed`.

Both in one process, taking turns. `--folder` times one folder alone, for comparing two checkouts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from weft.kernels import blas

BLAS = blas.bind()  # before mlx is imported

import mlx.core as mx  # noqa: E402

from bench.shapes import engine_at  # noqa: E402
from weft.config import EngineConfig  # noqa: E402
from weft.model.adapter import Adapter  # noqa: E402
from weft.model.loader import load  # noqa: E402
from weft.model.resolve import resolve  # noqa: E402

ROUNDS, STEPS, TOKENS = 5, 20, 1024
CONFIG = EngineConfig(max_rows=16, slab_tokens=8192, coarse_tokens=512, chunk_tokens=128, settle_first=True)


def main() -> None:
    """Print the least and the median milliseconds of every side and figure, over the rounds."""
    named = {"packed": resolve("smollm2", quantized=True), "float32": resolve("smollm2")}
    if "--folder" in sys.argv:
        named = {"folder": Path(sys.argv[sys.argv.index("--folder") + 1])}
    sides = {name: Adapter(load(folder)) for name, folder in named.items()}
    for name, adapter in sides.items():
        print(f"{name}: {adapter.weights_bytes / 1e6:.0f} MB of weights, {mx.__version__}, {BLAS.name}")
    figures: dict[str, dict[str, Callable[[], float]]] = {
        f"prefill of {TOKENS}": {name: prefill_of(adapter, CONFIG.chunk_tokens) for name, adapter in sides.items()},
        "the same at once": {name: prefill_of(adapter, None) for name, adapter in sides.items()},
    }
    for rows in (1, 8, 16):
        figures[f"step of {rows} rows"] = {name: steps_of(adapter, rows) for name, adapter in sides.items()}
    for what, timed in figures.items():
        found: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(ROUNDS):
            for name, measure in timed.items():
                found[name].append(1e3 * measure())
        print(f"  {what:18}", *(f"{n} {min(ms):7.1f} ({statistics.median(ms):.1f}) ms" for n, ms in found.items()), flush=True)


def prefill_of(adapter: Adapter, chunk_tokens: int | None) -> Callable[[], float]:
    """Return a function that prefills a prompt, in chunks as it is served or in one forward, and returns the seconds it took."""
    prompt = [7919 * place % 40000 for place in range(TOKENS)]

    def measure() -> float:
        start = time.perf_counter()
        adapter.prefilled_caches(prompt, chunk_tokens)
        return time.perf_counter() - start

    return measure


def steps_of(adapter: Adapter, rows: int) -> Callable[[], float]:
    """Return a function that runs some steps of an engine with so many rows and returns the least seconds of one."""
    engine = engine_at(adapter, CONFIG, [100] * rows)

    def measure() -> float:
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            engine.turn()
            times.append(time.perf_counter() - start)
        return min(times)

    return measure


if __name__ == "__main__":
    main()
