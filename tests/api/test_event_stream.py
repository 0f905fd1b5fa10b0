"""A stream by a clock of the test's: what counts is when bytes were sent, not when deltas came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from dialect_kit import HEADER
from weft.api import ollama
from weft.api.anthropic import request as anthropic
from weft.api.app import EventStream
from weft.api.dialect import ParsedRequest
from weft.api.http import Deadline
from weft.api.openai import chat, completions, responses
from weft.serving.active_request import ActiveRequest, Parts
from weft.serving.silence import Silence
from weft.text.types import CallArguments, CallOpened, Delta, GenerationRequest, Reasoning, Text, Usage

LONGEST = 10
SAID = [{"role": "user", "content": "Hi"}]
THINKING = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
TEXT_TOOL = {"type": "custom", "name": "write"}
OPENED = CallOpened(0, "call_1", "write")
# Of each dialect a request, deltas that its client sees, and one of which it sees nothing.
CASES: dict[str, tuple[Callable[..., ParsedRequest], dict[str, Any], list[Delta], Delta]] = {
    "chat": (chat.translate, {"messages": SAID}, [Text("a")], Text("")),
    "chat, custom tool": (
        chat.translate,
        {"messages": SAID, "tools": [{"type": "custom", "custom": {"name": "write"}}]},
        [OPENED],
        CallArguments(0, ""),
    ),
    "completions": (completions.translate, {"prompt": "Hi"}, [Text("a")], Text("")),
    "responses": (responses.translate, {"input": "Hi"}, [Text("a")], Text("")),
    "responses, custom tool": (responses.translate, {"input": "Hi", "tools": [TEXT_TOOL]}, [OPENED], CallArguments(0, "")),
    "messages": (anthropic.translate, {"messages": SAID, "max_tokens": 9, "thinking": THINKING}, [Text("a")], Text("")),
    "messages, thinking": (
        anthropic.translate,
        {"messages": SAID, "max_tokens": 2000, "thinking": THINKING},
        [Reasoning("I")],
        Reasoning(" think"),
    ),
    "ollama": (ollama.translate_chat, {"messages": SAID}, [Text("a")], Text("")),
    "ollama, a call": (ollama.translate_chat, {"messages": SAID}, [Text("a"), OPENED], CallArguments(0, '"a')),
}


class Answered(ActiveRequest):
    """A request whose counts are made up."""

    @property
    def usage(self) -> Usage:
        return Usage(9, 4)


def sent_at(request: ParsedRequest, deltas: Sequence[tuple[int, Delta | None]]) -> list[int]:
    """The times at which a stream sends bytes, of deltas that come at times of their own; None is a mere wake-up."""

    async def run() -> list[int]:
        now, times, active = [0], list[int](), Answered("7", GenerationRequest(model=None, prompts=(), sampling={}))

        async def parts() -> AsyncGenerator[Parts]:
            yield []
            for now[0], delta in deltas:
                yield [] if delta is None else [(0, [delta])]
            raise asyncio.CancelledError

        async def never() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message.get("body") and message["more_body"]:
                times.append(now[0])

        generated = parts()
        first = asyncio.ensure_future(anext(generated))
        await asyncio.wait((first,))
        silence = Silence(LONGEST, lambda: float(now[0]))
        stream = EventStream(request.reply(HEADER), active, generated, first, silence, lambda _: None, Deadline(), {})
        with pytest.raises(asyncio.CancelledError):
            await stream({}, never, send)
        return times

    return asyncio.run(run())


@pytest.mark.parametrize("case", CASES)
def test_no_client_hears_nothing_for_longer_than_a_heartbeat(case: str) -> None:
    translate, body, seen, unseen = CASES[case]
    for seconds in range(1, 14):
        deltas: list[tuple[int, Delta | None]] = [(1, delta) for delta in seen]
        deltas += [(1 + seconds * count, unseen) for count in range(1, 60)]
        times = [time for time in sent_at(translate(body), deltas) if time]

        assert times[0] == 1
        assert times[-1] > deltas[-1][0] - LONGEST - seconds
        assert {after - before for before, after in pairwise(dict.fromkeys(times))} == {-(-LONGEST // seconds) * seconds}


@pytest.mark.parametrize("case", CASES)
def test_a_client_that_was_told_something_is_sent_no_heartbeat_before_its_time(case: str) -> None:
    translate, body, seen, _ = CASES[case]
    wakes: list[tuple[int, Delta | None]] = [(9, seen[0]), *((time, None) for time in (10, 18, 19, 20, 28, 29, 38, 40))]

    assert [time for time in sent_at(translate(body), wakes) if time > 9] == [19, 29, 40]
