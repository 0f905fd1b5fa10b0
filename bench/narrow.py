"""Without AVX-512: our product, and a model's steps and prompts over it, against OpenBLAS on the same instructions.

`python -m bench.narrow` compares products in one process: kernels are forced to AVX2, OpenBLAS takes those it has for a
Haswell; one thread's processor time, the sides by turns, least of several. `python -m bench.narrow model` compares SmolLM2 as
weft serves it (packed, from its file) with mlx-lm over float32 weights, where OpenBLAS computes products of more than twelve
rows and our kernels the others: processes by turns, all cores, the wall's time.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ |= {"OPENBLAS_CORETYPE": "Haswell"}  # before it is loaded

import numpy as np

from bench.blas import typed
from weft.kernels import blas

SHAPES = [(576, 576), (576, 1536), (1536, 576)]  # n, k of SmolLM2-135M
ROWS = [1, 4, 8, 12, 16, 24, 48, 128, 256, 1024]
TURNS, TURN_SECONDS = 10, 0.01
STEP_ROWS, PROMPT_TOKENS = [1, 4, 8, 16, 32, 48], [32, 128, 512, 1024]
MODEL_TURNS, STEPS, REPEATS, CONTEXT = 3, 15, 3, 100


def main() -> None:
    """Print both sides of every figure, and their ratio: above 1 weft is faster."""
    if "model" in sys.argv:
        compare_models()
    elif "weft" in sys.argv or "mlx-lm" in sys.argv:
        print(json.dumps((of_weft if "weft" in sys.argv else of_mlx_lm)()))
    else:
        compare_products()


def compare_products() -> None:
    """Print GFLOP/s of both sides for every shape and number of rows."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    library, backend = blas.compiled_library(), blas.packaged_openblas()
    if library is None or backend is None:
        sys.exit("Our library or scipy-openblas32 is missing: reinstall weft with a C compiler present.")
    own = ctypes.CDLL(str(library))
    own.weft_blas_open(backend.encode())
    own.weft_blas_threads(1)
    force_avx2(own)
    sides = [typed(ctypes.CDLL(backend).scipy_cblas_sgemm), typed(own.cblas_sgemm)]
    for n, k in SHAPES:
        for m in ROWS:
            theirs, ours = speeds(sides, m, n, k)
            print(
                f"  n {n:5} k {k:4} m {m:4}   OpenBLAS {theirs:6.1f}   weft {ours:6.1f} GFLOP/s   ratio {ours / theirs:4.2f}",
                flush=True,
            )


def force_avx2(own: ctypes.CDLL) -> None:
    """Have the kernels of a machine without AVX-512."""
    if not own.weft_blas_kernels(b"avx2"):
        sys.exit("This processor has no AVX2.")


def speeds(sides: list[Callable[..., None]], m: int, n: int, k: int) -> list[float]:
    """Return the GFLOP/s of x (m, k) by weights (n, k), of each side."""
    rng = np.random.default_rng(m)
    x, w, y = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k), (m, n)))
    flops, least = 2 * m * n * k, [float("inf")] * len(sides)
    calls = max(1, int(TURN_SECONDS * 1e11 / flops))
    for _ in range(TURNS):
        for i, product in enumerate(sides):
            start = time.thread_time()
            for _ in range(calls):
                product(101, 111, 112, m, n, k, 1.0, x.ctypes.data, k, w.ctypes.data, k, 0.0, y.ctypes.data, n)
            least[i] = min(least[i], (time.thread_time() - start) / calls)
    return [flops / seconds / 1e9 for seconds in least]


def compare_models() -> None:
    """Print the least milliseconds of both sides for every figure."""
    found: dict[str, dict[str, float]] = {"weft": {}, "mlx-lm": {}}
    for _ in range(MODEL_TURNS):
        for side, least in found.items():
            ended = subprocess.run([sys.executable, "-m", "bench.narrow", side], stdout=subprocess.PIPE, text=True, check=True)
            for figure, ms in json.loads(ended.stdout.splitlines()[-1]).items():
                least[figure] = min(ms, least.get(figure, ms))
    for figure, theirs in found["mlx-lm"].items():
        ours = found["weft"][figure]
        print(f"  {figure:22} mlx-lm {theirs:8.1f}   weft {ours:8.1f} ms   ratio {theirs / ours:5.2f}", flush=True)


def bound(*, exact: bool) -> None:
    """Bind our library for MLX, with the kernels of a machine without AVX-512."""
    blas.bind(exact=exact)
    force_avx2(ctypes.CDLL(str(blas.compiled_library())))


def least_ms(run: Callable[[], object], repeats: int) -> float:
    """Return the least milliseconds of some calls, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def tokens(count: int) -> list[int]:
    """Return a prompt of so many tokens."""
    return [7919 * place % 40000 for place in range(count)]


def of_weft() -> dict[str, float]:
    """The milliseconds of weft's steps and prompts."""
    bound(exact=True)
    from bench.shapes import engine_at
    from weft.config import EngineConfig
    from weft.model.adapter import Adapter
    from weft.model.loader import load
    from weft.model.resolve import resolve

    adapter, found = Adapter(load(resolve("smollm2", quantized=True))), {}
    for count in PROMPT_TOKENS:
        found[f"prompt of {count} tokens"] = least_ms(partial(adapter.prefilled_caches, tokens(count)), REPEATS)
    for rows in STEP_ROWS:
        engine = engine_at(
            adapter, EngineConfig(max_rows=rows, slab_tokens=8192, chunk_tokens=128, settle_first=True), [CONTEXT] * rows
        )
        found[f"step of {rows} rows"] = least_ms(engine.turn, STEPS)
    return found


def of_mlx_lm() -> dict[str, float]:
    """The milliseconds of mlx-lm's steps and prompts."""
    bound(exact=False)
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    from bench.shapes import bare_step
    from weft.model.resolve import resolve

    model = load_model(resolve("smollm2"))[0]
    model.set_dtype(mx.float32)

    def read(ids: mx.array) -> list[Any]:
        cache = make_prompt_cache(model)
        model(ids, cache=cache)
        mx.eval([one.state for one in cache])  # and no logits, which a prompt does not need
        return cache

    found = {}
    for count in PROMPT_TOKENS:
        found[f"prompt of {count} tokens"] = least_ms(partial(read, mx.array([tokens(count)])), REPEATS)
    for rows in STEP_ROWS:
        cache = read(mx.array([tokens(CONTEXT)] * rows))
        found[f"step of {rows} rows"] = least_ms(bare_step(model, cache, rows), STEPS)
    return found


if __name__ == "__main__":
    main()
