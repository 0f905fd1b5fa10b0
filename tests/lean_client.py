"""An HTTP client that costs next to nothing, for tests with crowds: the processor's time is to be the server's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """A reply whose head has come. Closing it before its end is what a client does that goes away."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def lines(self) -> AsyncIterator[str]:
        """The lines of the body, as they come."""
        rest = b""
        async for data in self._data():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line.decode()
        if rest:
            yield rest.decode()

    async def text(self) -> str:
        """The whole body."""
        return b"".join([data async for data in self._data()]).decode()

    def close(self) -> None:
        self._writer.close()

    async def _data(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._reader.read()
            return
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]


async def ask(port: int, path: str, body: dict[str, Any] | bytes | None = None, **headers: str) -> Reply:
    """Send a request over a connection of its own, GET where there is no body; return when the head of the reply is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    named = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(data))}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    writer.write(f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    except BaseException:
        writer.close()
        raise
    given = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Reply(int(first.split()[1]), given, reader, writer)


def ask_all(port: int, path: str, bodies: list[dict[str, Any]], seconds: float = 120.0) -> list[tuple[Reply, str]]:
    """Everything at once: replies and their bodies, in order. Nobody may be left without one."""

    async def whole(body: dict[str, Any]) -> tuple[Reply, str]:
        reply = await ask(port, path, body)
        try:
            return reply, await reply.text()
        finally:
            reply.close()

    async def gather() -> list[tuple[Reply, str]]:
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*map(whole, bodies))

    return asyncio.run(gather())
