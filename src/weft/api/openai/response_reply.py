"""What a Responses request is answered with: a response whole, or the events of its making, in their exact order.

Both come out of the same steps: each output item tells events while it is made, and is part of the response when it is
done. Knows deltas and the names of tools; nothing of HTTP, and nothing of what was asked beyond what is told back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

from weft.api.dialect import ReplyHeader, kept_tokens
from weft.api.openai.common import Counts, encoded, ended, kind_of, timings_of, tokens_of
from weft.api.openai.response_items import Item, filed
from weft.api.openai.response_output import CallOutput, CustomCallOutput, Event, MessageOutput, OutputItem, ReasoningOutput
from weft.api.openai.response_tools import Tools
from weft.api.problems import headers_of, openai_body
from weft.errors import BusyError, ContextTooLong, QueueFull, RequestError, WeftError
from weft.ipc.limits import Sampling
from weft.text.types import CallArguments, CallClosed, CallOpened, Delta, Finish, Reasoning, Text, Usage

Keep = Callable[[Item, list[Item]], None]  # takes a response, and the items it answers

SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# What a client does next depends on the code: shorten its history, give up, or come again. The first row that fits is taken.
CODES: tuple[tuple[type[WeftError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (RequestError, "invalid_prompt"),
    (QueueFull, "rate_limit_exceeded"),
    (BusyError, "server_is_overloaded"),
)


@dataclass(frozen=True)
class Frame:
    """What a reply must know of its request."""

    told: Item  # the fields that every response tells back
    tools: Tools
    items: list[Item] = field(default_factory=list)  # what is answered
    has_summary: bool = False  # thinking has a summary
    is_sealed: bool = False  # thinking is carried back by a client that keeps no clear text
    keep: Keep | None = None  # whom the finished response is given to


class ResponseReply:
    """A response, or its events."""

    def __init__(self, heading: ReplyHeader, frame: Frame) -> None:
        self.heading = heading
        self.frame = frame
        self._output: list[Item] = []
        self._making: OutputItem | None = None
        self._finish: Finish | None = None
        self._number = 0  # of the next event
        self._begun = msgspec.Raw(encoded(self._response("in_progress")))

    def opening(self) -> bytes:
        """The response, with nothing in it yet."""
        return self._frames([_lifecycle("created", self._begun), _lifecycle("in_progress", self._begun)])

    def begun(self, usage: Usage) -> bytes:  # noqa: ARG002 - told at the end
        """Nothing: counts come last."""
        return b""

    def pieces(self, choice: int, deltas: Sequence[Delta]) -> bytes:  # noqa: ARG002 - there is one choice
        """The events of what is new."""
        return self._frames(self._events(deltas))

    def heartbeat(self, computed: int, total: int) -> bytes:
        """A comment for people, and an event for clients whose timers do not hear comments."""
        return b": prefill %d/%d\n\n" % (computed, total) + self._frames([_lifecycle("in_progress", self._begun)])

    def closing(self) -> bytes:
        """The whole response."""
        response = self.whole()
        return self._frames([_lifecycle(response["status"], response)])

    def failure(self, error: WeftError) -> bytes:
        """The response that failed, with what there is of it."""
        cut = [] if self._making is None else [self._making.item("incomplete")]
        failed = self._response("failed", error=_error(error), output=self._output + cut)
        return self._frames([_lifecycle("failed", failed)])

    def take(self, choice: int, deltas: Sequence[Delta]) -> None:  # noqa: ARG002 - there is one choice
        """The same as in a stream, only that nobody hears the events."""
        for _ in self._events(deltas):
            pass

    def whole(self) -> Item:
        """The finished response. Who keeps it is given it."""
        assert self._finish is not None, "it is asked for at the end"
        usage = self._finish.usage or Usage(0, 0)
        is_cut = self._finish.reason == "length"
        response = self._response(
            "incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._output,
            usage=_usage(usage),
            timings=timings_of([usage]),
            **ended(self._finish),
        )
        if self.frame.keep is not None:
            named = (f"item_{self.heading.id}_in{index}" for index in range(len(self.frame.items)))
            self.frame.keep(response, [filed(item, name) for item, name in zip(self.frame.items, named, strict=True)])
        return response

    def _response(self, status: str, **made: Any) -> Item:
        sampling = self.heading.sampling or Sampling(temperature=1.0)
        blank = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        return {
            "id": f"resp_{self.heading.id}",
            "object": "response",
            "created_at": self.heading.created,
            "status": status,
            "background": False,
            "model": self.heading.model,
            "system_fingerprint": self.heading.fingerprint,
            "output": [],
            **blank,
            **self.frame.told,
            **{name: getattr(sampling, name) for name in SAMPLED},
            **made,
        }

    def _events(self, deltas: Sequence[Delta]) -> Iterator[Event]:
        for _, run in groupby(deltas, kind_of):
            yield from self._told(list(run))

    def _told(self, run: list[Delta]) -> Iterator[Event]:
        match run[0]:
            case Text():
                yield from self._said(run, MessageOutput, MessageOutput)
            case Reasoning():
                frame = self.frame
                yield from self._said(
                    run, ReasoningOutput, lambda: ReasoningOutput(has_summary=frame.has_summary, is_sealed=frame.is_sealed)
                )
            case CallOpened(id=call_id, name=name):
                called = self.frame.tools.called(name)
                yield from self._open(CustomCallOutput(call_id, called) if called.is_custom else CallOutput(call_id, called))
            case CallArguments() if self._making is not None:
                yield from self._making.add(run)
            case CallClosed() if isinstance(self._making, CallOutput):
                self._making.is_closed = True
                yield from self._close("completed")
            case Finish() as finish:
                yield from self._close("incomplete" if finish.reason == "length" else "completed")
                self._finish = finish

    def _said(self, run: list[Delta], kind: type[OutputItem], make: Callable[[], OutputItem]) -> Iterator[Event]:
        """More of an item of this kind, or a new one where there is something to say."""
        if not isinstance(self._making, kind):
            if not any(isinstance(delta, Text | Reasoning) and (delta.text or tokens_of(delta)) for delta in run):
                return
            yield from self._open(make())
        assert self._making is not None
        yield from self._making.add(run)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        item.index = len(self._output)
        item.id = f"{item.prefix}_{self.heading.id}_{item.index}"
        self._making = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        item, self._making = self._making, None
        if item is not None:
            yield from item.end(status)
            self._output.append(item.item(status))

    def _frames(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            data = encoded({"type": event["type"], "sequence_number": self._number, **event})
            frames.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
            self._number += 1
        return b"".join(frames)


def _lifecycle(what: str, response: Item | msgspec.Raw) -> Event:
    return {"type": f"response.{what}", "response": response}


def _usage(usage: Usage) -> dict[str, Any]:
    counts = Counts.of([usage])
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": kept_tokens(usage)},
        "output_tokens": counts.answer,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.answer,
    }


def _error(error: WeftError) -> dict[str, Any]:
    """An error with a code that clients know; `type` has weft's own word for it."""
    body = openai_body(error)["error"]
    code = next((code for kind, code in CODES if isinstance(error, kind)), "server_error")
    message, wait = body["message"], headers_of(error).get("retry-after")
    if wait is not None:
        message = f"{message.rstrip('.')}. Please try again in {wait}s."  # Codex reads the seconds here
    return {"code": code, "message": message, "param": body["param"], "type": body["code"] or body["type"]}
