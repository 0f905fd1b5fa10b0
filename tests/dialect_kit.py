"""What the tests of all dialects share: a reply fed with deltas, streamed or as one body, and requests that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from weft.api.dialect import ParsedRequest, ReplyHeader
from weft.errors import InvalidRequest
from weft.ipc.messages import TokenLogprob
from weft.text.types import Conversation, Delta, Message, Token, Usage

HEADER = ReplyHeader(id="7", created=1, model="m", fingerprint="f")
USER = {"role": "user", "content": "Hi"}
USAGE = Usage(9, 4, cached_tokens=8, reasoning_tokens=2, queue_seconds=0.0004, prefill_seconds=0.5, decode_seconds=0.25)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}

LARGEST = 1.7976931348623157e308
# Arguments of a call as a model of other notations than JSON may write them, and what JSON can hold of them.
ODD_ARGUMENTS: list[tuple[str, Any]] = [
    ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
    ('{"a": ["x\\ud83dy", {"b": "\\uDE00"}]}', {"a": ["x\ufffdy", {"b": "\ufffd"}]}),
    ('{"\\ud83d": 1}', {"\ufffd": 1}),
    ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    ('{"a": "\\\\ud83d"}', {"a": "\\ud83d"}),
    ('{"a": NaN, "b": Infinity, "c": -Infinity}', {"a": "NaN", "b": LARGEST, "c": -LARGEST}),
]

Parts = Sequence[tuple[int, Sequence[Delta]]]  # for each choice with news its index and deltas
Item = TypeVar("Item")


def conversation_of(request: ParsedRequest) -> Conversation:
    (prompt,) = request.generation.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def messages_of(request: ParsedRequest) -> tuple[Message, ...]:
    return conversation_of(request).messages


def streamed(request: ParsedRequest, parts: Parts, header: ReplyHeader = HEADER, usage: Usage = USAGE) -> bytes:
    """A whole stream."""
    reply = request.reply(header)
    frames = [reply.frame_opening(), reply.frame_start(usage)]
    frames += [reply.frame_deltas(choice, deltas) for choice, deltas in parts]
    return b"".join([*frames, reply.frame_closing()])


def whole(request: ParsedRequest, parts: Parts, header: ReplyHeader = HEADER) -> dict[str, Any]:
    """The body of a reply that is not streamed, as a client reads it."""
    reply = request.reply(header)
    for choice, deltas in parts:
        reply.collect_deltas(choice, deltas)
    body: dict[str, Any] = json.loads(json.dumps(reply.make_body(), allow_nan=False))
    return body


def frames_of(stream: bytes, head: str = "\0") -> list[str]:
    """The frames of an event stream, with HEAD in the place of the words that all of them begin with."""
    text = stream.decode()
    assert text.endswith("\n\n")
    return [frame.replace(head, "HEAD") for frame in text.removesuffix("\n\n").split("\n\n")]


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of one of OpenAI's streams, which must be done."""
    # str.splitlines ends lines in more places than an event stream does; some clients read so.
    lines = [line for line in stream.decode().splitlines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def events_of(stream: bytes) -> list[str]:
    """The data of every event, whose name is its type; comments are left out."""
    found = []
    for frame in frames_of(stream):
        if not frame.startswith(":"):
            event, data = frame.split("\n")
            found.append(data.removeprefix("data: "))
            assert event == f"event: {json.loads(found[-1])['type']}"
    return found


def one_by_one(deltas: Sequence[Delta]) -> Parts:
    return [(0, [delta]) for delta in deltas]


def cut_at(places: Sequence[int], items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items in groups that end at these places."""
    return [items[start:end] for start, end in pairwise([0, *sorted(places), len(items)])]


def refused(make: Callable[..., object], *given: Any, **fields: Any) -> InvalidRequest:
    """The error with which a request is refused."""
    with pytest.raises(InvalidRequest) as caught:
        make(*given, **fields)
    return caught.value


def token(text: str, logprob: float | None, *top: tuple[str, float]) -> Token:
    likeliest = tuple(token(other, value) for other, value in top)
    return Token(1, text, text.encode(), None if logprob is None else TokenLogprob(1, logprob), likeliest)
