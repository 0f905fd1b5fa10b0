"""Asking an engine what it keeps: everybody who asks gets an answer or an error."""

from __future__ import annotations

import asyncio

import pytest

from weft.errors import EngineDied, EngineError
from weft.ipc.messages import AskPrefixes, Prefixes, ToEngine
from weft.serving.in_flight import EngineClient


class Line:
    """Takes messages to an engine that is not there."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)


def asked(line: Line) -> list[AskPrefixes]:
    return [message for message in line.sent if isinstance(message, AskPrefixes)]


def connected() -> tuple[EngineClient, Line]:
    client, line = EngineClient(), Line()
    client.attach(line.send, max_rows=4)
    return client, line


def test_answers_go_to_those_who_asked_in_any_order() -> None:
    async def run() -> list[int]:
        client, line = connected()
        asking = [asyncio.create_task(client.prefixes(clear=clear)) for clear in (False, True)]
        await asyncio.sleep(0)
        for message in reversed(asked(line)):
            client.receive_prefixes(Prefixes(message.number, (), 0, 10 + message.clear, 0))
        client.receive_prefixes(Prefixes(999, (), 0, 0, 0))  # nobody asked that
        return [(await task).held_bytes for task in asking]

    assert asyncio.run(run()) == [10, 11]


def test_an_engine_that_goes_ends_the_waiting() -> None:
    async def run() -> None:
        client, _ = connected()
        asking = asyncio.create_task(client.prefixes())
        await asyncio.sleep(0)
        client.detach()
        await asking

    with pytest.raises(EngineDied, match="what it keeps"):
        asyncio.run(run())


def test_a_front_that_gives_its_engine_up_ends_the_waiting() -> None:
    async def run() -> None:
        client, _ = connected()
        asking = asyncio.create_task(client.prefixes())
        await asyncio.sleep(0)
        client.fail_all(lambda: EngineDied("given up"))
        await asking

    with pytest.raises(EngineDied, match="given up"):
        asyncio.run(run())


def test_without_an_engine_nobody_is_asked() -> None:
    with pytest.raises(EngineDied, match="not there"):
        asyncio.run(EngineClient().prefixes())


def test_a_silent_engine_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.in_flight.ANSWER_SECONDS", 0.01)

    async def run() -> None:
        client, line = connected()
        try:
            await client.prefixes()
        finally:
            client.receive_prefixes(Prefixes(asked(line)[0].number, (), 0, 0, 0))  # too late, and nobody minds

    with pytest.raises(EngineError, match=r"within 0\.01 seconds"):
        asyncio.run(run())
