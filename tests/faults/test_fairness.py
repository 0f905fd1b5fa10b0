"""One client floods the server, another asks for a little: it does not stand behind the flood."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from servers import Server, running
from waiting import HANG_SECONDS, until

MAX_ROWS = 8
ROUNDS = 5
FLOOD = 50
BODY = {"temperature": 0, "ignore_eos": True, "stream": True}


def short(number: int) -> dict[str, Any]:
    """A chat of its own: some lines that nobody has sent before."""
    text = f"{number}. " + " ".join(f"Ben has {number + step} toys." for step in range(20))
    return {**BODY, "prompt": text, "max_tokens": 8}


def long(number: int) -> dict[str, Any]:
    text = f"{number}. " + " ".join(f"Lily saw {number * step} birds in the big park." for step in range(100))
    return {**BODY, "prompt": text, "max_tokens": 400}


def asked(server: Server, body: dict[str, Any], key: str) -> http.client.HTTPConnection:
    """A request on its way, without a client that takes longer than the server."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"x-api-key": key})
    return connection


def answer(server: Server, number: int, key: str) -> bytes:
    """A short answer, to its end."""
    with closing(asked(server, short(number), key)) as connection:
        return connection.getresponse().read()


@contextmanager
def flooded(server: Server, key: str) -> Iterator[None]:
    """Fifty long prompts of one client, far more than can be answered in the time of the block."""
    with ExitStack() as stack:
        replies = [stack.enter_context(closing(asked(server, long(number), key))).getresponse() for number in range(FLOOD)]
        for reply in replies[:MAX_ROWS]:
            reply.readline()  # it is being answered
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running(log, "tiny-hybrid", "--max-rows", str(MAX_ROWS), "--api-key", "one", "--api-key", "two") as server:
        yield server


def test_short_requests_do_not_stand_behind_another_key_s_flood(server: Server) -> None:
    """Nine tenths of the flood are still to be answered when they have theirs; `make bench` has the times."""
    with flooded(server, "one"):
        answers = [answer(server, number, "two") for number in range(ROUNDS)]
        still_waiting = num_waiting(server)

    assert all(found.endswith(b"data: [DONE]\n\n") for found in answers)
    assert still_waiting >= 0.9 * (FLOOD - MAX_ROWS)


def test_of_one_client_s_requests_the_more_urgent_go_first(server: Server) -> None:
    wishes: dict[str, dict[str, Any]] = {
        "plain": {},
        "flex": {"service_tier": "flex"},
        "later": {},
        "urgent": {"priority": 1},
        "priority": {"service_tier": "priority"},
    }
    ended: list[str] = []

    def read(name: str, reply: http.client.HTTPResponse) -> None:
        reply.read()
        ended.append(name)

    with ExitStack() as stack:
        # All rows are taken, and one of them will be free: the others go one after the other through that.
        for number in range(MAX_ROWS):
            body = {**short(500 + number), "max_tokens": 1500 if number else 400}
            stack.enter_context(closing(asked(server, body, "one"))).getresponse().readline()
        readers = []
        for number, (name, wish) in enumerate(wishes.items()):
            reply = stack.enter_context(closing(asked(server, {**short(600 + number), **wish}, "one"))).getresponse()
            readers.append(threading.Thread(target=read, args=(name, reply)))
            readers[-1].start()
        until(lambda: num_waiting(server) == len(wishes))
        for reader in readers:
            reader.join()

    assert ended == ["priority", "urgent", "plain", "later", "flex"]


def num_waiting(server: Server) -> int:
    status = server.get("/v1/status", headers={"x-api-key": "one"}).json()
    return int(status["rows_waiting"])
