"""Prompts are encoded in lanes: a short one never waits behind long ones, and nobody's is not begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from functools import partial

import pytest

from weft.errors import RequestCancelled
from weft.serving.active_request import ActiveRequest
from weft.serving.lanes import LONG_CHARACTERS, LONG_THREADS, MESSAGE_CHARACTERS, SHORT_THREADS, EncodingLanes, num_characters
from weft.text.types import Conversation, GenerationRequest, Message, Prompt, ToolCall

LONG = LONG_CHARACTERS + 1


def request(*prompts: Prompt, prediction: str | None = None) -> GenerationRequest:
    return GenerationRequest(model=None, prompts=prompts, sampling={}, prediction=prediction)


def test_a_short_prompt_does_not_wait_behind_long_ones() -> None:
    lanes, go_on = EncodingLanes(), threading.Event()

    async def story() -> str:
        books = [asyncio.create_task(lanes.run("", LONG, partial(go_on.wait, 20))) for _ in range(SHORT_THREADS)]
        await asyncio.sleep(0)
        told = await lanes.run("", 10, lambda: "short")
        assert not any(book.done() for book in books)
        go_on.set()
        await asyncio.gather(*books)
        return told

    assert asyncio.run(story()) == "short"
    lanes.close()


def test_a_tenant_s_book_does_not_wait_behind_all_of_another_s() -> None:
    lanes, go_on, begun = EncodingLanes(), threading.Event(), list[str]()

    async def story() -> None:
        first = asyncio.create_task(lanes.run("flood", LONG, go_on.wait))
        await asyncio.sleep(0)
        tenants = ["flood"] * 20 + ["chat"]
        books = [asyncio.create_task(lanes.run(tenant, LONG, partial(begun.append, tenant))) for tenant in tenants]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, *books)

    asyncio.run(story())

    assert begun.index("chat") <= 1
    lanes.close()


def test_a_prompt_whose_client_left_is_not_begun() -> None:
    lanes, go_on, begun = EncodingLanes(), threading.Event(), []

    async def story() -> None:
        first = [asyncio.create_task(lanes.run("", LONG, go_on.wait)) for _ in range(LONG_THREADS)]
        asked = ActiveRequest("one", request("x"))
        waiting = asyncio.create_task(_wait_for(asked, lanes.run("", LONG, lambda: begun.append(1))))
        await asyncio.sleep(0)
        asked.abandon(RequestCancelled("it left"))
        with pytest.raises(RequestCancelled, match="it left"):
            await waiting
        go_on.set()
        await asyncio.gather(*first)
        await lanes.run("", LONG, lambda: None)

    asyncio.run(story())

    assert begun == []
    lanes.close()


async def _wait_for(asked: ActiveRequest, work: Awaitable[None]) -> None:
    await asked.while_wanted(work)


def test_work_that_is_wanted_is_returned_and_its_error_raised() -> None:
    async def story() -> tuple[str, type[BaseException]]:
        asked = ActiveRequest("one", request("x"))
        told = await asked.while_wanted(asyncio.sleep(0, "done"))
        with pytest.raises(ValueError, match="broken") as caught:
            await asked.while_wanted(_fail())
        return told, type(caught.value)

    async def _fail() -> None:
        raise ValueError("broken")

    assert asyncio.run(story()) == ("done", ValueError)


def test_all_texts_of_a_request_count() -> None:
    messages = (Message("user", "four"), Message("assistant", None, reasoning="abc", tool_calls=(ToolCall("f", "{}"),)))
    parts = Message("user", [{"type": "text", "text": "12345"}, {"type": "image"}, {"type": "text", "text": 5}])

    assert (
        num_characters(request(Conversation((*messages, parts)), "ab", (1, 2, 3), prediction="xy"))
        == 4 + 3 + 2 + 5 + 2 + 3 + 2 + 3 * MESSAGE_CHARACTERS
    )
