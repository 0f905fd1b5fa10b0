"""The CPU matrix product: right, the same for a row in any company, and really bound into MLX."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import weft.kernels.blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on macOS MLX brings its own BLAS")

Array = NDArray[np.float32]
ROW_MAJOR, COLUMN_MAJOR, NO_TRANS, TRANS = 101, 102, 111, 112
KERNELS = ("avx512", "avx512_tiled", "avx2", "plain", "plain_tiled")
SHAPES = [  # m, n, k: around the tiles, the lanes, the panels, and the sizes from which threads are asked
    (2, 1, 1), (3, 6, 15), (5, 7, 16), (4, 12, 17), (7, 13, 31), (9, 64, 64), (16, 100, 128), (33, 50, 576),
    (17, 192, 576), (6, 1536, 576), (12, 300, 1000), (130, 66, 1536), (300, 70, 64), (8, 512, 300), (103, 9, 1601),
]  # fmt: skip
LONG = [(21, 25, 4100), (32, 24, 2064), (35, 31, 2049), (101, 65, 2071)]  # rows of several stretches, where they are tiled


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """Our library, opened; its settings are put back afterwards."""
    path, backend = weft.kernels.blas.compiled_library(), weft.kernels.blas.packaged_openblas()
    if path is None or backend is None:
        pytest.skip("weft was installed without a C compiler or without scipy-openblas32")
    own = ctypes.CDLL(str(path))
    assert own.weft_blas_open(backend.encode())
    threads = own.weft_blas_threads(2)
    yield own
    own.weft_blas_kernels(None)
    own.weft_blas_exact(1)
    own.weft_blas_threads(threads)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def sgemm_of(library: ctypes.CDLL, name: str = "cblas_sgemm") -> Callable[..., None]:
    function = getattr(library, name)
    whole, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    function.argtypes = [whole] * 6 + [real, address, whole, address, whole, real, address, whole]
    function.restype = None
    return function  # type: ignore[no-any-return]


def multiply(library: ctypes.CDLL, a: Array, b: Array, *, turned: bool, name: str = "cblas_sgemm") -> Array:
    """a b, or a b^T if b is turned, with memory as MLX hands it over."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    (m, k), n = a.shape, b.shape[0] if turned else b.shape[1]
    c = np.full((m, n), np.nan, np.float32)  # beta = 0 must not read this
    trans = TRANS if turned else NO_TRANS
    sgemm = sgemm_of(library, name)
    sgemm(ROW_MAJOR, NO_TRANS, trans, m, n, k, 1, a.ctypes.data, k, b.ctypes.data, b.shape[1], 0, c.ctypes.data, n)
    return c


def matrices(random: np.random.Generator, m: int, n: int, k: int, turned: bool) -> tuple[Array, Array]:
    a = random.standard_normal((m, k), np.float32)
    return a, random.standard_normal((n, k) if turned else (k, n), np.float32)


def assert_close(c: Array, a: Array, b: Array) -> None:
    exact = a.astype(np.float64) @ b
    np.testing.assert_allclose(c, exact, rtol=0, atol=2e-6 * a.shape[1] ** 0.5 * 4)


def available(library: ctypes.CDLL) -> list[str]:
    return [name for name in KERNELS if library.weft_blas_kernels(name.encode())]


