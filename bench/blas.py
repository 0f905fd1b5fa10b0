"""The CPU matrix product: MLX with and without what `weft.kernels.blas` binds, and OpenBLAS against our product at decode shapes.

Run `python bench/blas.py`. The weights of the second table are new to the caches at every call, as in decoding; the two
sides take turns, with a pause in between because OpenBLAS's threads keep a core busy for a while after each call.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import weft.kernels.blas

SHAPES = [(192, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576)]  # n, k of SmolLM2-135M
BATCHES = [1, 2, 4, 8, 16]
COLD_BYTES = 128 << 20  # weights to walk through, several times any cache here
TURNS = 3
PAUSE_SECONDS = 0.15

GEMM = """
import sys, time
import weft.kernels.blas
if sys.argv[1] == "bound":
    report = weft.kernels.blas.bind()
    print(f"bound: {report.name}, {report.threads} threads", file=sys.stderr)
import mlx.core as mx
a, b = mx.random.normal((1024, 1024)), mx.random.normal((1024, 1024))
mx.eval(a, b)
for product in (lambda: a @ b, lambda: a @ b.T):
    best = float("inf")
    for _ in range(int(sys.argv[2])):
        start = time.perf_counter()
        mx.eval(product())
        best = min(best, time.perf_counter() - start)
    print(2 * 1024**3 / best / 1e9)
"""


def main() -> None:
    """Print both tables."""
    whole_product()
    decode_shapes()


def whole_product() -> None:
    """float32 1024³ through MLX in a fresh process each, best of some."""
    stock, bound = gflops("stock", 3), gflops("bound", 30)
    print("float32 1024 x 1024 x 1024 through MLX, GFLOP/s")
    for name, slow, fast in zip(("a @ b", "a @ b.T (nn.Linear)"), stock, bound, strict=True):
        print(f"  {name:20} stock {slow:6.1f}   bound {fast:6.1f}   ratio {fast / slow:5.1f}")


def gflops(kind: str, turns: int) -> list[float]:
    """Both products in a process with or without the binding."""
    done = subprocess.run([sys.executable, "-c", GEMM, kind, str(turns)], stdout=subprocess.PIPE, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def decode_shapes() -> None:
    """Microseconds a call, x (m, k) by the weights (n, k) of a linear layer."""
    library, backend = weft.kernels.blas.compiled_library(), weft.kernels.blas.packaged_openblas()
    if library is None or backend is None:
        sys.exit("Our library or scipy-openblas32 is missing: reinstall weft with a C compiler present.")
    own, openblas = ctypes.CDLL(str(library)), ctypes.CDLL(backend)
    own.weft_blas_open(backend.encode())
    own.weft_blas_threads(weft.kernels.blas.default_threads())
    weft.kernels.blas.set_openblas_threads(openblas, weft.kernels.blas.default_threads())
    sides = [typed(openblas.scipy_cblas_sgemm), typed(own.cblas_sgemm)]
    print(f"decode shapes, microseconds a call, {weft.kernels.blas.default_threads()} threads, best of {TURNS} turns")
    for n, k in SHAPES:
        for m in BATCHES:
            theirs, ours = best_of_turns(sides, m, n, k)
            print(
                f"  n {n:5} k {k:4} m {m:2}   OpenBLAS {theirs:8.1f}   weft {ours:8.1f}   ratio {theirs / ours:4.2f}"
                f"   weights at {4e-3 * n * k / ours:4.1f} GB/s",
                flush=True,
            )


def best_of_turns(sides: list[Callable[..., None]], m: int, n: int, k: int) -> list[float]:
    """Microseconds a call of each side."""
    random = np.random.default_rng(0)
    x = random.standard_normal((m, k), np.float32)
    copies = max(1, COLD_BYTES // (4 * n * k))
    weights = random.standard_normal((copies, n, k), np.float32)
    out = np.empty((m, n), np.float32)
    best = [float("inf")] * len(sides)
    for _ in range(TURNS):
        for side, sgemm in enumerate(sides):
            time.sleep(PAUSE_SECONDS)
            best[side] = min(best[side], microseconds(sgemm, x, weights, out))
    return best


def microseconds(sgemm: Callable[..., None], x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> float:
    """The mean over all copies of the weights, one call each."""
    (m, k), (copies, n, _) = x.shape, weights.shape
    addresses = [copy.ctypes.data for copy in weights]
    start = time.perf_counter()
    for address in addresses:
        sgemm(101, 111, 112, m, n, k, 1, x.ctypes.data, k, address, k, 0, out.ctypes.data, n)
    return (time.perf_counter() - start) / copies * 1e6


def typed(function: Callable[..., None]) -> Callable[..., None]:
    """A cblas_sgemm with its C types."""
    whole, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    function.argtypes = [whole] * 6 + [real, address, whole, address, whole, real, address, whole]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


if __name__ == "__main__":
    main()
