"""Deltas → Anthropic's events, or the message that a client makes of them: it is made here in the same way.

Blocks follow each other: thinking, text and each call open one and close the one before. Knows no HTTP and no model; `messages`
hands it out with each request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from weft.api.anthropic.blocks import tool_use_id
from weft.api.anthropic.signature import signature
from weft.api.dialect import ReplyHeader, kept_tokens
from weft.api.openai.common import encoded
from weft.api.problems import anthropic_body
from weft.errors import WeftError
from weft.text.types import CallArguments, CallClosed, CallOpened, Delta, Finish, Reasoning, Text, Usage

Event = dict[str, Any]

FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature", "input_json_delta": "partial_json"}
# Nearly every event is this one, so it is not built from its parts.
MORE_TEXT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


@dataclass(frozen=True)
class MessageShape:
    """What a reply must know of its request."""

    max_tokens: int
    hides_thinking: bool


class MessagesReply:
    """A message, or its events."""

    def __init__(self, heading: ReplyHeader, shape: MessageShape) -> None:
        self.shape = shape
        self._request_id = heading.id
        self._message: dict[str, Any] = {
            "id": f"msg_{heading.id}",
            "type": "message",
            "role": "assistant",
            "model": heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._kind: str | None = None  # of the block that is open
        self._index = -1  # of the last one that was opened
        self._thought = ""  # the thinking of that block
        self._taken: list[Event] = []

    def opening(self) -> bytes:
        """Nothing: a message starts with the counts of its prompt."""
        return b""

    def begun(self, usage: Usage) -> bytes:
        """The message, still empty."""
        return _frame({"type": "message_start", "message": self._message | {"usage": _usage(usage)}})

    def pieces(self, choice: int, deltas: Sequence[Delta]) -> bytes:  # noqa: ARG002 - there is only one
        """Events for what is new."""
        if len(deltas) == 1 and type(delta := deltas[0]) is Text and delta.text and self._kind == "text":
            return MORE_TEXT % (self._index, encoded(delta.text))
        return b"".join(map(_frame, self._events(deltas)))

    def heartbeat(self, computed: int, total: int) -> bytes:  # noqa: ARG002 - the wire has no word for it
        """A ping, which may come before the message starts."""
        return _frame({"type": "ping"})

    def closing(self) -> bytes:
        """The end."""
        return _frame({"type": "message_stop"})

    def failure(self, error: WeftError) -> bytes:
        """The error. No end follows: a client must not take what it has for the answer."""
        return _frame(anthropic_body(error, self._request_id))

    def take(self, choice: int, deltas: Sequence[Delta]) -> None:  # noqa: ARG002 - there is only one
        """Collect what is new, for `whole`."""
        self._taken += self._events(deltas)

    def whole(self) -> dict[str, Any]:
        """The message as its events make it. The input of a call that was cut is empty: half of one must not be run."""
        blocks: list[dict[str, Any]] = []
        end: dict[str, Any] = {}
        for event in self._taken:
            match event:
                case {"content_block": block}:
                    blocks.append(dict(block))
                case {"index": index, "delta": {"type": kind, **told}}:
                    blocks[index][FIELDS[kind]] = blocks[index].get(FIELDS[kind], "") + told[FIELDS[kind]]
                case {"type": "message_delta", "delta": delta, "usage": usage}:
                    end = {**delta, "usage": usage}
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block.pop("partial_json", ""))
        return {**self._message, "content": blocks, **end}

    def _events(self, deltas: Sequence[Delta]) -> Iterator[Event]:
        """Everything that a stream tells between its start and its end."""
        for _, run in groupby(deltas, _kind):
            yield from self._told(list(run))

    def _told(self, run: list[Delta]) -> Iterator[Event]:
        text = "".join(delta.text for delta in run if isinstance(delta, Text | Reasoning | CallArguments))
        match run[0]:
            case Text() if text:
                yield from self._opened("text", text="")
                yield self._delta("text_delta", text)
            case Reasoning() if text:
                yield from self._opened("thinking", thinking="", signature="")
                self._thought += text
                if not self.shape.hides_thinking:
                    yield self._delta("thinking_delta", text)
            case CallOpened(id=call, name=name):
                yield from self._closed()
                yield from self._opened("tool_use", id=tool_use_id(call), name=name, input={})
            case CallArguments() if text:
                yield self._delta("input_json_delta", text)
            case CallClosed():
                yield from self._closed()
            case Finish() as finish:
                yield from self._closed()
                yield {"type": "message_delta", **self._end(finish)}

    def _opened(self, kind: str, **fields: Any) -> Iterator[Event]:
        if self._kind == kind:
            return
        yield from self._closed()
        self._kind, self._index, self._thought = kind, self._index + 1, ""
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _closed(self) -> Iterator[Event]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield self._delta("signature_delta", signature(self._thought, self.shape.hides_thinking))
        self._kind = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, FIELDS[kind]: text}}

    def _end(self, finish: Finish) -> dict[str, Any]:
        usage = finish.usage or Usage(0, 0)
        stop = finish.stop if isinstance(finish.stop, str) else None
        match finish.reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":  # the answer may have been asked for longer than the context is
                reason = "max_tokens" if usage.completion_tokens >= self.shape.max_tokens else "model_context_window_exceeded"
            case _:
                reason = "end_turn" if stop is None else "stop_sequence"
        return {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": _usage(usage)}


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.index if isinstance(delta, CallOpened | CallArguments | CallClosed) else 0


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts as Anthropic tells them: read before, computed and kept, and computed for this request alone; in sum the prompt."""
    kept = kept_tokens(usage)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - kept,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _frame(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event))