def fused(library: ctypes.CDLL) -> list[str]:
    """Those with a fused multiply-add."""
    return [name for name in available(library) if not name.startswith("plain")]


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_has_the_same_bits_in_any_company(
    library: ctypes.CDLL, random: np.random.Generator, kernel: str, turned: bool
) -> None:
    if not library.weft_blas_kernels(kernel.encode()):
        pytest.skip(f"this machine can not run {kernel}")
    for m, n, k in SHAPES + LONG * turned:
        a, b = matrices(random, m, n, k, turned)
        together = multiply(library, a, b, turned=turned)
        assert_close(together, a, b.T if turned else b)

        for row in random.choice(m, min(m, 8), replace=False):
            alone = multiply(library, a[row : row + 1], b, turned=turned)
            assert alone.tobytes() == together[row : row + 1].tobytes(), (m, n, k, row)
        for size in {2, 3, 5, m // 2, m - 1} & set(range(1, m)):
            rows = random.choice(m, size, replace=False)
            assert multiply(library, a[rows], b, turned=turned).tobytes() == together[rows].tobytes(), (m, n, k, size)


@pytest.mark.parametrize("turned", [True, False])
def test_the_number_of_threads_does_not_change_the_bits(library: ctypes.CDLL, random: np.random.Generator, turned: bool) -> None:
    for m, n, k in SHAPES:
        a, b = matrices(random, m, n, k, turned)
        results = set()
        for threads in (1, 2, 3):
            library.weft_blas_threads(threads)
            results.add(multiply(library, a, b, turned=turned).tobytes())

        assert len(results) == 1, (m, n, k)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_kernels_that_multiply_and_add_alike_agree_bit_for_bit(
    library: ctypes.CDLL, random: np.random.Generator, kind: str, turned: bool
) -> None:
    alike = fused(library) if kind == "fused" else [name for name in available(library) if name.startswith("plain")]
    if len(alike) < 2:
        pytest.skip("this machine has only one of them")
    for m, n, k in SHAPES + LONG * turned:
        a, b = matrices(random, m, n, k, turned)
        results = set()
        for name in alike:
            library.weft_blas_kernels(name.encode())
            results.add(multiply(library, a, b, turned=turned).tobytes())

        assert len(results) == 1, (m, n, k)


def test_masked_positions_at_the_end_do_not_change_the_bits_of_attention(
    library: ctypes.CDLL, random: np.random.Generator
) -> None:
    for rows, length, padded in [(1, 17, 32), (3, 100, 101), (1, 300, 512), (64, 70, 200)]:
        probabilities, values = matrices(random, rows, 64, padded, turned=False)
        probabilities[:, length:] = 0

        short = multiply(library, probabilities[:, :length], values[:length], turned=False)
        assert multiply(library, probabilities, values, turned=False).tobytes() == short.tobytes()


class Scores(ctypes.Structure):
    """struct weft_scores of native/weft.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("m", "span", "k", "ldq", "ldk", "ld_bias", "tokens")] + [
        (name, ctypes.c_void_p) for name in ("q", "keys", "bias", "c")
    ]


class Rotation(ctypes.Structure):
    """struct weft_rotation of native/weft.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "angles", "y")]
        + [(name, ctypes.c_size_t) for name in ("m", "n", "half", "x_rows", "x_stride")]
        + [(name, ctypes.c_size_t) for name in ("batch_rows", "batch_angles", "repeat", "tokens")]
        + [("of_neighbours", ctypes.c_int)]
    )


def attention_weights(library: ctypes.CDLL, queries: Array, keys: Array, tokens: int, bias: Array | None = None) -> Array:
    """The softmax of queries by keys."""
    (m, k), n = queries.shape, keys.shape[0]
    queries, keys = np.ascontiguousarray(queries), np.ascontiguousarray(keys)
    weights = np.full((m, n), np.nan, np.float32)
    bias_at = None if bias is None else bias.ctypes.data
    library.weft_scores(
        ctypes.byref(Scores(m, n, k, k, k, n, tokens, queries.ctypes.data, keys.ctypes.data, bias_at, weights.ctypes.data))
    )
    return weights


def gate(library: ctypes.CDLL, x: Array) -> Array:
    y = np.full_like(x, np.nan)
    library.weft_silu(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(x.size))
    return y


def norm(library: ctypes.CDLL, x: Array, weight: Array, eps: float) -> Array:
    y = np.full_like(x, np.nan)
    x_at, weight_at, y_at = (array.ctypes.data_as(ctypes.c_void_p) for array in (x, weight, y))
    library.weft_norm(x_at, weight_at, ctypes.c_float(eps), y_at, ctypes.c_size_t(x.shape[0]), ctypes.c_size_t(x.shape[1]))
    return y


