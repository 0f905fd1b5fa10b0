"""Products for guesses: rough, but near the exact ones, and of a row its own whatever rows are beside it."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np
import pytest

from weft.kernels import blas, cpu

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

AFFINE, FLOAT32 = 3, 0  # of enum weft_kind in native/weft.h
Address = ctypes.c_void_p
Size = ctypes.c_size_t


class Weights(ctypes.Structure):
    """struct weft_weights."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "scale_kind")),
        *((name, Size) for name in ("n", "k", "bits", "group")),
        *((name, Address) for name in ("codes", "scales", "biases")),
    ]


class Linear(ctypes.Structure):
    """struct weft_linear."""

    _fields_ = [
        *((name, Size) for name in ("m", "lda", "ldc")),
        *((name, Address) for name in ("a", "bias", "residual", "c")),
        ("weights", ctypes.POINTER(Weights)),
    ]


def product(name: str, x: np.ndarray, packed: list[np.ndarray], outputs: int, residual: np.ndarray | None = None) -> np.ndarray:
    codes, scales, biases = packed
    weights = Weights(AFFINE, FLOAT32, outputs, x.shape[1], 4, 64, codes.ctypes.data, scales.ctypes.data, biases.ctypes.data)
    found = np.full((len(x), outputs), np.nan, np.float32)
    own = None if residual is None else residual.ctypes.data
    linear = Linear(len(x), x.shape[1], outputs, x.ctypes.data, None, own, found.ctypes.data, ctypes.pointer(weights))
    getattr(ctypes.CDLL(str(blas.compiled_library())), name)(ctypes.byref(linear))
    return found


def packed_weights(outputs: int, inputs: int) -> list[np.ndarray]:
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(outputs + inputs))
    return [np.array(part) for part in mx.quantize(weight, 64, 4)]


@pytest.mark.parametrize("inputs", [64, 128, 320, 1088])
@pytest.mark.parametrize("outputs", [1, 3, 4, 70])
def test_a_rough_product_is_near_the_exact_one(inputs: int, outputs: int) -> None:
    packed = packed_weights(outputs, inputs)
    x = np.random.default_rng(1).normal(size=(11, inputs)).astype(np.float32)
    residual = np.random.default_rng(2).normal(size=(11, outputs)).astype(np.float32)
    rough, exact = (product(name, x, packed, outputs, residual) for name in ("weft_rough", "weft_linear"))

    assert np.sqrt(np.mean((rough - exact) ** 2)) < 0.01 * np.sqrt(inputs)  # numbers have a spread of one times this root
    assert np.abs(rough - exact).max() < 0.04 * np.sqrt(inputs)


def test_a_row_is_rounded_by_itself() -> None:
    packed, random = packed_weights(37, 320), np.random.default_rng(3)
    x = (random.normal(size=(9, 320)) * random.lognormal(size=(9, 1), sigma=3)).astype(np.float32)
    x[4] = 0.0
    together = product("weft_rough", x, packed, 37)

    assert not together[4].any()
    for row in range(9):
        assert np.array_equal(product("weft_rough", x[row : row + 1], packed, 37)[0], together[row])
