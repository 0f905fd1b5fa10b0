"""A reply on its way to a client: streamed event by event, or whole. A client that goes away ends its request at once.

Headers leave before any work; silence is filled with heartbeats; a failure after the headers is an event of its own,
never a clean end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from weft.api.body import Disconnected
from weft.api.deadline import Deadline
from weft.api.dialect import Reply
from weft.errors import InternalError, RequestTimedOut, WeftError
from weft.serving.active_request import ActiveRequest, Parts

log = logging.getLogger("weft.api")

STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would keep events back
]

Closed = Callable[[BaseException | None], None]
PartStream = AsyncGenerator[Parts]


class EventStream:
    """The response of a streamed request: its model may still be loading."""

    def __init__(
        self, reply: Reply, active: ActiveRequest, parts: PartStream, closed: Closed, deadline: Deadline, headers: dict[str, str]
    ) -> None:
        self.reply = reply
        self.active = active
        self.parts = parts
        self.closed = closed
        self.deadline = deadline
        self.headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI protocol
        """Send the whole stream."""
        error: BaseException | None = None
        watch = asyncio.create_task(_abandon_when_gone(self.active, receive, self.deadline))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + self.headers})
            await send({"type": "http.response.body", "body": self.reply.opening(), "more_body": True})
            async with contextlib.aclosing(self.parts):
                async for frames in self._frames():
                    if frames:
                        await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": self.reply.closing()})
        except Exception as caught:  # the border of a stream: whatever it is, the client gets an error and no clean end
            error = caught
            if not isinstance(caught, WeftError):
                log.exception("a stream failed")
            shown = caught if isinstance(caught, WeftError) else InternalError(str(caught))
            await send({"type": "http.response.body", "body": self.reply.failure(shown)})
        except BaseException as caught:  # the server ends this task
            error = caught
            raise
        finally:
            watch.cancel()
            self.closed(error)

    async def _frames(self) -> AsyncGenerator[bytes]:
        active, has_begun = self.active, False
        is_accepted = active.is_submitted
        async for news in self.parts:
            if news:
                begun = b"" if has_begun else self.reply.begun(active.usage)
                has_begun = True
                yield begun + b"".join([self.reply.pieces(choice, deltas) for choice, deltas in news])
            elif is_accepted or not active.is_submitted:
                yield self.reply.heartbeat(active.num_computed, active.num_prompt_tokens)
            is_accepted = active.is_submitted


async def whole(reply: Reply, active: ActiveRequest, parts: PartStream, receive: Receive, deadline: Deadline) -> dict[str, Any]:
    """The body of a reply that is not streamed. Raises what ended it, Disconnected when the client went away."""
    watch = asyncio.create_task(_abandon_when_gone(active, receive, deadline))
    try:
        async with contextlib.aclosing(parts):
            async for news in parts:
                for choice, deltas in news:
                    reply.take(choice, deltas)
    finally:
        watch.cancel()
    return reply.whole()


async def _abandon_when_gone(active: ActiveRequest, receive: Receive, deadline: Deadline) -> None:
    """Abandon the request when its client has gone or its time is up."""
    try:
        await deadline.hold(gone(receive))
    except RequestTimedOut as error:
        active.abandon(error)
    else:
        active.abandon(Disconnected())


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
