"""What an engine believes a prompt token takes: the router compares replicas by it."""

from __future__ import annotations

import pytest

from weft.engine.prefill_rate import PrefillRate


def rate_of(*chunks: tuple[int, float]) -> float:
    rate = PrefillRate()
    for num_tokens, seconds in chunks:
        rate.measure(num_tokens, seconds)
    return rate.seconds_per_token


def test_nothing_computed_is_nothing_known() -> None:
    assert rate_of() == 0.0


def test_the_first_chunk_counts_in_full() -> None:
    assert rate_of((100, 2.0)) == pytest.approx(0.02)


def test_a_short_chunk_with_its_overhead_changes_little() -> None:
    long = (512, 5.12)

    assert rate_of(long, (4, 0.4), long, (4, 0.4)) == pytest.approx(0.01, rel=0.1)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    assert rate_of((128, 12.8), *[(128, 1.28)] * 30) == pytest.approx(0.01, rel=0.02)
