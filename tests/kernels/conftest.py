"""Fixtures of the tests of kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from weft.kernels import blas


@pytest.fixture(params=["avx512", "avx512_tiled", "avx2", "plain", "plain_tiled"])
def _instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each of the instruction sets that weft's own operations may use, where this machine can run it."""
    library = ctypes.CDLL(str(blas.compiled_library()))
    if not library.weft_blas_kernels(request.param.encode()):
        pytest.skip(f"this machine can not run {request.param}")
    yield
    library.weft_blas_kernels(None)
