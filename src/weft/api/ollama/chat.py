"""POST /api/chat and POST /api/generate, as pure translators between bodies, deltas and lines of JSON.

Knows no HTTP, no template and no model. `app` calls the two `translate` functions and feeds the reply.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from weft.api.dialect import ParsedRequest, ReplyHeader
from weft.api.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
    plain_name,
    understood,
)
from weft.api.openai.common import encoded
from weft.api.problems import ollama_body
from weft.errors import WeftError
from weft.ipc.messages import GrammarSpec
from weft.text.schema import json_schema_grammar
from weft.text.tools import ToolSelection, read_tool_selection, read_tools
from weft.text.types import (
    CallArguments,
    CallClosed,
    CallOpened,
    Conversation,
    Delta,
    Effort,
    Finish,
    GenerationRequest,
    Message,
    Prompt,
    Reasoning,
    Text,
    ToolCall,
    Usage,
)

NDJSON = "application/x-ndjson"
NANOSECONDS = 1_000_000_000


def translate_chat(body: dict[str, Any]) -> ParsedRequest:
    """Understand a body of /api/chat, or raise InvalidRequest naming the field."""
    request, ignored = understood(body, OllamaChatRequest)
    given = tuple({"type": tool.type, "function": tool.function} for tool in request.tools or ())
    tools = read_tools(given)
    messages = _messages(request.messages or [])
    prompts = (Conversation(messages, given),) if messages else ()
    return _asked(request, ignored, prompts, OllamaChatReply, tool_choice=read_tool_selection(None, tools) if tools else None)


def translate_generate(body: dict[str, Any]) -> ParsedRequest:
    """Understand a body of /api/generate, or raise InvalidRequest naming the field."""
    request, ignored = understood(body, OllamaGenerateRequest)
    prompts: tuple[Prompt, ...] = ()
    if request.prompt:
        prompts = (request.prompt,) if request.raw else (_question(request, request.prompt),)
    return _asked(request, ignored, prompts, OllamaGenerateReply, split_thinking=not request.raw)


def _asked(
    request: OllamaRequest,
    ignored: tuple[str, ...],
    prompts: tuple[Prompt, ...],
    reply: type[OllamaReply],
    *,
    tool_choice: ToolSelection | None = None,
    split_thinking: bool = True,
) -> ParsedRequest:
    options = request.options or Options()
    generation = GenerationRequest(
        model=plain_name(request.model),
        prompts=prompts,
        sampling=_sampling(options),
        stops=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        split_thinking=split_thinking,
        grammar=_grammar(request),
        tool_choice=tool_choice,
        effort=_effort(request.think),
    )
    return ParsedRequest(generation, request.stream is not False, ignored, reply, media_type=NDJSON)


class OllamaReply:
    """A reply as one JSON object, or as lines of them: pieces first, then one that says it is done and what it took."""

    def __init__(self, heading: ReplyHeader) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(heading.created))
        self._heading = {"model": heading.model, "created_at": created}
        self._taken: list[Delta] = []
        self._calls: dict[int, tuple[CallOpened, list[str]]] = {}  # those that are not complete yet

    def said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a line, or of the whole, that has this to tell."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Nothing: the first line has something to tell."""
        return b""

    def begun(self, usage: Usage) -> bytes:  # noqa: ARG002 - told at the end
        """Nothing: counts come last."""
        return b""

    def pieces(self, choice: int, deltas: Sequence[Delta]) -> bytes:  # noqa: ARG002 - there is only one
        """A line for each run of deltas of one kind."""
        return b"".join(self._line(**fields) for _, run in groupby(deltas, _kind) for fields in self._told(list(run)))

    def heartbeat(self, computed: int, total: int) -> bytes:  # noqa: ARG002 - the wire has no word for it
        """A line that adds nothing."""
        return self._line(**self.said("", "", []), done=False)

    def closing(self) -> bytes:
        """Nothing: the line that says it is done was the last."""
        return b""

    def failure(self, error: WeftError) -> bytes:
        """The error in a line of its own. No line that says it is done follows."""
        return encoded(ollama_body(error)) + b"\n"

    def take(self, choice: int, deltas: Sequence[Delta]) -> None:  # noqa: ARG002 - there is only one
        """Collect what is new, for `whole`."""
        self._taken += deltas

    def whole(self) -> dict[str, Any]:
        """The body of a reply that is not streamed; of one that generated nothing, the word that the model is loaded."""
        end = next((delta for delta in self._taken if isinstance(delta, Finish)), None)
        text, thinking = (_joined(self._taken, kind) for kind in (Text, Reasoning))
        said = self.said(text, thinking, self._complete(self._taken))
        return {**self._heading, **said, "done": True, **({"done_reason": "load"} if end is None else _end(end))}

    def _told(self, run: list[Delta]) -> Iterator[dict[str, Any]]:
        if isinstance(run[0], Finish):
            yield {**self.said("", "", []), "done": True, **_end(run[0])}
        elif any(said := (_joined(run, Text), _joined(run, Reasoning), self._complete(run))):
            yield {**self.said(*said), "done": False}

    def _complete(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """The calls that became complete: programs expect arguments as an object, so one that is cut can not be told."""
        complete = []
        for delta in deltas:
            match delta:
                case CallOpened():
                    self._calls[delta.index] = delta, []
                case CallArguments():
                    self._calls[delta.index][1].append(delta.text)
                case CallClosed():
                    complete.append(_call(*self._calls.pop(delta.index)))
        return complete

    def _line(self, **fields: Any) -> bytes:
        return encoded({**self._heading, **fields}) + b"\n"


class OllamaChatReply(OllamaReply):
    """A message, or its pieces."""

    def said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """A message; thinking and calls only where there are some."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return {"message": message}


class OllamaGenerateReply(OllamaReply):
    """A text, or its pieces."""

    def said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002 - no tools here
        """A text; thinking only where there is some."""
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _messages(given: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    """The messages. Calls and results without ids get some, in their order: templates may ask for them."""
    messages, open_calls = [], []
    for index, message in enumerate(given):
        calls = [
            ToolCall(call.function.name, _json(call.function.arguments), call.id or f"call_{index}_{place}")
            for place, call in enumerate(message.tool_calls or ())
        ]
        open_calls += calls
        answered = _answered(message, open_calls) if message.role == "tool" else None
        if answered in open_calls:
            open_calls.remove(answered)
        messages.append(
            Message(
                role=message.role,
                content=_content(message.content or "", message.images),
                reasoning=message.thinking,
                tool_calls=tuple(calls),
                tool_call_id=message.tool_call_id or (answered.id if answered is not None else None),
                name=message.tool_name,
            )
        )
    return tuple(messages)


def _answered(result: OllamaMessage, open_calls: Sequence[ToolCall]) -> ToolCall | None:
    """The call whose result this is: by id, by name, or the first that has none."""
    for wanted, given in (("id", result.tool_call_id), ("name", result.tool_name)):
        if given is not None:
            return next((call for call in open_calls if getattr(call, wanted) == given), None)
    return next(iter(open_calls), None)


def _question(request: OllamaGenerateRequest, prompt: str) -> Conversation:
    system = (Message("system", request.system),) if request.system else ()
    return Conversation((*system, Message("user", _content(prompt, request.images))))


def _content(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text
    return [{"type": "text", "text": text}, *({"type": "image", "image": image} for image in images)]


def _sampling(options: Options) -> dict[str, Any]:
    fields = {
        "temperature": options.temperature,
        "top_k": None if options.top_k is None else max(options.top_k, 0),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": options.seed,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _grammar(request: OllamaRequest) -> GrammarSpec | None:
    match request.format:
        case None | "":
            return None
        case "json":
            return GrammarSpec("json_schema", '{"type":"object"}')
    return json_schema_grammar(request.format, False, "format")


def _effort(think: bool | Effort | None) -> Effort | None:
    """How much to think: true is as much as the model likes."""
    if isinstance(think, bool):
        return "max" if think else "none"
    return think


def _kind(delta: Delta) -> type[Delta] | str:
    """Deltas that one line tells; all parts of calls are of one kind."""
    return "call" if isinstance(delta, CallOpened | CallArguments | CallClosed) else type(delta)


def _joined(deltas: Sequence[Delta], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


def _json(arguments: dict[str, Any]) -> str:
    return msgspec.json.encode(arguments).decode()


def _call(opened: CallOpened, arguments: Sequence[str]) -> dict[str, Any]:
    function = {"index": opened.index, "name": opened.name, "arguments": msgspec.json.decode("".join(arguments))}
    return {"id": opened.id, "function": function}


def _end(finish: Finish) -> dict[str, Any]:
    """Why it ended, what it took in nanoseconds. Waiting for one's turn is told where Ollama tells of loading."""
    usage = finish.usage or Usage(0, 0)
    waited, read, written = (
        round(seconds * NANOSECONDS) for seconds in (usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds)
    )
    end: dict[str, Any] = {
        "done_reason": "length" if finish.reason == "length" else "stop",
        "total_duration": waited + read + written,
        "load_duration": waited,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": read,
        "eval_count": usage.completion_tokens,
        "eval_duration": written,
    }
    if finish.schema_errors is not None:
        end["schema_validation"] = {"valid": not finish.schema_errors, "errors": finish.schema_errors}
    return end
