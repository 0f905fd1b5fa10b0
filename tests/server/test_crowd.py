"""Many clients at once on a real server: nobody is lost, and nobody's answer changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2

from lean_client import ask
from servers import Server
from waiting import HANG_SECONDS

WORDS = ["dog", "red ball", "little girl", "old tree", "blue bird", "big house", "small boat", "green frog"]


def request(index: int, tokens: int) -> dict[str, Any]:
    """A prompt of its own length and an answer of its own length, greedy."""
    text = " ".join(f"The {WORDS[(index + step) % len(WORDS)]} was happy." for step in range(1 + 7 * (index % 5)))
    return {"model": "tiny-hybrid", "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def _answer(port: int, index: int) -> str:
    """What one of ten requests, every other one a chat, is answered with, not streamed."""
    body, path = request(index, 6 + index), "/v1/completions"
    if index % 2:
        body["messages"], path = [{"role": "user", "content": body.pop("prompt")}], "/v1/chat/completions"
    reply = await ask(port, path, body)
    told = json.loads(await reply.text())
    reply.close()
    assert (reply.status, told["usage"]["completion_tokens"]) == (200, 6 + index), told
    (choice,) = told["choices"]
    return "".join(choice.get("message", choice).get(part) or "" for part in ("reasoning_content", "content", "text"))


async def _answers(port: int, at_once: int) -> list[str]:
    """The answers to all ten, so many of them at a time."""
    gate = asyncio.Semaphore(at_once)

    async def wait_for(index: int) -> str:
        async with gate:
            return await _answer(port, index)

    return await asyncio.gather(*map(wait_for, range(10)))


def test_ten_requests_by_three_twenty_times_are_answered_as_alone_by_one_engine(server: Server) -> None:
    engine = server.status()["engine_pid"]
    alone = asyncio.run(_answers(server.port, at_once=1))
    for _ in range(20):
        assert asyncio.run(_answers(server.port, at_once=3)) == alone

    assert len(set(alone)) == 10  # so that an answer in another's place would be seen
    status = server.status()
    assert status["engine_pid"] == engine
    assert status["engine_restarts"] == 0


async def _streamed(client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> str:
    text = ""
    async with client.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return text


async def _all_streamed(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    async with httpx2.AsyncClient(timeout=HANG_SECONDS, verify=False, limits=httpx2.Limits(max_connections=100)) as client:
        return await asyncio.gather(*(_streamed(client, url, body) for body in bodies))


def test_sixty_four_streams_at_once_each_answer_as_if_alone(server: Server) -> None:
    bodies = [request(index, 3 + (index * 7) % 20) for index in range(64)]
    alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies]

    together = asyncio.run(_all_streamed(server.url, bodies))

    assert together == alone
    assert len(set(alone)) > 20  # they do differ
