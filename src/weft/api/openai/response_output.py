"""Output items of a response in the making: thinking, a message, a call. Each tells events and ends as a part of the response.

Knows deltas and what an item looks like on the wire; numbers and frames are `response_reply`'s, who makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from weft.api.openai.common import joined, logprobs_of
from weft.api.openai.response_items import Item, sealed
from weft.api.openai.response_tools import Called
from weft.text.tools import CustomInputReader
from weft.text.types import CallArguments, Delta, Reasoning, Text

Event = dict[str, Any]  # without its number


class OutputItem:
    """A part of the answer, as far as it is there."""

    prefix: ClassVar[str]  # of its id

    def __init__(self) -> None:
        self.id = ""
        self.index = 0  # among the response's items
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """What it says."""
        return "".join(self._texts)

    def item(self, status: str) -> Item:
        """It as a part of the response."""
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        """Announce it."""
        yield self._whole("added", "in_progress")

    def add(self, run: Sequence[Delta]) -> Iterator[Event]:
        """Tell more of it."""
        raise NotImplementedError

    def end(self, status: str) -> Iterator[Event]:
        """Tell all of it."""
        yield self._whole("done", status)

    def _whole(self, what: str, status: str) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": self.index, "item": self.item(status)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class ReasoningOutput(OutputItem):
    """What is thought before the answer. A summary, where one is asked for, is all of it: nobody here could shorten it."""

    prefix = "rs"

    def __init__(self, *, has_summary: bool, is_sealed: bool) -> None:
        super().__init__()
        self._has_summary = has_summary
        self._is_sealed = is_sealed

    def item(self, status: str) -> Item:
        """Its text, its summary, and the same sealed where the client keeps no clear text."""
        is_done = status != "in_progress"
        content = [self._part("reasoning_text")] if is_done else []
        summary = [self._part("summary_text")] if is_done and self._has_summary else []
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": summary, "content": content}
        return item | {"encrypted_content": sealed(self.text)} if is_done and self._is_sealed else item

    def begin(self) -> Iterator[Event]:
        """Announce it, its summary and its text."""
        yield from super().begin()
        if self._has_summary:
            yield self._event("reasoning_summary_part.added", summary_index=0, part=self._part("summary_text"))
        yield self._event("content_part.added", content_index=0, part=self._part("reasoning_text"))

    def add(self, run: Sequence[Delta]) -> Iterator[Event]:
        """More of the text."""
        text = joined([delta for delta in run if isinstance(delta, Reasoning)])
        if text:
            self._texts.append(text)
            if self._has_summary:
                yield self._event("reasoning_summary_text.delta", summary_index=0, delta=text)
            yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def end(self, status: str) -> Iterator[Event]:
        """All of the text."""
        if self._has_summary:
            yield self._event("reasoning_summary_text.done", summary_index=0, text=self.text)
            yield self._event("reasoning_summary_part.done", summary_index=0, part=self._part("summary_text"))
        yield self._event("reasoning_text.done", content_index=0, text=self.text)
        yield self._event("content_part.done", content_index=0, part=self._part("reasoning_text"))
        yield from super().end(status)

    def _part(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "text": self.text}


class MessageOutput(OutputItem):
    """What is said."""

    prefix = "msg"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[dict[str, Any]] = []

    def item(self, status: str) -> Item:
        """A message with one part."""
        content = [self._part()] if status != "in_progress" else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begin(self) -> Iterator[Event]:
        """Announce it and its text."""
        yield from super().begin()
        yield self._event("content_part.added", content_index=0, part=self._part())

    def add(self, run: Sequence[Delta]) -> Iterator[Event]:
        """More of the text, with log-probabilities where they were asked for."""
        texts = [delta for delta in run if isinstance(delta, Text)]
        text, logprobs = joined(texts), logprobs_of(texts)
        if text or logprobs:
            self._texts.append(text)
            self._logprobs += logprobs
            yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def end(self, status: str) -> Iterator[Event]:
        """All of the text."""
        yield self._event("output_text.done", content_index=0, text=self.text, logprobs=self._logprobs)
        yield self._event("content_part.done", content_index=0, part=self._part())
        yield from super().end(status)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}


class CallOutput(OutputItem):
    """A function that is called. One that is cut short is not told as done: clients would call it."""

    prefix = "fc"
    kind: ClassVar[str] = "function_call"
    field: ClassVar[str] = "arguments"  # that has the text
    pieces: ClassVar[str] = "function_call_arguments"  # as its events are called

    def __init__(self, call_id: str, called: Called) -> None:
        super().__init__()
        self.is_closed = False
        self._call_id = call_id
        self._called = called

    def item(self, status: str) -> Item:
        """The call."""
        status = status if self.is_closed or status == "in_progress" else "incomplete"
        names = {"call_id": self._call_id, **self._called.fields}
        return {"id": self.id, "type": self.kind, "status": status, **names, self.field: self.text}

    def add(self, run: Sequence[Delta]) -> Iterator[Event]:
        """More of what it is called with."""
        text = self._read("".join(delta.text for delta in run if isinstance(delta, CallArguments)))
        if text:
            self._texts.append(text)
            yield self._event(f"{self.pieces}.delta", delta=text)

    def end(self, status: str) -> Iterator[Event]:
        """All of it."""
        if self.is_closed:
            yield self._event(f"{self.pieces}.done", **{self.field: self.text})
            yield from super().end(status)

    def _read(self, arguments: str) -> str:
        return arguments


class CustomCallOutput(CallOutput):
    """A tool that is called with a text, which the model wrote into JSON."""

    prefix = "ctc"
    kind = "custom_tool_call"
    field = "input"
    pieces = "custom_tool_call_input"

    def __init__(self, call_id: str, called: Called) -> None:
        super().__init__(call_id, called)
        self._raw = CustomInputReader()

    def _read(self, arguments: str) -> str:
        return self._raw.feed(arguments)
