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
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (200, 1.0), (0, 0.9999999)])
@pytest.mark.parametrize("first", [0, 30, 64, 100])
def test_the_largest_numbers_below_one_draw_no_token_of_the_tail(first: int, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(first)
    logits = np.full((2000, 300), -40.0, np.float32)
    logits[:, first : first + 64] = np.clip(3 * rng.standard_normal((2000, 64)), -8, 8)  # its float32 sum is often rounded up
    uniform = (2**24 - np.tile(np.arange(1, 21), 100)) / np.float32(2**24)

    tokens = np.array(
        ops.choose(mx.array(logits), [1.0] * 2000, [0.0] * 2000, None, mx.array(uniform), [top_k] * 2000, [top_p] * 2000)[0]
    )

    assert np.all((first <= tokens) & (tokens < first + 64))


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


def kept_by_rank(logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the tokens that are left, in the order of falling logits and rising tokens; that of tokens where none is cut off."""
    if (top_k == 0 or top_k >= logits.size) and top_p >= 1:
        return np.flatnonzero(weights_of(logits, temperature, min_p))
    order = np.lexsort((np.arange(logits.size), -logits))[: top_k or None]
    weights = weights_of(logits, temperature, min_p)[order]
    before = np.cumsum(weights) - weights
    return order[(weights > 0) & ((before < top_p * weights.sum() * (1 - 1e-6)) | (top_p >= 1))]


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(1, 1, 0), (7, 1, 0), (20, 0.9, 0), (0, 0.5, 0), (0, 0.999, 0.01), (300, 0.9, 0)]
)
def test_a_token_is_drawn_of_the_likeliest_by_rank(size: int, top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(size)
    logits = np.round(3 * rng.standard_normal((60, size)), 1).astype(np.float32)  # many are equal
    allowed = rng.random((60, size)) < 0.7
    allowed[:, rng.integers(size)] = True
    uniform = rng.random(60).astype(np.float32)
    uniform[:2] = 0.0, np.float32(1) - np.float32(2**-24)

    tokens, problems = ops.choose(
        mx.array(logits), [0.8] * 60, [min_p] * 60, mx.array(allowed), mx.array(uniform), [top_k] * 60, [top_p] * 60
    )

    assert not np.array(problems).any()
    for line, token in enumerate(np.array(tokens).tolist()):
        masked = np.where(allowed[line], logits[line], -np.inf)
        kept = kept_by_rank(masked, 0.8, min_p, top_k, top_p)
        place = kept.tolist().index(token)
        sums = np.cumsum(weights_of(masked, 0.8, min_p)[kept])
        before = sums[place - 1] if place else 0.0
        assert before / sums[-1] - 1e-5 <= uniform[line] <= sums[place] / sums[-1] + 1e-5


def test_all_tokens_but_few_weights_are_ranked_too() -> None:
    logits = np.full((1, 1000), -200.0, np.float32)  # e^-200 is no number of float32 any more
    logits[0, 5] = 0.0

    tokens = ops.choose(mx.array(logits), [1.0], [0.0], None, mx.array([0.999]), [0], [0.9999])[0]

    assert tokens.item() == 5


def test_a_line_is_the_same_among_others_and_alone() -> None:
    rng = np.random.default_rng(3)
    logits, uniform = mx.array(rng.standard_normal((50, 4096), np.float32)), mx.array(rng.random(50).astype(np.float32))
    temperatures, top_k = [0.0 if line % 3 == 0 else 1.0 for line in range(50)], [line % 5 * 10 for line in range(50)]
    top_p = [1.0 if line % 2 else 0.8 for line in range(50)]
    together = np.array(ops.choose(logits, temperatures, [0.0] * 50, None, uniform, top_k, top_p)[0]).tolist()

    for line in range(50):
        here = slice(line, line + 1)
        alone = ops.choose(logits[here], temperatures[here], [0.0], None, uniform[here], top_k[here], top_p[here])[0]
        assert alone.item() == together[line]


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_the_line_and_of_its_likeliest_tokens(size: int, count: int) -> None:
    rng = np.random.default_rng(size)
    logits = np.round(3 * rng.standard_normal((9, size)), 1).astype(np.float32)
    tokens, lines, count = rng.integers(size, size=9).astype(np.int32), [7, 0, 3], min(count, size)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))

    chosen, likeliest, values = map(np.array, ops.logprobs(mx.array(logits), mx.array(tokens), lines, count))

    ranked = [np.lexsort((np.arange(size), -logits[line]))[:count] for line in lines]
    assert chosen == pytest.approx(expected[lines, tokens[lines]], abs=1e-5)
    assert np.array_equal(likeliest, np.stack(ranked))
    assert values == pytest.approx(np.stack([expected[line][rank] for line, rank in zip(lines, ranked, strict=True)]), abs=1e-5)


def test_lines_without_a_temperature_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="has its temperature"):
        ops.choose(mx.zeros((2, 5)), [0.0], [0.0])
    with pytest.raises(ValueError, match="is allowed or not"):
        ops.choose(mx.zeros((2, 5)), [0.0] * 2, [0.0] * 2, mx.ones((2, 4), mx.bool_))
    with pytest.raises(ValueError, match="top_k and top_p"):
        ops.choose(mx.zeros((2, 5)), [0.0] * 2, [0.0] * 2, None, None, [3])


def test_log_probabilities_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="lines are there"):
        ops.logprobs(mx.zeros((2, 5)), mx.zeros(2, mx.int32), [2], 1)
    with pytest.raises(ValueError, match="as many tokens"):
        ops.logprobs(mx.zeros((2, 5)), mx.zeros(2, mx.int32), [1], 6)
    with pytest.raises(ValueError, match="has its token"):
        ops.logprobs(mx.zeros((2, 5)), mx.zeros(1, mx.int32), [1], 1)
