"""How long a request may take, from its arrival to its end: the server's limit, or a shorter one that the client asked for.

Knows seconds and one header. The handler in `app` opens answers under it, `sse` reads them under it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.datastructures import Headers

from weft.errors import InvalidRequest, RequestTimedOut

HEADER = "x-request-timeout"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Deadline:
    """When a request must have its end; None: never."""

    seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, headers: Headers, longest: float | None) -> Deadline:
        """The deadline of a request that comes now. Raises InvalidRequest where the client's wish is none."""
        if (given := headers.get(HEADER)) is None:
            return cls(longest)
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise InvalidRequest(f"{HEADER} {given!r} must be a number of seconds above 0", HEADER)
        return cls(seconds if longest is None else min(seconds, longest))

    async def hold(self, work: Awaitable[Result]) -> Result:
        """What the work comes to. Raises RequestTimedOut, and cancels the work, when the time is up."""
        left = None if self.seconds is None else self.begun + self.seconds - time.monotonic()
        try:
            async with asyncio.timeout(left) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the request was not finished within {self.seconds:g} seconds; ask for less, or allow it more time"
            raise RequestTimedOut(message) from None
