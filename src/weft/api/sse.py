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
from weft.api.dialect import EVENTS, Reply
from weft.errors import InternalError, RequestTimedOut, WeftError
from weft.serving.answer import ActiveRequest
from weft.serving.service import WaitingRequest

log = logging.getLogger("weft.api")

STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would keep events back
]

Ended = Callable[[ActiveRequest | None, BaseException | None], None]


class EventStream:
    """The response of a streamed request, be it that its model is still on its way."""

    def __init__(
        self,
        reply: Reply,
        answer: ActiveRequest | WaitingRequest,
        heartbeat: float,
        headers: dict[str, str],
        ended: Ended,
        deadline: Deadline,
        media_type: str = EVENTS,
    ) -> None:
        self.reply = reply
        self.answer = answer
        self.heartbeat = heartbeat
        named = {"content-type": media_type, **headers}
        self.headers = [(name.encode(), value.encode()) for name, value in named.items()]
        self.ended = ended
        self.deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI protocol
        """Send everything there is to send."""
        error: BaseException | None = None
        watch = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + self.headers})
            await send({"type": "http.response.body", "body": self.reply.opening(), "more_body": True})
            async with contextlib.aclosing(self._frames()) as stream:
                async for frames in stream:
                    if frames:
                        await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": self.reply.closing()})
        except Exception as caught:  # the border of a stream: whatever it is, the client is told, and not with a clean end
            error = caught
            if not isinstance(caught, WeftError):
                log.exception("a stream failed")
            told = caught if isinstance(caught, WeftError) else InternalError(str(caught))
            await send({"type": "http.response.body", "body": self.reply.failure(told)})
        except BaseException as caught:  # the server ends this task
            error = caught
            raise
        finally:
            watch.cancel()
            self.ended(self.answer if isinstance(self.answer, ActiveRequest) else None, error)

    async def _frames(self) -> AsyncGenerator[bytes]:
        while isinstance(self.answer, WaitingRequest):
            opened = await self.answer.take(self.heartbeat)
            if opened is None:
                yield self.reply.heartbeat(0, 0)
            else:
                self.answer = opened
        answer, has_begun = self.answer, False
        async with contextlib.aclosing(answer.parts(self.heartbeat)) as parts:
            async for news in parts:
                if news:
                    begun = b"" if has_begun else self.reply.begun(answer.usage)
                    has_begun = True
                    yield begun + b"".join([self.reply.pieces(choice, deltas) for choice, deltas in news])
                else:
                    yield self.reply.heartbeat(sum(answer.computed), answer.num_prompt_tokens)

    async def _watch(self, receive: Receive) -> None:
        why = await _nobody_waits(receive, self.deadline)
        self.answer.abandon(why)  # the one there is by then


async def whole(reply: Reply, answer: ActiveRequest, receive: Receive, deadline: Deadline) -> dict[str, Any]:
    """The body of a reply that is not streamed. Raises what ended it, Disconnected when the client went away."""
    watch = asyncio.create_task(_abandon(answer, receive, deadline))
    try:
        async with contextlib.aclosing(answer.parts(silence=60.0)) as parts:
            async for news in parts:
                for choice, deltas in news:
                    reply.take(choice, deltas)
    finally:
        watch.cancel()
    return reply.whole()


async def _abandon(answer: ActiveRequest, receive: Receive, deadline: Deadline) -> None:
    answer.abandon(await _nobody_waits(receive, deadline))


async def _nobody_waits(receive: Receive, deadline: Deadline) -> WeftError:
    """Return when the answer is of no use any more, and why."""
    try:
        await deadline.hold(gone(receive))
    except RequestTimedOut as error:
        return error
    return Disconnected()


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
