"""POST /v1/chat/completions: parses a body into a `GenerationRequest`, and encodes deltas as a completion or its chunks."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from weft.api.dialect import ParsedRequest, ReplyHeader, join_texts
from weft.api.openai.reply import OpenAIReply, logprobs_of, prompt_fields, tokens_of
from weft.api.openai.request import GRAMMAR_FIELDS, RULES, ConversationRequest, Limit, Off, PromptLogprobs, read_grammar
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.limits import MAX_MESSAGES, MAX_TOOLS
from weft.text.bodies import Shape
from weft.text.chat_messages import ChatMessage, read_messages
from weft.text.tools import CustomInputReader, custom_input, read_tool_selection, read_tools, template_tools
from weft.text.types import (
    CallArguments,
    CallOpened,
    Conversation,
    Delta,
    Effort,
    Reasoning,
    Text,
    Usage,
)

Named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "maxLength": 128}}}
Kinds = [{"required": ["type", kind], "properties": {"type": {"const": kind}, kind: Named}} for kind in ("function", "custom")]
READ_TOOLS = {
    "function": Shape.of("type", "strict", function=Shape.of("name", "description", "parameters", "strict")),
    "custom": Shape.of("type", custom=Shape.of("name", "description", "format")),
}
SentTool = Annotated[dict[str, Any], Meta(extra_json_schema={"anyOf": Kinds}, extra={"shape": Shape(kinds=READ_TOOLS)})]


class PredictedText(msgspec.Struct, kw_only=True):
    """A text part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """The `prediction` field: a text that much of the answer is expected to repeat, such as a file that is to be edited."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedText], Meta(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """The `thinking` field as GLM's and Kimi's clients send it: whether to reason, and for how many tokens."""

    type: Literal["enabled", "disabled", "auto", "adaptive"] | None = None
    budget_tokens: Annotated[int, Meta(ge=-1)] | None = None


class ReasoningSwitch(msgspec.Struct, kw_only=True):
    """The `reasoning` field as OpenRouter's clients send it: effort or tokens, or whether to reason; it is always shown."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    enabled: bool | None = None
    exclude: Off | None = None