def turned_by(library: ctypes.CDLL, x: Array, angles: Array, of_neighbours: int) -> Array:
    (m, n), half, y = x.shape, angles.shape[1] // 2, np.full_like(x, np.nan)
    rotation = Rotation(x.ctypes.data, angles.ctypes.data, y.ctypes.data, m, n, half, m, 0, m, m, 1, m, of_neighbours)
    library.weft_rotate(ctypes.byref(rotation))
    return y


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(1, 5), (3, 16), (2, 576), (70, 130)])
def test_gates_norms_and_turns_are_right_on_every_machine(
    library: ctypes.CDLL, random: np.random.Generator, kernel: str, shape: tuple[int, int]
) -> None:
    if not library.weft_blas_kernels(kernel.encode()):
        pytest.skip(f"this machine can not run {kernel}")
    x = (random.standard_normal(shape, np.float32) * 9).astype(np.float32)
    exact = x.astype(np.float64)

    weight = random.standard_normal((1, shape[1]), np.float32)
    np.testing.assert_allclose(gate(library, x), exact / (1 + np.exp(-exact)), rtol=2e-5, atol=1e-6)
    root = np.sqrt((exact**2).mean(axis=1, keepdims=True) + 0.25)
    np.testing.assert_allclose(norm(library, x, weight, 0.25), exact / root * weight, rtol=2e-5, atol=1e-6)

    half = shape[1] // 3  # the last numbers are left as they are
    turns = random.standard_normal((shape[0], half))
    angles = np.concatenate([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)
    for of_neighbours in (0, 1):
        right = exact.copy()
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if of_neighbours else (slice(half), slice(half, 2 * half))
        right[:, first] = exact[:, first] * np.cos(turns) - exact[:, second] * np.sin(turns)
        right[:, second] = exact[:, first] * np.sin(turns) + exact[:, second] * np.cos(turns)
        np.testing.assert_allclose(turned_by(library, x, angles, of_neighbours), right, atol=1e-5)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_weights_of_attention_are_right_and_a_row_has_them_in_any_company(
    library: ctypes.CDLL, random: np.random.Generator, kernel: str
) -> None:
    if not library.weft_blas_kernels(kernel.encode()):
        pytest.skip(f"this machine can not run {kernel}")
    for m, n, k in [(1, 1, 4), (1, 16, 8), (3, 5, 7), (12, 33, 64), (6, 700, 64), (100, 333, 80)]:
        queries, keys = matrices(random, m, n, k, turned=True)
        queries *= 3
        scores = queries.astype(np.float64) @ keys.T
        bias = np.where(random.random((m, n)) < 0.5, 0, -1e30).astype(np.float32)
        bias[:, 0] = 0

        together = attention_weights(library, queries, keys, 0)
        masked = attention_weights(library, queries, keys, 0, bias)

        np.testing.assert_allclose(together, softmax(scores), atol=3e-6)
        np.testing.assert_allclose(masked, softmax(scores + bias), atol=3e-6)
        assert not masked[bias < 0].any()
        for row in range(m):
            assert attention_weights(library, queries[row : row + 1], keys, 0).tobytes() == together[row : row + 1].tobytes()


def test_a_token_sees_up_to_itself_in_whichever_chunk_it_comes(library: ctypes.CDLL, random: np.random.Generator) -> None:
    heads, tokens, span = 3, 20, 150
    queries, keys = matrices(random, heads * tokens, span, 64, turned=True)
    whole = attention_weights(library, queries, keys, tokens).reshape(heads, tokens, span)

    for chunk in (1, 7, 19):
        seen = span - tokens + chunk
        some = np.ascontiguousarray(queries.reshape(heads, tokens, 64)[:, :chunk].reshape(-1, 64))
        found = attention_weights(library, some, keys[:seen], chunk).reshape(heads, chunk, seen)
        assert found.tobytes() == np.ascontiguousarray(whole[:, :chunk, :seen]).tobytes()
    scores = (queries.astype(np.float64) @ keys.T).reshape(heads, tokens, span)
    is_seen = np.arange(span) <= np.arange(span - tokens, span)[:, None]
    np.testing.assert_allclose(whole, softmax(np.where(is_seen, scores, -np.inf)), atol=3e-6)


def test_kernels_agree_on_the_weights_of_attention_and_threads_do_not_matter(
    library: ctypes.CDLL, random: np.random.Generator
) -> None:
    queries, keys = matrices(random, 48, 700, 64, turned=True)
    results = set()
    for name in fused(library):
        library.weft_blas_kernels(name.encode())
        for threads in (1, 2, 3):
            library.weft_blas_threads(threads)
            results.add(attention_weights(library, queries, keys, 16).tobytes())

    assert len(results) <= 1


def test_a_number_that_is_none_is_not_hidden_by_the_softmax(library: ctypes.CDLL, random: np.random.Generator) -> None:
    queries, keys = matrices(random, 2, 40, 64, turned=True)
    keys[17, 3] = np.nan

    assert np.isnan(attention_weights(library, queries, keys, 0)).all()


def test_scales_strides_and_turned_rows_are_honoured(library: ctypes.CDLL, random: np.random.Generator) -> None:
    m, n, k = 5, 21, 37
    sgemm = sgemm_of(library)
    for turned in (True, False):
        a, b = matrices(random, m, n, k, turned)
        wide = random.standard_normal((b.shape[0], b.shape[1] + 5), np.float32)
        wide[:, : b.shape[1]] = b
        upright = np.ascontiguousarray(a.T)  # (k, m), read as its transpose
        c = random.standard_normal((m, n + 3), np.float32)
        before = c.copy()
        sgemm(ROW_MAJOR, TRANS, TRANS if turned else NO_TRANS, m, n, k, 0.5, upright.ctypes.data, m,
              wide.ctypes.data, b.shape[1] + 5, 2, c.ctypes.data, n + 3)  # fmt: skip

        product = a.astype(np.float64) @ (b.T if turned else b)
        np.testing.assert_allclose(c[:, :n], 0.5 * product + 2 * before[:, :n], atol=1e-4)
        assert c[:, n:].tobytes() == before[:, n:].tobytes()


def test_weights_by_a_vector_have_the_bits_of_a_vector_by_weights(library: ctypes.CDLL, random: np.random.Generator) -> None:
    weights, vector = matrices(random, 70, 1, 100, turned=False)

    column = multiply(library, weights, vector, turned=False)
    assert column.tobytes() == multiply(library, vector.T, weights, turned=True).tobytes()


def test_what_is_not_ours_is_forwarded(library: ctypes.CDLL, random: np.random.Generator) -> None:
    a, b = matrices(random, 4, 6, 5, turned=False)
    c = np.zeros((4, 6), np.float32)
    sgemm_of(library)(COLUMN_MAJOR, NO_TRANS, NO_TRANS, 6, 4, 5, 1, b.ctypes.data, 6, a.ctypes.data, 5, 0,
                      c.ctypes.data, 6)  # fmt: skip
    assert_close(c, a, b)

    address, whole = ctypes.c_void_p, ctypes.c_int
    for name, kind in (("cblas_dgemm", np.float64), ("cblas_cgemm", np.complex64)):
        x, y = a.astype(kind), b.astype(kind) * kind(2)
        z = np.zeros((4, 6), kind)
        one, zero = np.ones(1, kind), np.zeros(1, kind)
        scale: Any = ctypes.c_double if kind is np.float64 else address
        function = getattr(library, name)
        function.argtypes = [whole] * 6 + [scale, address, whole, address, whole, scale, address, whole]
        alpha, beta = (1.0, 0.0) if kind is np.float64 else (one.ctypes.data, zero.ctypes.data)
        function(ROW_MAJOR, NO_TRANS, NO_TRANS, 4, 6, 5, alpha, x.ctypes.data, 5, y.ctypes.data, 6, beta,
                 z.ctypes.data, 6)  # fmt: skip
        np.testing.assert_allclose(z, x @ y, atol=1e-5)


def test_without_exactness_the_faster_library_is_asked(library: ctypes.CDLL, random: np.random.Generator) -> None:
    a, b = matrices(random, 100, 200, 64, turned=True)
    openblas = ctypes.CDLL(weft.kernels.blas.packaged_openblas() or "")
    theirs = multiply(openblas, a, b, turned=True, name="scipy_cblas_sgemm")
    ours = multiply(library, a, b, turned=True)
    library.weft_blas_exact(0)

    assert multiply(library, a, b, turned=True).tobytes() == theirs.tobytes()
    assert ours.tobytes() == np.concatenate([multiply(library, row[None], b, turned=True) for row in a]).tobytes()


def test_callers_at_the_same_time_all_get_the_right_answer(library: ctypes.CDLL, random: np.random.Generator) -> None:
    a, b = matrices(random, 4, 1200, 600, turned=True)
    expected = multiply(library, a, b, turned=True).tobytes()
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(i for i in range(30) if multiply(library, a, b, turned=True).tobytes() != expected)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert wrong == []


FORK = """
import ctypes, os, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import test_blas, weft.kernels.blas
library = ctypes.CDLL(str(weft.kernels.blas.compiled_library()))
assert library.weft_blas_open(weft.kernels.blas.packaged_openblas().encode())
library.weft_blas_threads(3)
a, b = test_blas.matrices(np.random.default_rng(1), 4, 1200, 600, True)
before = test_blas.multiply(library, a, b, turned=True).tobytes()
child = os.fork()
after = test_blas.multiply(library, a, b, turned=True).tobytes()
if child == 0:
    os._exit(int(before != after))
assert os.waitpid(child, 0)[1] == 0 and before == after
print("both")
"""


def test_a_forked_child_computes_and_the_process_ends(library: ctypes.CDLL) -> None:
    assert run(FORK, str(Path(__file__).parent), flags=["-W", "ignore"]) == ["both"]
    assert library


def run(code: str, *arguments: str, flags: list[str] | None = None, path: Path | None = None) -> list[str]:
    """The lines a fresh Python prints; fails if it fails or does not end."""
    source = path or Path(weft.kernels.blas.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, *(flags or []), "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


PRODUCT = """
import sys
import weft.kernels.blas
report = weft.kernels.blas.bind() if sys.argv[1] == "bound" else None
import mlx.core as mx
a, b = mx.random.normal((512, 512)), mx.random.normal((512, 512))
mx.eval(a @ b.T)
print(weft.kernels.blas.library_of("cblas_sgemm"))
if report:
    print(report.path, report.skinny, report.warning)
    print(weft.kernels.blas.bind().path)
    rows = [a[:size] @ b.T for size in (1, 2, 7, 33)]
    print(all(mx.array_equal(row[0], (a @ b.T)[0]).item() for row in rows))
"""


def test_mlx_computes_with_what_was_bound(library: ctypes.CDLL) -> None:
    stock = run(PRODUCT, "stock")
    bound = run(PRODUCT, "bound")
    path = str(weft.kernels.blas.compiled_library())

    assert stock == ["None"]
    assert bound == [path, f"{path} True None", path, "True"]
    assert library


def test_binding_after_mlx_does_nothing_and_says_so() -> None:
    code = (
        "import mlx.core, weft.kernels.blas; report = weft.kernels.blas.bind(); print(report.name, report.warning, report.path)"
    )

    assert run(code) == [f"stock {weft.kernels.blas.TOO_LATE} None"]


def test_without_our_library_there_is_a_report_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "weft" / "kernels").mkdir(parents=True)
    (tmp_path / "weft" / "__init__.py").touch()
    (tmp_path / "weft" / "kernels" / "__init__.py").touch()
    shutil.copy(weft.kernels.blas.__file__, tmp_path / "weft" / "kernels" / "blas.py")
    code = (
        "import weft.kernels.blas; r = weft.kernels.blas.bind(); print(r.name); print(r.warning); "
        "import mlx.core as mx; print(mx.ones((2, 2)) @ mx.ones((2, 2)))"
    )

    name, warning, *_ = run(code, path=tmp_path)
    assert (name, warning) in {("stock", weft.kernels.blas.MISSING), ("openblas", "None")}


def test_threads_come_from_the_environment_or_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert weft.kernels.blas.default_threads() == 3

    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    assert weft.kernels.blas.default_threads() == len(os.sched_getaffinity(0))
