"""Ollama's API: translates /api/chat and /api/generate, encodes their replies, and lists models in Ollama's format."""

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.api import dialect, field_table
from weft.api.dialect import ParsedRequest, Reply, ReplyHeader, decode_arguments, encode_json, join_texts, pick_fields
from weft.api.fields import FieldRules
from weft.api.http import json_response, read_json
from weft.api.problems import message_of
from weft.config import ServerConfig
from weft.errors import UnsupportedParameter
from weft.ipc.limits import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from weft.ipc.messages import Ready
from weft.serving.model import ServedModel
from weft.serving.service import Service
from weft.text import types
from weft.text.bodies import Label, Shape, convert
from weft.text.schema import json_schema_grammar
from weft.text.tools import read_tool_selection, read_tools
from weft.text.types import CallArguments, CallClosed, CallOpened, Delta, Effort, Finish, Reasoning, Text, ToolCall, Usage

NDJSON = "application/x-ndjson"
DIALECT_VERSION = "0.13.4"  # of Ollama: programs that also want /v1/responses require this one or a later one
NEVER = "9999-12-31T00:00:00Z"

RULES = FieldRules(field_table.OLLAMA)


class Options(msgspec.Struct, kw_only=True):
    """Options of an Ollama request, nearly all for sampling. Further value ranges are checked by `Sampling`."""

    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all tokens
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # penalties look at everything; it is refused while one acts
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None  # 0 and less: the rest of the context
    stop: dialect.StopText | dialect.StopTexts | None = None
    speculate: bool | None = None  # false: no draft tokens are verified
    disable_additional_properties: bool | None = None  # of a schema in `format`; false: objects that name keys may have others


class OllamaFunction(msgspec.Struct, kw_only=True):
    """The function's name and arguments in a tool call."""

    name: Label
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an earlier assistant message. Older clients send no id."""

    function: OllamaFunction
    id: Label | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation sent to POST /api/chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; `function` holds its name, description and parameters."""

    function: Annotated[dict[str, Any], Meta(extra={"shape": Shape.of("name", "description", "parameters", "strict")})]
    type: Literal["function"] = "function"


class OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields shared by POST /api/chat and /api/generate. Null is treated as absent."""

    model: Label | None = None
    stream: bool | None = None  # absent: true
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None  # also by the names of `BUDGET_PLACES`; -1: no limit
    options: Options | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/chat. Without messages it generates and loads nothing, only waits for a model still loading."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/generate. Without a prompt it generates and loads nothing, only waits for a model still loading."""

    prompt: str | None = None
    system: str | None = None
    images: Annotated[list[str], Meta(max_length=MAX_MESSAGES)] | None = None
    raw: bool | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/show; `name` is the field that older clients send in place of `model`."""

    model: Label | None = None
    name: Label | None = None


def translate_chat(body: dict[str, Any]) -> ParsedRequest:
    """Parse a body of POST /api/chat into a generation request and its reply type. Raises InvalidRequest."""
    request, ignored = RULES.read(body, OllamaChatRequest)
    given = tuple({"type": tool.type, "function": tool.function} for tool in request.tools or ())
    tools = read_tools(given)
    messages = _messages(request.messages or [])
    prompts = (types.Conversation(messages, given),) if messages else ()
    selection = read_tool_selection(None, tools) if tools else None
    place = RULES.place_of_budget(body)
    return _parsed(request, ignored, prompts, is_chat=True, tool_choice=selection, budget_place=place)


def translate_generate(body: dict[str, Any]) -> ParsedRequest:
    """Parse a body of POST /api/generate into a generation request and its reply type. Raises InvalidRequest."""
    request, ignored = RULES.read(body, OllamaGenerateRequest)
    prompts: tuple[types.Prompt, ...] = ()
    _check_raw(request)
    if request.prompt and request.raw:
        prompts = (request.prompt,)
    elif request.prompt:
        system = (types.Message("system", request.system),) if request.system else ()
        prompts = (types.Conversation((*system, types.Message("user", _content(request.prompt, request.images)))),)
    place = RULES.place_of_budget(body)
    return _parsed(request, ignored, prompts, is_chat=False, split_thinking=not request.raw, budget_place=place)


def _check_raw(request: OllamaGenerateRequest) -> None:
    given = [name for name in ("system", "images", "think") if getattr(request, name) not in (None, "", [])]
    if request.raw and given:
        message = f"{given[0]} is not supported with raw, whose prompt is taken as it is; leave one of them out"
        raise UnsupportedParameter(message, given[0])


def _parsed(
    request: OllamaRequest, ignored: tuple[str, ...], prompts: tuple[types.Prompt, ...], *, is_chat: bool, **more: Any
) -> ParsedRequest:
    options, form, think = request.options or Options(), request.format, request.think
    sampling = pick_fields(options, "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed") | {
        "top_k": None if options.top_k is None else max(options.top_k, 0),
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
    }
    any_object = dialect.ANY_OBJECT if form == "json" else None
    grammar = (
        any_object
        if isinstance(form, str | None)
        else json_schema_grammar(form, False, "format", options.disable_additional_properties)
    )
    generation = types.GenerationRequest(
        model=plain_name(request.model),
        prompts=prompts,
        sampling={name: value for name, value in sampling.items() if value is not None},
        stops=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        grammar=grammar,
        thinking_budget=request.thinking_token_budget,
        effort=None if think is True else "none" if think is False else think,
        reasons=think is True,
        effort_place="think",
        speculate=options.speculate is not False,
        penalty_windows=() if options.repeat_last_n in (None, -1) else ("options.repeat_last_n",),
        **more,
    )
    reply = partial(OllamaReply, is_chat=is_chat)
    return ParsedRequest(generation, request.stream is not False, ignored, reply, media_type=NDJSON)


def plain_name(model: str | None) -> str | None:
    """Return a model's name without Ollama's tag `:latest`; None if no name is given."""
    return model and model.removesuffix(":latest")


def _messages(given: Sequence[OllamaMessage]) -> tuple[types.Message, ...]:
    return tuple(map(_message, given))


def _message(given: OllamaMessage) -> types.Message:
    calls = (
        ToolCall(call.function.name, msgspec.json.encode(call.function.arguments).decode(), call.id)
        for call in given.tool_calls or ()
    )
    content = _content(given.content or "", given.images)
    return types.Message(given.role, content, given.thinking, tuple(calls), given.tool_call_id, given.tool_name)


def _content(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}] if images else text


class OllamaReply(Reply):
    """Encodes a reply as NDJSON lines or as one JSON object; the last line has done: true, token counts and durations."""

    def __init__(self, header: ReplyHeader, is_chat: bool) -> None:
        super().__init__()
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(header.created))
        self._head = {"model": header.model, "created_at": created}
        self._is_chat = is_chat
        self._open_calls: dict[int, tuple[CallOpened, list[str]]] = {}

    def kind_of(self, delta: Delta) -> Any:
        return "call" if isinstance(delta, CallOpened | CallArguments | CallClosed) else type(delta)

    def frame_run(self, _choice: int, run: list[Delta]) -> bytes:
        if isinstance(finish := run[0], Finish):
            return self._line(self._show([]) | {"done": True} | _ending(finish))
        shown = self._show(run)
        return self._line(shown | {"done": False}) if shown != self._show([]) else b""

    def frame_heartbeat(self, *_: int) -> bytes:
        return self._line(self._show([]) | {"done": False})

    def frame_error(self, error: Exception) -> bytes:
        return encode_json({"error": message_of(error)}) + b"\n"

    def make_body(self) -> dict[str, Any]:
        finish = next((delta for delta in self.collected[0] if isinstance(delta, Finish)), None)
        ending = {"done_reason": "load"} if finish is None else _ending(finish)
        return self._head | self._show(self.collected[0]) | {"done": True} | ending

    def _line(self, fields: dict[str, Any]) -> bytes:
        return encode_json(self._head | fields) + b"\n"

    def _show(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the JSON fields for these deltas; a tool call appears only when complete, with its arguments as an object."""
        thinking, calls = join_texts(deltas, Reasoning), []
        for delta in deltas:
            match delta:
                case CallOpened(index=index):
                    self._open_calls[index] = delta, []
                case CallArguments(index=index):
                    self._open_calls[index][1].append(delta.text)
                case CallClosed(index=index):
                    opened, texts = self._open_calls.pop(index)
                    function = {"index": index, "name": opened.name, "arguments": decode_arguments("".join(texts))}
                    calls.append({"id": opened.id, "function": function})
        text, more = join_texts(deltas, Text), {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **more}
        return {"message": {"role": "assistant", "content": text, **more, **({"tool_calls": calls} if calls else {})}}


