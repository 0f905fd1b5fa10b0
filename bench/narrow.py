"""Our product without AVX-512 against OpenBLAS on the same instructions; `python -m bench.narrow`.

Kernels are forced to AVX2, OpenBLAS takes those it has for a Haswell. One thread's processor time; the sides take turns, least of
several.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable

os.environ |= {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1"}  # before it is loaded

import numpy as np

from bench.blas import typed
from weft.kernels import blas

SHAPES = [(576, 576), (576, 1536), (1536, 576)]  # n, k of SmolLM2-135M
ROWS = [1, 4, 8, 12, 16, 24, 48, 128, 256, 1024]
TURNS, TURN_SECONDS = 10, 0.01


def main() -> None:
    """Print GFLOP/s of both sides for every shape and number of rows."""
    library, backend = blas.compiled_library(), blas.packaged_openblas()
    if library is None or backend is None:
        sys.exit("Our library or scipy-openblas32 is missing: reinstall weft with a C compiler present.")
    own = ctypes.CDLL(str(library))
    own.weft_blas_open(backend.encode())
    own.weft_blas_threads(1)
    if not own.weft_blas_kernels(b"avx2"):
        sys.exit("This processor has no AVX2.")
    sides = [typed(ctypes.CDLL(backend).scipy_cblas_sgemm), typed(own.cblas_sgemm)]
    for n, k in SHAPES:
        for m in ROWS:
            theirs, ours = speeds(sides, m, n, k)
            print(
                f"  n {n:5} k {k:4} m {m:4}   OpenBLAS {theirs:6.1f}   weft {ours:6.1f} GFLOP/s   ratio {ours / theirs:4.2f}",
                flush=True,
            )


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


if __name__ == "__main__":
    main()
