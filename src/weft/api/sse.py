"""A reply on its way to a client: streamed event by event, or whole. A client that goes away ends its request at once.

Headers leave before any work; silence is filled with heartbeats; a failure after the headers is an event of its own,
never a clean end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from weft.api.body import Disconnected
from weft.api.reply import Reply
from weft.errors import WeftError
from weft.service import Answer

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would keep events back
]

Opened = Callable[[], Awaitable[Answer]]
Ended = Callable[[Answer | None, WeftError | None], None]


class EventStream:
    """The response of a streamed request. `waiting` opens the answer when the model was not ready yet."""

    def __init__(
        self, reply: Reply, answer: Answer | None, waiting: Opened | None, heartbeat: float, headers: dict[str, str], ended: Ended
    ) -> None:
        self.reply = reply
        self.answer = answer
        self.waiting = waiting
        self.heartbeat = heartbeat
        self.headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI protocol
        """Send everything there is to send."""
        error: WeftError | None = None
        watch = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + self.headers})
            await send({"type": "http.response.body", "body": self.reply.opening(), "more_body": True})
            async for frames in self._frames():
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": self.reply.closing()})
        except WeftError as caught:
            error = caught
            await send({"type": "http.response.body", "body": self.reply.failure(error)})
        finally:
            watch.cancel()
            self.ended(self.answer, error)

    async def _frames(self) -> AsyncIterator[bytes]:
        async for frame in self._until_open():
            yield frame
        assert self.answer is not None
        async with contextlib.aclosing(self.answer.parts(self.heartbeat)) as parts:
            async for news in parts:
                if news:
                    yield b"".join([self.reply.pieces(choice, deltas) for choice, deltas in news])
                else:
                    yield self.reply.heartbeat(sum(self.answer.computed), self.answer.num_prompt_tokens)

    async def _until_open(self) -> AsyncIterator[bytes]:
        if self.answer is not None or self.waiting is None:
            return
        opening = asyncio.ensure_future(self.waiting())
        try:
            while not (await asyncio.wait([opening], timeout=self.heartbeat))[0]:
                yield self.reply.heartbeat(0, 0)
            self.answer = opening.result()
        finally:
            opening.cancel()

    async def _watch(self, receive: Receive) -> None:
        await gone(receive)
        while self.answer is None:  # it can not be left before it is open
            await asyncio.sleep(0.05)
        self.answer.abandon(Disconnected())


async def whole(reply: Reply, answer: Answer, receive: Receive) -> dict[str, Any]:
    """The body of a reply that is not streamed. Raises what ended it, Disconnected when the client went away."""
    watch = asyncio.create_task(_abandon(answer, receive))
    try:
        async with contextlib.aclosing(answer.parts(silence=60.0)) as parts:
            async for news in parts:
                for choice, deltas in news:
                    reply.take(choice, deltas)
    finally:
        watch.cancel()
    return reply.whole()


async def _abandon(answer: Answer, receive: Receive) -> None:
    await gone(receive)
    answer.abandon(Disconnected())


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