class ChatRequest(ConversationRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None  # wins over max_tokens
    max_tokens: Limit | None = None
    logprobs: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningSwitch | None = None
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None  # Qwen's word
    think: bool | Effort | None = None  # Ollama's
    tools: Annotated[list[SentTool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None
    prompt_logprobs: PromptLogprobs | None = None
    return_token_ids: bool | None = None

    def read_max_tokens(self) -> int | None:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return self.read_limit(getattr(self, name), name)

    def read_effort(self) -> dict[str, Any]:
        """Return what is asked of the reasoning, {} if it is left to the model. Raises InvalidRequest if two fields differ."""
        reasoning, thinking = self.reasoning or ReasoningSwitch(), self.thinking or ThinkingSwitch()
        if reasoning.exclude:
            raise UnsupportedParameter("reasoning.exclude is not supported here; leave it out", "reasoning.exclude")
        given: dict[str, Effort | None] = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": reasoning.effort}
        type_switch = {"disabled": False, "enabled": True}.get(thinking.type or "")
        think = None if isinstance(self.think, str) else self.think
        given |= {"think": self.think if isinstance(self.think, str) else None}
        switches = {"reasoning.enabled": reasoning.enabled, "thinking.type": type_switch}
        switches |= {"enable_thinking": self.enable_thinking, "think": think}
        given |= {name: "none" for name, switch in switches.items() if switch is False}
        first = next((name for name in given if given[name] is not None), None)
        on = next((name for name, switch in switches.items() if switch), None)
        if first is None:
            return {} if on is None else {"reasons": True, "effort_place": on}
        contradicts = on if given[first] == "none" else None
        if other := next((name for name in given if given[name] not in (None, given[first])), contradicts):
            raise InvalidRequest(f"{first} and {other} differ; send one of them", other)
        return {"effort": given[first], "effort_place": first}


def translate(body: dict[str, Any]) -> ParsedRequest:
    """Parse a body of POST /v1/chat/completions into a generation request and its reply type. Raises InvalidRequest."""
    request, ignored = RULES.read(body, ChatRequest)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    request.refuse_in_stream("prompt_logprobs", "return_token_ids")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sent = lift_strict(request.tools or ())
    tools = read_tools(sent)
    choice = read_tool_selection(request.tool_choice, tools, request.parallel_tool_calls)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt can not both be true", "continue_final_message")
    conversation = Conversation(
        read_messages(request.messages),
        template_tools(sent),  # also those that may not be called: the prompt stays the same
        request.chat_template_kwargs or {},
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
    )
    generation = request.read_generation(
        (conversation,),
        request.read_max_tokens(),
        logprobs,
        grammar=read_grammar(request, GRAMMAR_FIELDS),
        tool_choice=choice if tools else None,
        thinking_budget=request.thinking_token_budget,
        budget_place=RULES.place_of_budget(body),
        **request.read_effort(),
        prediction=request.prediction and request.prediction.text,
        prompt_logprobs=request.prompt_logprobs,
        returns_ids=bool(request.return_token_ids),
    )
    custom = frozenset(tool.name for tool in tools if tool.is_custom)
    reply = partial(ChatReply, request=request, has_logprobs=logprobs is not None, custom=custom)
    return ParsedRequest(generation, bool(request.stream), ignored, reply)


def lift_strict(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move `strict` of each tool, where some clients send it, into its function. Raises InvalidRequest if two differ."""
    return [_with_strict(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _with_strict(tool: dict[str, Any], place: str) -> dict[str, Any]:
    strict, function = tool.get("strict"), tool.get("function")
    if strict is None or not isinstance(function, dict):
        return tool
    if function.get("strict", strict) != strict:
        raise InvalidRequest(f"{place}.strict and {place}.function.strict differ; send one of them", f"{place}.strict")
    return {**{name: value for name, value in tool.items() if name != "strict"}, "function": {**function, "strict": strict}}


class ChatReply(OpenAIReply):
    """Encodes a reply as a chat completion, or as its stream chunks."""

    id_prefix = "chatcmpl"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    silence: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(self, header: ReplyHeader, request: ChatRequest, has_logprobs: bool, custom: frozenset[str]) -> None:
        super().__init__(header, request, 1, has_logprobs)
        self._has_prediction = request.prediction is not None
        self._custom = custom  # names of the tools that take a text
        self._inputs: dict[tuple[int, int], CustomInputReader] = {}  # one per call of such a tool, by choice and call index

    def frame_opening(self) -> bytes:
        """Return a chunk with the assistant role for each choice: clients take a stream's kind and id from its first chunk."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(choice, role) for choice in self.choices)

    def show_run(self, choice: int, run: Sequence[Delta]) -> dict[str, Any]:
        text = join_texts(run)
        match run[0]:
            case Text() if text or tokens_of(run):
                logprobs = {"logprobs": {"content": logprobs_of(run), "refusal": None}} if self.has_logprobs else {}
                return {"delta": {"content": text}, **logprobs}
            case Reasoning() if text:
                return {"delta": {"reasoning_content": text}}
            case CallOpened(index=index, name=name) as opened:
                if name in self._custom:
                    self._inputs[choice, index] = CustomInputReader()
                return {"delta": {"tool_calls": [{"index": index, **self._call(opened, "")}]}}
            case CallArguments(index=index) if (reader := self._inputs.get((choice, index))) is not None:
                given = reader.feed(text)
                return {"delta": {"tool_calls": [{"index": index, "custom": {"input": given}}]}} if given else {}
            case CallArguments(index=index):
                return {"delta": {"tool_calls": [{"index": index, "function": {"arguments": text}}]}}
        return {}

    def show_choice(self, _choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a choice's fields message and logprobs. Content is null only beside calls: LangChain misreads other nulls."""
        calls = [self._call(delta, _arguments(deltas, delta.index)) for delta in deltas if isinstance(delta, CallOpened)]
        message: dict[str, Any] = {"role": "assistant", "content": join_texts(deltas, Text), "refusal": None}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if reasoning := join_texts(deltas, Reasoning):
            message["reasoning_content"] = reasoning
        logprobs = {"content": logprobs_of(deltas), "refusal": None} if self.has_logprobs else None
        return {"message": message, "logprobs": logprobs}

    def make_body(self) -> dict[str, Any]:
        return super().make_body() | prompt_fields(self.request, self.collected[0])

    def completion_details(self, total: Usage) -> dict[str, int]:
        if not self._has_prediction:
            return super().completion_details(total)
        drafted, accepted = (counts.get("prediction", 0) for counts in (total.drafts.drafted, total.drafts.accepted))
        predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return super().completion_details(total) | predicted

    def _call(self, opened: CallOpened, arguments: str) -> dict[str, Any]:
        if opened.name in self._custom:
            return {"id": opened.id, "type": "custom", "custom": {"name": opened.name, "input": custom_input(arguments)}}
        return {"id": opened.id, "type": "function", "function": {"name": opened.name, "arguments": arguments}}


def _arguments(deltas: Sequence[Delta], index: int) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, CallArguments) and delta.index == index)
