"""A token of each line of logits in one operation: the likeliest, or drawn, as the formulas in double precision say."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from weft.kernels import cpu
from weft.kernels.primitives import ops

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 300, 4096)  # around the lanes and the blocks


def weights_of(logits: np.ndarray, temperature: float, min_p: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return np.where(weights >= min_p, weights, 0.0)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_a_token_is_drawn_where_the_running_sum_of_weights_passes_its_number(size: int, min_p: float) -> None:
    rng = np.random.default_rng(size)
    logits = (3 * rng.standard_normal((40, size))).astype(np.float32)
    allowed = rng.random((40, size)) < 0.7
    allowed[:, rng.integers(size)] = True
    uniform = rng.random(40).astype(np.float32)
    uniform[:2] = 0.0, np.float32(1) - np.float32(2**-24)

    tokens, problems = ops.choose(mx.array(logits), [0.8] * 40, [min_p] * 40, mx.array(allowed), mx.array(uniform))

    assert not np.array(problems).any()
    for line, token in enumerate(np.array(tokens).tolist()):
        weights = weights_of(np.where(allowed[line], logits[line], -np.inf), 0.8, min_p)
        sums = np.cumsum(weights) / weights.sum()
        assert weights[token] > 0
        assert sums[token] - weights[token] / weights.sum() - 1e-5 <= uniform[line] <= sums[token] + 1e-5


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("size", SIZES)
def test_without_temperature_it_is_the_first_of_the_largest(size: int) -> None:
    logits = np.random.default_rng(size).integers(0, 4, (30, size)).astype(np.float32)

    tokens, problems = ops.choose(mx.array(logits), [0.0] * 30, [0.0] * 30)

    assert np.array_equal(np.array(tokens), logits.argmax(axis=1))
    assert not np.array(problems).any()


@pytest.mark.usefixtures("_instructions")
def test_what_is_not_finite_and_where_no_token_is_left_is_told() -> None:
    logits = np.zeros((5, 100), np.float32)
    logits[1, 70], logits[2, 99], logits[3] = np.nan, np.inf, -np.inf
    allowed = np.ones((5, 100), bool)
    allowed[1, 70] = allowed[2, 99] = False
    allowed[4] = False

    _, problems = ops.choose(mx.array(logits), [1.0] * 5, [0.0] * 5, mx.array(allowed), mx.zeros(5))

    assert np.array(problems).tolist() == [0, 2, 2, 2, 1]


def test_a_line_is_the_same_among_others_and_alone() -> None:
    rng = np.random.default_rng(3)
    logits, uniform = mx.array(rng.standard_normal((50, 4096), np.float32)), mx.array(rng.random(50).astype(np.float32))
    temperatures = [0.0 if line % 3 == 0 else 1.0 for line in range(50)]
    together = np.array(ops.choose(logits, temperatures, [0.0] * 50, None, uniform)[0]).tolist()

    for line in range(50):
        alone = ops.choose(logits[line : line + 1], temperatures[line : line + 1], [0.0], None, uniform[line : line + 1])[0]
        assert alone.item() == together[line]


def test_lines_without_a_temperature_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="has its temperature"):
        ops.choose(mx.zeros((2, 5)), [0.0], [0.0])
    with pytest.raises(ValueError, match="is allowed or not"):
        ops.choose(mx.zeros((2, 5)), [0.0] * 2, [0.0] * 2, mx.ones((2, 4), mx.bool_))
