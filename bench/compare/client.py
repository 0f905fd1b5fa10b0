"""One lean client for every server: OpenAI's wire on raw sockets, streamed, and the moments at which text came.

What comes is kept as it is and read when all is over, so that reading costs no server its time. Knows nothing of who is
asked; `work` says what.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SAME_MOMENT = 0.001  # seconds: what comes closer together was sent together
MOST_BYTES = 1 << 22


@dataclass(frozen=True)
class Answer:
    """What a stream has told by its end, or by the time it was cut off."""

    text: str
    moments: list[float]  # `time.perf_counter()`
    tokens: int | None  # as the server counts them
    error: str = ""


class Stream:
    """One request, and what has come back of it so far."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.address = url.removeprefix("http://").rstrip("/")
        self.path, self.body = path, {**body, "stream": True, "stream_options": {"include_usage": True}}
        self.sent = self.ended = 0.0
        self.status, self.error, self.whole = 0, "", False
        self.parts: list[tuple[float, bytes]] = []

    async def run(self) -> None:
        """Ask, and keep all that comes until the other side has ended."""
        host, _, port = self.address.partition(":")
        data = json.dumps(self.body).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: {self.address}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self.sent = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(host, int(port), limit=MOST_BYTES)
        except OSError as error:
            self.error, self.ended = f"no connection: {error}", time.perf_counter()
            return
        try:
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await self._read(reader)
            self.whole = True
        except (OSError, asyncio.IncompleteReadError, ValueError):  # a chunk without a length, too
            self.error = "the connection broke amid the answer"
        finally:
            self.ended = time.perf_counter()
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        told = (await reader.readuntil(b"\r\n\r\n")).lower()
        self.status = int(told.split()[1])
        if b"transfer-encoding: chunked" in told:
            while size := int(await reader.readline(), 16):
                self.parts.append((time.perf_counter(), (await reader.readexactly(size + 2))[:-2]))
        else:
            while part := await reader.read(1 << 16):
                self.parts.append((time.perf_counter(), part))

    def answer(self) -> Answer:
        """What came, read."""
        if self.error or self.status >= 400:
            body = b"".join(part for _, part in self.parts).decode(errors="replace")
            return Answer("", [], None, self.error or f"HTTP {self.status}: {' '.join(body.split())[:200]}")
        return read(self.parts)


def read(parts: Sequence[tuple[float, bytes]]) -> Answer:
    """The answer in a stream's parts, each with its moment."""
    text, moments, tokens, error = [], [0.0], None, ""
    for moment, event in events(parts):
        if told := event.get("error"):
            error = str(told.get("message", told) if isinstance(told, dict) else told)[:200]
        if usage := event.get("usage"):
            tokens = usage.get("completion_tokens", usage.get("output_tokens", tokens))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            said = choice.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text.append(said)
            if (said or thought) and moment - moments[-1] > SAME_MOMENT:
                moments.append(moment)
    return Answer("".join(text), moments[1:], tokens, error)


def events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events in a stream's parts, each with the moment its last byte came."""
    rest = b""
    for moment, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (told := line[5:].strip()).startswith(b"{"):
                yield moment, json.loads(told)


async def together(streams: Sequence[Stream], seconds: float) -> bool:
    """Run them at once, for so long at most; whether all came to their end."""
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    _, late = await asyncio.wait(tasks, timeout=max(seconds, 0.1))
    for task in late:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()  # a mistake of ours is told
    return not late


async def is_there(url: str) -> bool:
    """Whether somebody listens."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True
