"""Rate limits of tenants: requests and tokens a minute, refilled steadily, with the headers that say what is left."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.errors import RateLimited
from weft.serving.tenants import RateLimit, Tenant

MINUTE = 60.0


@dataclass
class Allowance:
    """What a tenant may still use of one thing: full at first, refilled within a minute; below zero it waits."""

    per_minute: int
    at: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.per_minute

    def refill(self, now: float) -> None:
        self.left, self.at = min(self.per_minute, self.left + (now - self.at) * self.per_minute / MINUTE), now

    def seconds_until(self, amount: float) -> float:
        """Return after how many seconds so much is left."""
        return max(0.0, amount - self.left) * MINUTE / self.per_minute


class RateLimiter:
    """Counts what each tenant uses and refuses requests of one that has used up its minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._allowances: dict[tuple[str, str], Allowance] = {}  # by tenant and thing

    def take_request(self, tenant: Tenant) -> None:
        """Count a request. Raises RateLimited, and counts nothing, if the tenant has no request or no token left."""
        found = self._find(tenant)
        wait = {thing: one.seconds_until(1) for thing, one in found.items() if one.left < 1}
        if wait:
            thing = max(wait, key=lambda thing: wait[thing])
            limit, seconds = found[thing].per_minute, math.ceil(wait[thing])
            message = f"this key may use {limit} {thing} a minute, and has; come again in {seconds} s"
            raise RateLimited(message, seconds, self.headers(tenant))
        if "requests" in found:
            found["requests"].left -= 1

    def charge_tokens(self, tenant: Tenant, count: int) -> None:
        """Count tokens that were used; they may be more than were left, and the tenant's next request then waits."""
        if (tokens := self._find(tenant).get("tokens")) is not None:
            tokens.left -= count

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """Return limit, remainder and time until all is refilled, in OpenAI's headers; none for a tenant without limits."""
        found: dict[str, str] = {}
        for thing, one in self._find(tenant).items():
            found[f"x-ratelimit-limit-{thing}"] = str(one.per_minute)
            found[f"x-ratelimit-remaining-{thing}"] = str(max(0, math.floor(one.left)))
            found[f"x-ratelimit-reset-{thing}"] = f"{math.ceil(one.seconds_until(one.per_minute))}s"
        return found

    def _find(self, tenant: Tenant) -> dict[str, Allowance]:
        """Return the tenant's allowances as they are now; one whose limit was changed begins anew."""
        now, found = self.clock(), {}
        for thing, limit in _limits(tenant.rate):
            one = self._allowances.get((tenant.id, thing))
            if one is None or one.per_minute != limit:
                one = self._allowances[tenant.id, thing] = Allowance(limit, now)
            one.refill(now)
            found[thing] = one
        return found


def _limits(rate: RateLimit) -> list[tuple[str, int]]:
    return [(thing, limit) for thing, limit in (("requests", rate.requests), ("tokens", rate.tokens)) if limit is not None]