def _ending(finish: Finish) -> dict[str, Any]:
    """Return done_reason, token counts and durations in nanoseconds; Ollama's load_duration holds the queueing time."""
    usage = finish.usage or Usage(0, 0)
    queue, prefill, decode = (round(each * 1e9) for each in (usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds))
    return {
        "done_reason": "length" if finish.reason == "length" else "stop",
        "total_duration": queue + prefill + decode,
        "load_duration": queue,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": prefill,
        "eval_count": usage.completion_tokens,
        "eval_duration": decode,
        **dialect.schema_verdict(finish),
    }


class OllamaModels:
    """HTTP handlers of Ollama's non-generating endpoints: version, tags, ps, show, and embed, which is always refused."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    async def version(self, _: Request) -> Response:
        return json_response({"version": DIALECT_VERSION, "weft": __version__})

    async def tags(self, _: Request) -> Response:
        models = sorted(self.service.models, key=lambda model: not model.is_ready)
        return json_response({"models": [self._row(model) for model in models]})

    async def ps(self, _: Request) -> Response:
        """List the models that are ready; their expires_at is never, because idle models are not unloaded."""
        rows = []
        for model in self.service.models:
            if model.is_ready:
                row, ready = self._row(model), model.require()[1]
                size_vram = 0 if ready.device == "cpu" else row["size"]
                more = {"expires_at": NEVER, "size_vram": size_vram, "context_length": ready.limits.context_length}
                rows.append(row | more)
        return json_response({"models": rows})

    async def show(self, request: Request) -> Response:
        given = convert(await read_json(request, self.config), ShowRequest)
        model = self.service.find(plain_name(given.model or given.name))
        codec, ready = model.require()
        found = {"completion": codec, "tools": codec.calls, "thinking": codec.markers, "vision": model.image_writer}
        details, limits = _details(ready), ready.limits
        family = details["family"]
        sizes = {f"{family}.context_length": limits.context_length, f"{family}.vocab_size": limits.vocab_size}
        return json_response(
            {
                "license": "",
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in codec.recommended.items()),
                "template": codec.writer.template.source if codec.writer is not None else "",
                "modified_at": self.started,
                "details": details,
                "model_info": {"general.architecture": family, **sizes},
                "capabilities": [name for name, way in found.items() if way is not None],
            }
        )

    async def embed(self, request: Request) -> Response:
        model = self.service.find(plain_name(convert(await read_json(request, self.config), ShowRequest).model))
        raise UnsupportedParameter(f"{model.name} writes text and has no embeddings; weft serves no model that has any", "model")

    def _row(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": self.started,
            "size": 0 if model.ready is None else model.ready.memory.get("weights", 0),
            "digest": hashlib.sha256(model.name.encode()).hexdigest(),  # of the name: there is no one file to take it of
            "details": {} if model.ready is None else _details(model.ready),
        }


def _details(ready: Ready) -> dict[str, Any]:
    config: dict[str, Any] = msgspec.json.decode((Path(ready.folder) / "config.json").read_bytes())
    family = str(config.get("model_type", "unknown"))
    quantization = config.get("quantization") or {}
    level = f"{quantization['bits']}-bit" if "bits" in quantization else str(config.get("dtype", ""))
    details = {"parent_model": "", "format": "mlx", "family": family, "families": [family]}
    return details | {"parameter_size": "", "quantization_level": level}
