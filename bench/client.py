"""A lean HTTP client for load: raw sockets, one stream each, and the moments at which text came.

Run as `python -m bench.client URL STREAMS TOKENS PROMPT_WORDS`, it prints one JSON object. A process of its own, so that
what it costs is not taken from the server's loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def stream(host: str, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Ask for a completion; when its first text came, how many events, and what the last one said of the engine's time."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    start = time.perf_counter()
    writer.write(head.encode() + data)
    first, events, tail = 0.0, 0, b""
    while part := await reader.read(1 << 16):
        if not first and b'"text":"' in part:
            first = time.perf_counter() - start
        events += part.count(b"data: {")
        tail = (tail + part)[-2000:]
    writer.close()
    assert b"[DONE]" in tail, tail
    last = tail.decode(errors="replace").rpartition('"timings":')[2]
    timings, _ = json.JSONDecoder().raw_decode(last)
    return {"first": first, "total": time.perf_counter() - start, "events": events, "timings": timings}


async def load(url: str, streams: int, tokens: int, words: int) -> dict[str, Any]:
    """That many streams at once."""
    host, port = url.removeprefix("http://").split(":")
    bodies = [
        {"prompt": f"{number} " + "word " * words, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        for number in range(streams)
    ]
    start = time.perf_counter()
    results = await asyncio.gather(*(stream(host, int(port), body) for body in bodies))
    return {"seconds": time.perf_counter() - start, "streams": results}


if __name__ == "__main__":
    address, *counts = sys.argv[1:]
    print(json.dumps(asyncio.run(load(address, *map(int, counts)))))
