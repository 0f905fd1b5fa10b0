"""The recurrence of weft's BLAS against numpy, and Mamba 2 and lightning attention made of it against mlx-lm's functions."""

from __future__ import annotations

import ctypes
import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import bailing_hybrid, ssm

from weft.kernels import blas, cpu, recurrent
from weft.memory.positions import taking_notes

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

Inputs = list[np.ndarray]


def inputs(rows: int, heads: int, height: int, width: int, tokens: int, is_delta: bool, gates: int = 1) -> Inputs:
    rng = np.random.default_rng(height * width + tokens)
    key = rng.standard_normal((rows, heads, tokens, width))
    found = [
        rng.standard_normal((rows, heads, height, width)),
        rng.standard_normal((rows, heads, tokens, height)),
        key / np.linalg.norm(key, axis=-1, keepdims=True),
        rng.standard_normal((rows, heads, tokens, width)),
        rng.uniform(0.3, 1, (rows, heads, tokens, gates)),
        *([rng.uniform(0, 1, (rows, heads, tokens, 1))] if is_delta else []),
    ]
    return [array.astype(np.float32) for array in found]


def as_written(given: Inputs) -> tuple[np.ndarray, np.ndarray]:
    state, value, key, query, gate, *beta = (array.astype(np.float64) for array in given)
    outputs = []
    for at in range(key.shape[2]):
        state = state * gate[:, :, at, None]
        change = value[:, :, at]
        if beta:
            change = beta[0][:, :, at] * (change - np.einsum("bhvk,bhk->bhv", state, key[:, :, at]))
        state = state + np.einsum("bhv,bhk->bhvk", change, key[:, :, at])
        outputs.append(np.einsum("bhvk,bhk->bhv", state, query[:, :, at]))
    return np.stack(outputs, axis=2), state


def recur(given: Inputs) -> cpu.Recurred:
    """Inputs and outputs by head, as numpy has them here; the operation wants them by token."""
    state, *by_head = map(mx.array, given)
    found = cpu.recurrence(state, *(array.swapaxes(1, 2) for array in by_head))
    return found._replace(output=found.output.swapaxes(1, 2))


def run(given: Inputs) -> tuple[mx.array, mx.array]:
    return recur(given)[:2]


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (20, 33), (64, 128)])
def test_the_states_kept_of_each_token_are_those_of_a_recurrence_that_ends_there(height: int, width: int, is_delta: bool) -> None:
    given = inputs(2, 3, height, width, 5, is_delta, width)
    with taking_notes(5):
        output, last, states = recur(given)
    assert states is not None

    assert mx.array_equal(output, run(given)[0])
    assert mx.array_equal(states[:, -1], last)
    for end in range(1, 6):
        _, state = run([given[0], *(array[:, :, :end] for array in given[1:])])
        assert mx.array_equal(states[:, end - 1], state), end


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (4, 16), (16, 4), (20, 33), (64, 128), (128, 64), (70, 70)])
def test_it_is_what_numpy_says_for_any_size(height: int, width: int, tokens: int, is_delta: bool) -> None:
    for gates, heads in itertools.product({1, width}, (1, 3)):
        given = inputs(2, heads, height, width, tokens, is_delta, gates)
        for found, right in zip(run(given), as_written(given), strict=True):
            assert found.shape == right.shape
            assert np.abs(np.array(found) - right).max() <= 4e-6 * np.abs(right).max()


def test_every_instruction_set_has_the_same_bits_and_threads_do_not_matter() -> None:
    given, results = inputs(2, 6, 24, 40, 7, True, 40), set()
    library = ctypes.CDLL(str(blas.compiled_library()))
    threads = library.weft_blas_threads(2)
    for name in (b"avx512", b"avx2"):  # the plain one has no fused multiply-add on some machines
        if library.weft_blas_kernels(name):
            for count in (1, 2, 3):
                library.weft_blas_threads(count)
                results.add(b"".join(np.array(array).tobytes() for array in run(given)))
    library.weft_blas_kernels(None)
    library.weft_blas_threads(threads)

    assert len(results) <= 1


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, 89), max_size=5, unique=True).map(sorted), is_delta=st.booleans())
def test_no_cut_changes_a_bit(cuts: list[int], is_delta: bool) -> None:
    given = inputs(1, 2, 24, 48, 90, is_delta)
    whole, last = run(given)
    state, outputs = mx.array(given[0]), []
    for start, end in itertools.pairwise([0, *cuts, 90]):
        output, state = run([np.array(state), *(array[:, :, start:end] for array in given[1:])])
        outputs.append(output)

    assert mx.array_equal(mx.concatenate(outputs, axis=2), whole)
    assert mx.array_equal(state, last)


def test_a_head_among_others_has_the_bits_it_has_alone() -> None:
    given = inputs(3, 40, 64, 64, 9, True)  # so many that they are shared among threads
    output, state = run(given)
    for row, head in ((0, 0), (1, 17), (2, 39)):
        alone = run([array[row : row + 1, head : head + 1] for array in given])
        assert mx.array_equal(alone[0][0, 0], output[row, head])
        assert mx.array_equal(alone[1][0, 0], state[row, head])


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_mamba_2_is_that_of_mlx_lm(tokens: int, has_state: bool, dtype: mx.Dtype) -> None:
    mx.random.seed(tokens)
    x, dt = mx.random.normal((2, tokens, 6, 8)).astype(dtype), mx.random.normal((2, tokens, 6)).astype(dtype)
    groups = [mx.random.normal((2, tokens, 2, 16)).astype(dtype) for _ in range(2)]
    log_rate, skip, bias = mx.random.normal((6,)), mx.random.normal((6,)), mx.random.normal((6,))
    state = mx.random.normal((2, 6, 8, 16)) if has_state else None
    arguments = (x, log_rate, *groups, skip, dt, bias, state, (0.0, float("inf")))
    for found, right in zip(recurrent.ssm_update(*arguments), ssm.ssm_update(*arguments), strict=True):
        assert mx.allclose(
            found.astype(mx.float32), right.astype(mx.float32), atol=2e-4 if dtype == mx.float32 else 0.1, rtol=1e-2
        )


@pytest.mark.parametrize("tokens", [1, 5, 200])
@pytest.mark.parametrize("has_state", [False, True])
def test_lightning_attention_is_that_of_mlx_lm(tokens: int, has_state: bool) -> None:
    mx.random.seed(tokens)
    original = getattr(bailing_hybrid.recurrent_gla, "weft_original", bailing_hybrid.recurrent_gla)
    query, key, value = (mx.random.normal((2, 3, tokens, width)) for width in (16, 16, 24))
    decay, state = -mx.random.uniform(0.01, 0.5, (3,)), mx.random.normal((2, 3, 16, 24)) if has_state else None
    ours = recurrent.lightning_over(original)(query, key, value, decay, scale=0.25, h=state)
    for found, right in zip(ours, original(query, key, value, decay, scale=0.25, h=state), strict=True):
        assert found.shape == right.shape
        assert mx.allclose(found, right, atol=1e-3)
