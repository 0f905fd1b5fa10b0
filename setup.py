"""The one part of weft that is compiled: the CPU matrix product for MLX on Linux.

Optional: without a C compiler the package installs all the same, and `weft.kernels.blas` says what is missing.
"""

import sys

from setuptools import Extension, setup

# It exports C symbols and no Python module: weft.kernels.blas loads it with ctypes before MLX is imported.
blas = Extension(
    "weft.kernels._blas",
    sources=["src/weft/kernels/native/sgemm.c"],
    depends=["src/weft/kernels/native/kernels.h", "src/weft/kernels/native/pool.h"],
    # No contraction, no fast math: the order of the additions is ours, and a row's bits depend on it.
    extra_compile_args=["-O3", "-g0", "-std=gnu11", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden"],
    libraries=["dl", "m", "pthread"],
    optional=True,
)

setup(ext_modules=[blas] if sys.platform == "linux" else [])
