"""Replies of POST /v1/messages: Anthropic's stream events, or a message body assembled from these events."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from weft.api.dialect import SEAL, Reply, ReplyHeader, decode_arguments, encode_event, encode_json, join_texts, kept_tokens, seal
from weft.api.problems import anthropic_body
from weft.text.types import CallArguments, CallClosed, CallOpened, Delta, Finish, Reasoning, Text, Usage

Event = dict[str, Any]

FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature", "input_json_delta": "partial_json"}
# Nearly every event is this one, so it is not built from its parts.
MORE_TEXT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


class MessagesReply(Reply):
    """Encodes a reply as Anthropic's events or message; hidden thinking travels base64-encoded in the block's signature."""

    def __init__(self, header: ReplyHeader, max_tokens: int, hides_thinking: bool) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.hides_thinking = hides_thinking
        self._request_id = header.id
        head = {"id": f"msg_{header.id}", "type": "message", "role": "assistant", "model": header.model}
        self._message: dict[str, Any] = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
        self._kind: str | None = None  # of the open block
        self._index = -1  # of the block opened last
        self._reasoning = ""  # of that block

    def frame_start(self, usage: Usage) -> bytes:
        return encode_event({"type": "message_start", "message": self._message | {"usage": _usage(usage)}})

    def frame_deltas(self, choice: int, deltas: Sequence[Delta]) -> bytes:
        if len(deltas) == 1 and type(delta := deltas[0]) is Text and delta.text and self._kind == "text":
            return MORE_TEXT % (self._index, encode_json(delta.text))
        return super().frame_deltas(choice, deltas)

    def frame_run(self, _choice: int, run: list[Delta]) -> bytes:
        return b"".join(map(encode_event, self._events(run)))

    def frame_heartbeat(self, *_: int) -> bytes:
        return encode_event({"type": "ping"})  # may come before the message starts

    def frame_closing(self) -> bytes:
        return encode_event({"type": "message_stop"})

    def frame_error(self, error: Exception) -> bytes:
        return encode_event(anthropic_body(error, self._request_id))

    def make_body(self) -> dict[str, Any]:
        """Return the message assembled from its events; a tool call that was cut off gets {} as input, not a partial one."""
        blocks: list[dict[str, Any]] = []
        end: dict[str, Any] = {}
        for event in (event for run in self.runs(self.collected[0]) for event in self._events(run)):
            match event:
                case {"content_block": block}:
                    blocks.append(dict(block))
                case {"index": index, "delta": {"type": kind, **given}}:
                    blocks[index][FIELDS[kind]] = blocks[index].get(FIELDS[kind], "") + given[FIELDS[kind]]
                case {"type": "message_delta", "delta": delta, "usage": usage}:
                    end = {**delta, "usage": usage}
        for block in blocks:
            if block["type"] == "tool_use":
                with suppress(ValueError):
                    block["input"] = decode_arguments(block.pop("partial_json", ""))
        return {**self._message, "content": blocks, **end}

    def _events(self, run: list[Delta]) -> Iterator[Event]:
        text = join_texts(run)
        match run[0]:
            case Text() if text:
                yield from self._open("text", text="")
                yield self._delta("text_delta", text)
            case Reasoning() if text:
                yield from self._open("thinking", thinking="", signature="")
                self._reasoning += text
                if not self.hides_thinking:
                    yield self._delta("thinking_delta", text)
            case CallOpened(id=call, name=name):
                yield from self._close()
                tool_use = f"toolu_{call.removeprefix('call_')}" if call.startswith("call_") else call
                yield from self._open("tool_use", id=tool_use, name=name, input={})
            case CallArguments() if text:
                yield self._delta("input_json_delta", text)
            case CallClosed():
                yield from self._close()
            case Finish() as finish:
                yield from self._close()
                yield {"type": "message_delta", **self._ending(finish)}

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._close()
            self._kind, self._index, self._reasoning = kind, self._index + 1, ""
            yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _close(self) -> Iterator[Event]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield self._delta("signature_delta", seal(self._reasoning) if self.hides_thinking else SEAL)
        self._kind = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, FIELDS[kind]: text}}

    def _ending(self, finish: Finish) -> dict[str, Any]:
        usage, stop = finish.usage or Usage(0, 0), None
        if finish.reason == "tool_calls":
            reason = "tool_use"
        elif finish.reason == "length":  # the client may have asked for more tokens than the context has
            reason = "max_tokens" if usage.completion_tokens >= self.max_tokens else "model_context_window_exceeded"
        elif isinstance(finish.stop, str):
            reason, stop = "stop_sequence", finish.stop
        else:
            reason = "end_turn"
        return {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": _usage(usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage fields, with prompt tokens split into cache reads, cache writes and uncached input."""
    kept = kept_tokens(usage)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - kept,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
