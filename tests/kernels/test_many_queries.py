"""Attention of a prompt's many queries at once: right, and a query has the bits it has alone, on every instruction set."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import weft.kernels.blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on macOS MLX brings its own BLAS")

Array = NDArray[np.float32]
KERNELS = ("avx512", "avx512_tiled", "avx2", "plain", "plain_tiled")
SHAPES = [
    (1, 1, 16, 40, 0),
    (4, 2, 32, 70, 3),
    (9, 3, 64, 65, 130),
    (6, 1, 48, 33, 1),
    (2, 2, 24, 50, 9),
]  # heads, of keys, dim, new, before


class Row(ctypes.Structure):
    """struct weft_row of native/weft.h."""

    _fields_ = [("keys", ctypes.c_void_p), ("values", ctypes.c_void_p)] + [
        (name, ctypes.c_size_t) for name in ("places", "first", "tokens", "line")
    ]


class Attention(ctypes.Structure):
    """struct weft_attention of native/weft.h."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in ("num_rows", "heads", "kv_heads", "dim", "q_stride", "half")),
        *((name, ctypes.c_void_p) for name in ("q", "angles", "norm")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("of_neighbours", ctypes.c_int),
        ("is_gated", ctypes.c_int),
        ("output", ctypes.c_void_p),
    ]


@pytest.fixture(params=KERNELS)
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """Our library with the kernels of one instruction set."""
    path, backend = weft.kernels.blas.compiled_library(), weft.kernels.blas.packaged_openblas()
    if path is None or backend is None:
        pytest.skip("weft was installed without a C compiler or without scipy-openblas32")
    own = ctypes.CDLL(str(path))
    assert own.weft_blas_open(backend.encode())
    if not own.weft_blas_kernels(request.param.encode()):
        pytest.skip(f"this machine can not run {request.param}")
    yield own
    own.weft_blas_kernels(None)


def attended(library: ctypes.CDLL, queries: Array, keys: Array, values: Array, first: int) -> Array:
    """queries (tokens, heads, dim) behind `first` tokens of keys and values (heads, places, dim); of twice dim: with gates."""
    (tokens, heads, width), (kv_heads, places, dim) = queries.shape, keys.shape
    output = np.full((tokens, heads, dim), np.nan, np.float32)
    row = Row(keys.ctypes.data, values.ctypes.data, places, first, tokens, 0)
    shape = (1, heads, kv_heads, dim, heads * width, 0)
    numbers = (dim**-0.5, 0.0, 0, width == 2 * dim)
    whole = Attention(ctypes.addressof(row), *shape, queries.ctypes.data, None, None, *numbers, output.ctypes.data)
    library.weft_attend(ctypes.byref(whole))
    return output


@pytest.mark.parametrize("parts", [1, 2], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_query_has_the_bits_it_has_alone(library: ctypes.CDLL, shape: tuple[int, int, int, int, int], parts: int) -> None:
    heads, kv_heads, dim, tokens, first = shape
    random = np.random.default_rng(3)
    queries = random.standard_normal((tokens, heads, parts * dim), np.float32) * 3
    keys, values = (random.standard_normal((kv_heads, first + tokens + 5, dim), np.float32) for _ in range(2))

    together = attended(library, queries, keys, values, first)
    alone = [attended(library, queries[token : token + 1], keys, values, first + token) for token in range(tokens)]

    assert together.tobytes() == np.concatenate(alone).tobytes()


def test_a_query_weighs_what_it_sees_as_attention_is_defined(library: ctypes.CDLL) -> None:
    tokens, heads, dim, first = 40, 3, 32, 7
    random = np.random.default_rng(4)
    queries = random.standard_normal((tokens, heads, dim), np.float32)
    keys, values = (random.standard_normal((1, first + tokens, dim), np.float32) for _ in range(2))

    scores = np.einsum("thd,sd->ths", queries.astype(np.float64), keys[0]) * dim**-0.5
    is_seen = np.arange(first + tokens)[None] <= first + np.arange(tokens)[:, None]
    weights = np.where(is_seen[:, None], np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    right = np.einsum("ths,sd->thd", weights / weights.sum(axis=-1, keepdims=True), values[0])

    np.testing.assert_allclose(attended(library, queries, keys, values, first), right, atol=2e-6)


def test_what_a_gated_query_finds_is_multiplied_by_its_gate(library: ctypes.CDLL) -> None:
    tokens, heads, dim, first = 40, 4, 32, 7
    random = np.random.default_rng(5)
    queries, gates = (random.standard_normal((tokens, heads, dim), np.float32) for _ in range(2))
    keys, values = (random.standard_normal((2, first + tokens, dim), np.float32) for _ in range(2))

    found = attended(library, np.concatenate([queries, gates], axis=-1), keys, values, first)

    np.testing.assert_allclose(found, attended(library, queries, keys, values, first) / (1 + np.exp(-gates)), atol=2e-6)
