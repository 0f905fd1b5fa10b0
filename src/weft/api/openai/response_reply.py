"""Replies of POST /v1/responses: the response as one body, or its stream events in OpenAI's order."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.api import dialect
from weft.api.dialect import Reply, ReplyHeader, encode_json, join_texts
from weft.api.openai.reply import logprobs_of, timings_of
from weft.api.openai.response_items import Item, OutputTools, complete_item
from weft.api.problems import response_error
from weft.text.tools import CustomInputReader
from weft.text.types import CallArguments, CallClosed, CallOpened, Delta, Finish, Reasoning, Text, Usage

Event = dict[str, Any]  # without its number
Keep = Callable[[Item, list[Item]], None]  # takes a response, and the items it answers

SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}  # by an item's type


CALL_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field that holds the text of a call
# By the type of a part: how the events of its text begin, how its own events begin, and the name of its index.
PART_EVENTS = {
    "output_text": ("output_text", "content_part", "content_index"),
    "reasoning_text": ("reasoning_text", "content_part", "content_index"),
    "summary_text": ("reasoning_summary_text", "reasoning_summary_part", "summary_index"),
}


@dataclass(frozen=True)
class ResponseShape:
    """What `ResponseReply` needs of its request: fields to repeat, tools, input items, and reasoning and storage options."""

    repeated: Item  # the fields that every response repeats
    tools: OutputTools
    items: list[Item] = field(default_factory=list)  # the input
    has_summary: bool = False  # also return reasoning as a summary, which is the whole reasoning: nothing shortens it
    is_sealed: bool = False  # also return reasoning as encrypted_content, made by `seal`
    keep: Keep | None = None  # stores the finished response


class ResponseReply(Reply):
    """Encodes a reply as a response of OpenAI's Responses API, or as its stream events."""

    def __init__(self, header: ReplyHeader, shape: ResponseShape) -> None:
        super().__init__()
        self.header = header
        self.shape = shape
        self._output: list[Item] = []
        self._open_item: OutputItem | None = None
        self._finish: Finish | None = None
        self._num_events = 0
        self._begun = msgspec.Raw(encode_json(self._response("in_progress")))

    def frame_opening(self) -> bytes:
        return self._frame([_lifecycle("created", self._begun), _lifecycle("in_progress", self._begun)])

    def frame_run(self, _choice: int, run: list[Delta]) -> bytes:
        return self._frame(self._events(run))

    def frame_heartbeat(self, num_computed: int, num_tokens: int) -> bytes:
        return b": prefill %d/%d\n\n" % (num_computed, num_tokens) + self._frame([_lifecycle("in_progress", self._begun)])

    def frame_closing(self) -> bytes:
        response = self.make_body()
        return self._frame([_lifecycle(response["status"], response)])

    def frame_error(self, error: Exception) -> bytes:
        cut = [] if self._open_item is None else [self._open_item.item("incomplete")]
        failed = self._response("failed", error=response_error(error), output=self._output + cut)
        return self._frame([_lifecycle("failed", failed)])

    def make_body(self) -> Item:
        """Return the finished response; also store it, with its input items, if storing is on for this request."""
        for run in self.runs(self.collected[0]):
            list(self._events(run))  # fills the output as a stream would; the events are discarded
        assert self._finish is not None, "a response is made at the end"
        usage = self._finish.usage or Usage(0, 0)
        is_cut = self._finish.reason == "length"
        response = self._response(
            "incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._output,
            usage=_usage(usage),
            timings=timings_of([usage]),
            stop_reason=self._finish.stop,
            **dialect.schema_verdict(self._finish),
        )
        if self.shape.keep is not None:
            items = [complete_item(item, f"item_{self.header.id}_in{index}") for index, item in enumerate(self.shape.items)]
            self.shape.keep(response, items)
        return response

    def _response(self, status: str, **made: Any) -> Item:
        return {
            "id": f"resp_{self.header.id}",
            "object": "response",
            "created_at": self.header.created,
            "status": status,
            "background": False,
            "model": self.header.model,
            "system_fingerprint": self.header.fingerprint,
            "output": [],
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
            **self.shape.repeated,
            **self._sampled,
            **made,
        }

    @property
    def _sampled(self) -> dict[str, float | None]:
        """The sampling that is used; {} while the model's defaults are not known, where what the request asks for is repeated."""
        return {} if self.header.sampling is None else dialect.pick_fields(self.header.sampling, *SAMPLED)

    def _events(self, run: list[Delta]) -> Iterator[Event]:
        match run[0]:
            case Text():
                yield from self._extend("message", ("output_text",), run)
            case Reasoning():
                summary = ("summary_text",) if self.shape.has_summary else ()
                yield from self._extend("reasoning", (*summary, "reasoning_text"), run)
            case CallOpened(id=call_id, name=name):
                tool = self.shape.tools.find(name)
                kind = "custom_tool_call" if tool.kind == "custom" else "function_call"
                yield from self._open(OutputItem(kind, (), {"call_id": call_id, **tool.names}))
            case CallArguments() if self._open_item is not None and self._open_item.field:
                yield from self._open_item.add(run)
            case CallClosed() if self._open_item is not None and self._open_item.field:
                self._open_item.is_closed = True
                yield from self._close("completed")
            case Finish() as finish:
                yield from self._close("incomplete" if finish.reason == "length" else "completed")
                self._finish = finish

    def _extend(self, kind: str, parts: tuple[str, ...], run: list[Delta]) -> Iterator[Event]:
        """Add deltas to the open item, or to a new one if its kind differs; yield the events (none for empty deltas)."""
        if self._open_item is None or self._open_item.kind != kind:
            if not (join_texts(run) or logprobs_of(run)):
                return
            yield from self._open(OutputItem(kind, parts, {}, is_sealed=self.shape.is_sealed))
        assert self._open_item is not None
        yield from self._open_item.add(run)

    def _open(self, item: "OutputItem") -> Iterator[Event]:
        yield from self._close("completed")
        item.index = len(self._output)
        item.id = f"{ID_PREFIXES[item.kind]}_{self.header.id}_{item.index}"
        self._open_item = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        item, self._open_item = self._open_item, None
        if item is not None:
            yield from item.end(status)
            self._output.append(item.item(status))

    def _frame(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            frames.append(dialect.encode_event({"type": event["type"], "sequence_number": self._num_events, **event}))
            self._num_events += 1
        return b"".join(frames)


def _lifecycle(what: str, response: Item | msgspec.Raw) -> Event:
    return {"type": f"response.{what}", "response": response}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": dialect.kept_tokens(usage),
            **({"image_tokens": usage.image_tokens} if usage.image_tokens else {}),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class OutputItem:
    """An output item while it is generated: `begin`, `add` and `end` yield its stream events, `item` returns its JSON.

    Each part of a message or of reasoning holds the whole text; a call has no parts, its text is in the field of CALL_FIELDS.
    """

    def __init__(self, kind: str, parts: tuple[str, ...], names: dict[str, str], *, is_sealed: bool = False) -> None:
        self.kind = kind
        self.id = ""
        self.index = 0  # among the output items
        self.field = CALL_FIELDS.get(kind)
        self.is_closed = self.field is None  # a call that is cut short is never shown as done: clients would run it
        self._parts = parts
        self._is_sealed = is_sealed
        self._names = names
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        # A custom tool takes a text, which the model wrote into JSON.
        self._read = CustomInputReader().feed if kind == "custom_tool_call" else str

    def item(self, status: str) -> Item:
        """Return the item's JSON: without parts while in progress, and with sealed reasoning too if the client asked for that."""
        status = status if self.is_closed or status == "in_progress" else "incomplete"
        item, text = {"id": self.id, "type": self.kind, "status": status, **self._names}, "".join(self._texts)
        if self.field is not None:
            return item | {self.field: text}
        parts = [] if status == "in_progress" else [self._part(kind) for kind in self._parts]
        if self.kind == "message":
            return item | {"role": "assistant", "content": parts}
        sealed = {"encrypted_content": dialect.seal(text)} if parts and self._is_sealed else {}
        return item | {"summary": parts[:-1], "content": parts[-1:], **sealed}

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")}
        for kind in self._parts:
            _, own, index = PART_EVENTS[kind]
            yield self._event(f"{own}.added", **{index: 0}, part=self._part(kind))

    def add(self, run: list[Delta]) -> Iterator[Event]:
        text, logprobs = self._read(join_texts(run)), logprobs_of(run)
        if not (text or logprobs):
            return
        self._texts.append(text)
        self._logprobs += logprobs
        if self.field is not None:
            yield self._event(f"{self.kind}_{self.field}.delta", delta=text)
        for kind in self._parts:
            begin, _, index = PART_EVENTS[kind]
            yield self._event(f"{begin}.delta", **{index: 0}, delta=text, **self._if_message(logprobs=logprobs))

    def end(self, status: str) -> Iterator[Event]:
        if not self.is_closed:
            return
        text = "".join(self._texts)
        if self.field is not None:
            yield self._event(f"{self.kind}_{self.field}.done", **{self.field: text})
        for kind in self._parts:
            begin, own, index = PART_EVENTS[kind]
            yield self._event(f"{begin}.done", **{index: 0}, text=text, **self._if_message(logprobs=self._logprobs))
            yield self._event(f"{own}.done", **{index: 0}, part=self._part(kind))
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}

    def _part(self, kind: str) -> dict[str, Any]:
        more = self._if_message(annotations=[], logprobs=list(self._logprobs))
        return {"type": kind, "text": "".join(self._texts), **more}

    def _if_message(self, **fields: Any) -> dict[str, Any]:
        return fields if self.kind == "message" else {}
