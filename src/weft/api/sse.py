"""A reply on its way to a client, as a stream or as one body; a client that goes away ends its request at once.

Silence is filled with heartbeats, and an error after the headers is an event of its own, never a regular end.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from weft.api.dialect import Reply
from weft.api.http import Deadline, Disconnected
from weft.errors import RequestTimedOut, WeftError
from weft.serving.active_request import ActiveRequest, Parts

log = logging.getLogger("weft.api")

# Proxies would keep events back.
STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True)
class EventStream:
    """The response to a streamed request, whose model may still be loading."""

    reply: Reply
    active: ActiveRequest
    parts: AsyncGenerator[Parts]
    on_close: Callable[[BaseException | None], None]  # called once, with what ended the stream
    deadline: Deadline
    headers: dict[str, str]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = asyncio.CancelledError()  # where the server ends this task
        headers = STREAM_HEADERS + [(name.encode(), value.encode()) for name, value in self.headers.items()]
        watch = asyncio.create_task(_abandon_when_gone(self.active, receive, self.deadline))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self.reply.frame_opening(), "more_body": True})
            async with contextlib.aclosing(self.parts):
                async for frames in self._frames():
                    if frames:
                        await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": self.reply.frame_closing()})
            error = None
        except Exception as caught:  # the border of a stream: whatever it is, the client gets an error and no regular end
            error = caught
            if not isinstance(caught, WeftError):
                log.exception("a stream failed")
            await send({"type": "http.response.body", "body": self.reply.frame_error(caught)})
        finally:
            watch.cancel()
            self.on_close(error)

    async def _frames(self) -> AsyncGenerator[bytes]:
        active, has_started = self.active, False
        is_accepted = active.is_submitted
        async for news in self.parts:
            if news:
                start = b"" if has_started else self.reply.frame_start(active.usage)
                has_started = True
                yield start + b"".join([self.reply.frame_deltas(choice, deltas) for choice, deltas in news])
            elif is_accepted or not active.is_submitted:
                yield self.reply.frame_heartbeat(active.num_computed, active.num_prompt_tokens)
            is_accepted = active.is_submitted


async def make_whole_body(
    reply: Reply, active: ActiveRequest, parts: AsyncGenerator[Parts], receive: Receive, deadline: Deadline
) -> dict[str, Any]:
    """The body of a reply that is not streamed. Raises what ended the request, Disconnected when the client went away."""
    watch = asyncio.create_task(_abandon_when_gone(active, receive, deadline))
    try:
        async with contextlib.aclosing(parts):
            async for news in parts:
                for choice, deltas in news:
                    reply.collect_deltas(choice, deltas)
    finally:
        watch.cancel()
    return reply.make_body()


async def _abandon_when_gone(active: ActiveRequest, receive: Receive, deadline: Deadline) -> None:
    try:
        await deadline.hold(until_gone(receive))
    except RequestTimedOut as error:
        active.abandon(error)
    else:
        active.abandon(Disconnected())


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
