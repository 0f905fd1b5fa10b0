"""Each sampling parameter does what it says, for its own row, whoever stands beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver import Run, adapter_for, random_prompts
from sequences import sequence_of
from weft.engine.sampler import _pick, sample
from weft.engine.sequence import Sequence, number_of_bits
from weft.kernels import cpu
from weft.model.adapter import Adapter

VOCAB = 400


@pytest.fixture(params=["own", "mlx"], autouse=True)
def _operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling by weft's own operations, and by MLX's as on a GPU."""
    if request.param == "mlx":
        monkeypatch.setattr(cpu, "is_bound", lambda _: False)


def row(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> Sequence:
    sequence = sequence_of(prompt or [0], **sampling)
    for token in output or []:
        sequence.num_in_flight += 1
        sequence.append(token, None)
    sequence.num_in_flight = 1
    return sequence


def pick(logits: np.ndarray, rows: list[Sequence]) -> list[int]:
    return sample(mx.array(logits), rows).tokens.tolist()


def draws(logits: np.ndarray, count: int, **sampling: Any) -> Counter[int]:
    rows = [row(seed=seed, **sampling) for seed in range(count)]
    return Counter(pick(np.tile(logits, (count, 1)), rows))


RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=VOCAB) * 3).astype(np.float32)
ORDER = np.argsort(-LOGITS)
PROBABILITIES = np.exp(LOGITS - LOGITS.max()) / np.exp(LOGITS - LOGITS.max()).sum()


def test_temperature_zero_takes_the_highest_logit() -> None:
    assert pick(LOGITS[None], [row()]) == [int(LOGITS.argmax())]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

    counts = draws(logits, 4000, temperature=1.0)

    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_draws_at_the_positions_of_one_answer_follow_it_too() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rows = [row(output=[9] * position, temperature=1.0, seed=7) for position in range(1000)]

    counts = Counter(pick(np.tile(logits, (len(rows), 1)), rows))

    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 1000 - share) < 0.05


TAIL = -40.0  # a logit: together 300 tokens with it are drawn once in 10^15 times
BOUNDARY_BITS = [*range(256), *range(2**32 - 256, 2**32), *(2**power + step for power in range(10, 32) for step in (-1, 0, 1))]
BITS = BOUNDARY_BITS + np.random.default_rng(2).integers(0, 2**32, 1000).tolist()


def row_of_bits(bits: int, **sampling: Any) -> Sequence:
    """A row whose next token is drawn with these random bits."""
    one = row(temperature=1.0, **sampling)
    one.random_bits = lambda _: bits  # type: ignore[method-assign]
    return one


def test_every_32_bits_mean_a_number_above_0_and_below_1_in_float32_too_that_never_falls() -> None:
    numbers = np.array([number_of_bits(bits) for bits in sorted(BITS)], np.float32)

    assert np.all((numbers > 0) & (numbers < 1))
    assert np.all(np.diff(numbers) >= 0)
    assert {bits for bits in BITS if np.float32(number_of_bits(bits)) != np.float32(bits / 2**32)} == {
        0,
        *range(2**32 - 128, 2**32),
    }


@pytest.mark.parametrize("sampling", [{}, {"top_k": 300}, {"top_k": 5}, {"top_p": 0.99999}, {"min_p": 1e-30}], ids=str)
@pytest.mark.parametrize("head", [1, 3, 64, 100])
def test_no_bits_draw_a_token_of_the_tail(head: int, sampling: dict[str, Any]) -> None:
    chance = np.random.default_rng(head)
    logits = np.full((len(BITS), VOCAB), TAIL, np.float32)
    first = 150 - head // 2  # the tail is before it and behind it
    logits[:, first : first + head] = np.clip(3 * chance.standard_normal((len(BITS), head)), -8, 8)

    drawn = np.array(pick(logits, [row_of_bits(bits, **sampling) for bits in BITS]))

    assert np.all((first <= drawn) & (drawn < first + head))


def test_a_sum_of_all_that_is_rounded_up_gives_no_token_of_the_tail() -> None:
    weights = mx.array([[1.0, 1e-20, 1e-20, 0.0]])

    assert _pick(weights, mx.array([1.0])).tolist() == [0]


def test_temperature_flattens_the_distribution() -> None:
    logits = np.log(np.array([0.8, 0.2], np.float32))

    counts = draws(logits, 4000, temperature=2.0)

    assert abs(counts[0] / 4000 - 2 / 3) < 0.03  # sqrt(.8) : sqrt(.2) = 2 : 1


@pytest.mark.parametrize("top_k", [1, 3, 20, 300])
def test_top_k_keeps_the_k_likeliest(top_k: int) -> None:
    counts = draws(LOGITS, 1500, temperature=2.0, top_k=top_k)

    assert set(counts) <= set(ORDER[:top_k].tolist())
    assert len(counts) >= min(top_k, 20) * 0.8


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("top_k", [0, 200])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, top_k: int) -> None:
    kept = int(np.searchsorted(np.cumsum(PROBABILITIES[ORDER]), top_p)) + 1

    counts = draws(LOGITS, 3000, temperature=1.0, top_p=top_p, top_k=top_k)

    assert set(counts) <= set(ORDER[: kept + (top_k > 0)].tolist())
    assert int(ORDER[0]) in counts
    assert len(counts) >= kept * 0.6


def test_min_p_cuts_what_is_far_below_the_likeliest() -> None:
    allowed = set(np.flatnonzero(0.1 * PROBABILITIES.max() <= PROBABILITIES).tolist())

    counts = draws(LOGITS, 2000, temperature=1.0, min_p=0.1)

    assert set(counts) == allowed


