"""Requests and tokens a minute, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from weft.errors import RateLimited
from weft.serving.rate_limit import RateLimiter
from weft.serving.tenants import RateLimit, Tenant


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def tenant(name: str = "anna", requests: int | None = None, tokens: int | None = None) -> Tenant:
    return Tenant(id=name, name=name, rate=RateLimit(requests, tokens))


def test_requests_beyond_the_limit_wait_for_their_share_of_the_minute() -> None:
    clock = Clock()
    limiter, anna = RateLimiter(clock), tenant(requests=3)
    for _ in range(3):
        limiter.take_request(anna)
    with pytest.raises(RateLimited, match="3 requests a minute") as refused:
        limiter.take_request(anna)

    assert refused.value.retry_after == 20
    clock.now += 20
    limiter.take_request(anna)
    with pytest.raises(RateLimited):
        limiter.take_request(anna)


def test_tokens_may_be_overdrawn_once_and_then_the_next_request_waits() -> None:
    clock = Clock()
    limiter, anna = RateLimiter(clock), tenant(tokens=600)
    limiter.take_request(anna)
    limiter.charge_tokens(anna, 1199)
    with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
        limiter.take_request(anna)

    assert refused.value.retry_after == 60
    clock.now += 60
    limiter.take_request(anna)


def test_what_is_not_used_is_not_saved_up() -> None:
    clock = Clock()
    limiter, anna = RateLimiter(clock), tenant(requests=2)
    limiter.take_request(anna)
    clock.now += 3600
    for _ in range(2):
        limiter.take_request(anna)

    with pytest.raises(RateLimited):
        limiter.take_request(anna)


def test_one_tenant_s_use_is_not_another_s() -> None:
    limiter = RateLimiter(Clock())
    limiter.take_request(tenant("anna", requests=1))
    limiter.take_request(tenant("ben", requests=1))

    with pytest.raises(RateLimited):
        limiter.take_request(tenant("anna", requests=1))


def test_the_headers_say_what_is_left_and_when_all_is_there_again() -> None:
    limiter, anna = RateLimiter(Clock()), tenant(requests=60, tokens=1000)
    limiter.take_request(anna)
    limiter.charge_tokens(anna, 250)

    assert limiter.headers(anna) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "750",
        "x-ratelimit-reset-tokens": "15s",
    }
    assert limiter.headers(tenant("ben")) == {}


def test_a_limit_that_was_changed_counts_at_once() -> None:
    limiter = RateLimiter(Clock())
    limiter.take_request(tenant(requests=1))
    limiter.take_request(tenant(requests=5))

    assert limiter.headers(tenant(requests=5))["x-ratelimit-remaining-requests"] == "4"