def test_a_banned_token_is_never_drawn_and_a_pushed_one_always() -> None:
    best = int(ORDER[0])

    assert best not in draws(LOGITS, 300, temperature=1.0, logit_bias={best: float("-inf")})
    assert set(draws(LOGITS, 300, temperature=1.0, logit_bias={7: 100.0})) == {7}


def test_penalties_follow_their_formulas() -> None:
    logits = np.array([2.0, 1.9, -1.0, 0.0], np.float32)

    assert pick(logits[None], [row(prompt=[0], repetition_penalty=1.2)]) == [1]  # 2.0 / 1.2 < 1.9
    assert pick(logits[None], [row(prompt=[0], presence_penalty=1.0)]) == [0]  # the prompt does not count
    assert pick(logits[None], [row(output=[0], presence_penalty=0.2)]) == [1]
    assert pick(logits[None], [row(output=[0], frequency_penalty=0.06)]) == [0]
    assert pick(logits[None], [row(output=[0, 0], frequency_penalty=0.06)]) == [1]


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty() -> None:
    logits = np.array([-1.0, -1.5], np.float32)

    assert pick(logits[None], [row(prompt=[0], repetition_penalty=2.0)]) == [1]


def test_logprobs_are_the_models_own() -> None:
    rows = [row(logprobs=3, temperature=0.0, logit_bias={5: 100.0}), row(), row(logprobs=0)]

    choice = sample(mx.array(np.tile(LOGITS, (3, 1))), rows)

    expected = np.log(PROBABILITIES)
    first, second = (entry.read([int(choice.tokens[index].item())])[0] for index, entry in choice.logprobs.items())
    assert first.token == 5
    assert first.logprob == pytest.approx(expected[5], abs=1e-4)
    assert [token for token, _ in first.top] == ORDER[:3].tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[ORDER[:3]].tolist(), abs=1e-4)
    assert second.top == ()
    assert second.logprob == pytest.approx(expected[ORDER[0]], abs=1e-4)


def test_logprobs_under_a_mask_are_the_models_own() -> None:
    allowed = np.zeros((2, LOGITS.size), bool)
    allowed[:, ORDER[-1]] = True  # the least likely token alone
    for temperature in (0.0, 1.0):
        rows = [row(logprobs=3, temperature=temperature), row(logprobs=0, temperature=temperature)]
        choice = sample(mx.array(np.tile(LOGITS, (2, 1))), rows, mx.array(allowed))

        found = [choice.logprobs[index].read([int(choice.tokens[index].item())])[0] for index in range(2)]
        assert [one.token for one in found] == [ORDER[-1]] * 2
        assert [one.logprob for one in found] == pytest.approx([np.log(PROBABILITIES)[ORDER[-1]]] * 2, abs=1e-4)
        assert [token for token, _ in found[0].top] == ORDER[:3].tolist()


def test_logits_that_are_not_numbers_are_reported_for_their_row_only() -> None:
    logits = np.tile(LOGITS, (3, 1))
    logits[1, 17] = np.nan

    problems = sample(mx.array(logits), [row(), row(), row()]).read()[1]

    assert list(problems) == [1]
    assert "not finite" in problems[1]


SAMPLINGS = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    top_k=st.sampled_from([0, 1, 7, 256, 399, 5000]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: -5.0, 9: 4.0}]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=60)
@given(st.lists(SAMPLINGS, min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_no_mix_of_neighbours_changes_a_choice(samplings: list[dict[str, Any]], seed: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=(len(samplings), VOCAB)) * 2).astype(np.float32)
    rows = [row(prompt=[1, 2], output=[3, 3, 9], **sampling) for sampling in samplings]

    together = pick(logits, rows)

    assert together == [pick(logits[index : index + 1], [rows[index]])[0] for index in range(len(rows))]


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


PROMPTS = random_prompts(128, (9, 30, 4, 17, 25, 2, 12, 40), seed=8)


def test_seeded_hot_sampling_gives_the_same_tokens_alone_and_beside_seven_others(adapter: Adapter) -> None:
    def subject(others: int) -> list[int]:
        run = Run(adapter)
        sequence = run.submit(PROMPTS[0], 30, temperature=1.0, seed=42)
        for index in range(others):
            run.submit(PROMPTS[1 + index], 6 + 3 * index, temperature=0.5 + 0.2 * index, seed=index, top_p=0.9)
        run.finish()
        return sequence.output

    assert subject(0) == subject(7)
    assert len(set(subject(0))) > 5


def test_a_greedy_row_beside_hot_rows_equals_its_solo_run(adapter: Adapter) -> None:
    def subject(others: int) -> list[int]:
        run = Run(adapter)
        for index in range(others):
            run.submit(PROMPTS[1 + index], 30, temperature=1.5, seed=index, top_k=40, logprobs=2)
        sequence = run.submit(PROMPTS[0], 30)
        run.finish()
        return sequence.output

    assert subject(0) == subject(7)


def test_another_seed_gives_another_answer(adapter: Adapter) -> None:
    run = Run(adapter)
    one, two, again = (run.submit(PROMPTS[0], 30, temperature=1.0, seed=seed) for seed in (1, 2, 1))
    run.finish()

    assert one.output != two.output
    assert one.output == again.output


def test_requests_without_a_seed_draw_differently(adapter: Adapter) -> None:
    run = Run(adapter)
    one, two = (run.submit(PROMPTS[0], 30, temperature=1.0) for _ in range(2))
    run.finish()

    assert one.output != two.output


def test_reading_what_the_device_failed_to_compute_raises() -> None:
    logits = mx.zeros((1, VOCAB)) + mx.linalg.inv(mx.zeros((1, 1)), stream=mx.cpu)  # zero has no inverse
    sampled = sample(logits, [row()])

    with pytest.raises(RuntimeError, match="factorization failed"):
        sampled.read()
