"""Reshapes client messages into turns that the model's chat template accepts, and renders prompts with no text lost.

Messages are reshaped only as far as the template needs; later ones never move earlier ones: a growing prompt keeps its prefix.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from weft.errors import InvalidRequest, TemplateFailed, UnsupportedParameter
from weft.text.control_tokens import Hiding
from weft.text.template import Capabilities, ChatTemplate
from weft.text.tool_results import one_call_per_turn, pair_results
from weft.text.turns import INSTRUCTING as INSTRUCTING
from weft.text.turns import Content, Turn, as_parts, join, merge_neighbours, place_instructions, without_content
from weft.text.typed_markers import TypedMarkers, begins_with_reasoning
from weft.text.types import Conversation, LateSystem, Message, ToolCall

CUT = "⟦the answer goes on here⟧"
# What templates trim, escape or take out of a text: white space and controls, as they are or in JSON, switches for reasoning.
_LOST = re.compile(rb"\\(?:[nrtbf]|u00[01][0-9a-f])|/(?:no_)?think")
_LOST_BYTES = bytes(range(33)) + b"\\"
_LONGEST_SWITCH, _LONGEST_ESCAPE = len("/no_think"), len("u001f")


@dataclass(frozen=True)
class CallSpelling:
    """How a model writes calls, for templates that leave them out: several at once, if `is_several`."""

    write: Callable[[Sequence[Mapping[str, Any]]], str]  # functions, each with its name and an object of arguments
    is_several: bool


class PromptWriter:
    """Renders conversations into prompts for one model, reshaping messages into what its chat template accepts."""

    def __init__(self, template: ChatTemplate, late_system: LateSystem = "fold") -> None:
        self.template = template
        self.late_system = late_system
        self.reword: Callable[[Conversation], Conversation] = _as_it_is  # before a conversation is normalised
        self.capabilities = Capabilities(template)
        self._with_tools = Capabilities(template, with_tools=True)
        self.spelling: CallSpelling | None = None  # set when the model's format is known

    @property
    def takes_several_calls(self) -> bool:
        """Whether the template writes several calls in one turn, in conversations with tools."""
        return self._with_tools.several_calls

    @property
    def takes_results(self) -> bool:
        """Whether a tool's result has a place, in conversations with tools."""
        return self._with_tools.result_role != ""

    def write(self, conversation: Conversation) -> str:
        """Render a conversation into a prompt. Raises InvalidRequest, or TemplateFailed if the template fails or drops text."""
        return self.write_hidden(self.arrange(conversation), None)[1]

    def arrange(self, conversation: Conversation) -> Conversation:
        """Return a conversation with tool results in the order of the calls, each call in its own turn if the template needs it.

        Where the template shows no tools, they and their calls are described. Raises InvalidRequest naming a call without a
        result or a result without a call.
        """
        _check_options(conversation)
        if _has_calls(conversation):
            is_answered = conversation.add_generation_prompt or conversation.continue_final_message
            conversation = replace(conversation, messages=pair_results(conversation.messages, is_answered=is_answered))
        conversation = self.reword(conversation)
        if not _has_calls(conversation):
            return conversation
        messages, capabilities = conversation.messages, self._capabilities_for(conversation)
        spelling = self._spelling_for(capabilities)
        if not (capabilities.several_calls if spelling is None else spelling.is_several):
            messages = one_call_per_turn(messages)
        return replace(conversation, messages=messages)

    def write_hidden(self, conversation: Conversation, hiding: Hiding | None) -> tuple[str, str]:
        """Render an arranged conversation; return the template's own, with the client's control tokens hidden, and the prompt.

        Both are the same text where the client wrote none. Raises as `write` does.
        """
        capabilities = self._capabilities_for(conversation)
        turns = normalise(conversation, capabilities, self.late_system, spells_calls=self._spelling_for(capabilities) is not None)
        tools, options = _tools(conversation, capabilities), conversation.template_kwargs
        hidden = None if hiding is None else hiding.hide((turns, tools, options))
        if hiding is None or hidden is None:
            prompt = self._render(conversation, turns, tools, options)
            return prompt, prompt
        turns_hidden, tools_hidden, options_hidden = hidden
        own, prompt = hiding.settle(self._render(conversation, turns_hidden, tools_hidden, options_hidden, hiding))
        with suppress(TemplateFailed):  # it may refuse what is written as a control token
            plain = self._render(conversation, turns, tools, options)
            if not hiding.has_typed(plain, own):  # what templates sort by characters is as it was
                return plain, plain
        return own, prompt

    def _capabilities_for(self, conversation: Conversation) -> Capabilities:
        return self._with_tools if conversation.tools else self.capabilities

    def _spelling_for(self, capabilities: Capabilities) -> CallSpelling | None:
        return None if capabilities.arguments or not capabilities.result_role else self.spelling

    def _spelled(self, turns: list[Turn], conversation: Conversation) -> list[Turn]:
        """Return the turns with calls as text of their answers, if the template leaves calls out and their format is known."""
        capabilities = self._capabilities_for(conversation)
        if (spelling := self._spelling_for(capabilities)) is None:
            return turns
        return [_as_answer(turn, spelling) if "tool_calls" in turn else _with_role(turn, capabilities) for turn in turns]

    def _render(
        self, conversation: Conversation, turns: list[Turn], tools: Any, options: dict[str, Any], hiding: Hiding | None = None
    ) -> str:
        if conversation.continue_final_message:
            last = turns[-1]
            holder, key = (last, "content") if isinstance(last["content"], str) else (last["content"][-1], "text")
            holder[key] += CUT
        options = {"add_generation_prompt": conversation.add_generation_prompt, **options}
        typed, num_past = TypedMarkers(), len(turns) - conversation.continue_final_message  # an answer that goes on may reason
        turns = [*typed.hide(turns[:num_past], turns[num_past:], tools, options), *turns[num_past:]]
        try:
            # After the client's control tokens were hidden: the marks of calls are the model's own.
            prompt = typed.restore(self.template.render(self._spelled(turns, conversation), tools=tools, **options))
            if conversation.continue_final_message:
                prompt, found, _ = prompt.rpartition(CUT)
                if not found:
                    raise TemplateFailed("the model's chat template leaves out the message that is to be continued", "messages")
            shown = prompt if hiding is None else hiding.settle(prompt)[1]
            _check_nothing_lost(conversation, shown, self._capabilities_for(conversation))
        except UnicodeEncodeError as error:
            message = "messages have half a character in them (a lone surrogate); send valid Unicode"
            raise InvalidRequest(message, "messages") from error
        return prompt


def _has_calls(conversation: Conversation) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in conversation.messages)


def _as_answer(turn: Turn, spelling: CallSpelling) -> Turn:
    text = spelling.write([call["function"] for call in turn["tool_calls"]])
    content = turn.get("content") or ""
    written = content + text if isinstance(content, str) else [*content, *as_parts(text)]
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": written}


def _with_role(turn: Turn, capabilities: Capabilities) -> Turn:
    return {**turn, "role": capabilities.result_role} if turn["role"] == "tool" else turn


def normalise(
    conversation: Conversation, capabilities: Capabilities, late_system: LateSystem = "fold", *, spells_calls: bool = False
) -> list[Turn]:
    """Convert messages to turns that the template accepts. Raises InvalidRequest naming a message that can not be converted."""
    if not conversation.messages:
        raise InvalidRequest("messages is empty; send at least one", "messages")
    places = [message.place or f"messages[{index}]" for index, message in enumerate(conversation.messages)]
    if not (capabilities.arguments or spells_calls):
        _refuse_calls(conversation, places, capabilities)
    turns = [_turn(message, place, capabilities) for message, place in zip(conversation.messages, places, strict=True)]
    if conversation.tools and capabilities.tools and capabilities.tools_in_system and turns[0]["role"] not in INSTRUCTING:
        turns.insert(0, {"role": "system", "content": ""})
    turns = merge_neighbours(place_instructions(turns, capabilities, late_system), capabilities)
    for turn in turns:
        if turn["role"] in capabilities.only_parts and isinstance(turn.get("content"), str):
            turn["content"] = as_parts(turn["content"])
    return turns


def _refuse_calls(conversation: Conversation, places: Sequence[str], capabilities: Capabilities) -> None:
    for message, place in zip(conversation.messages, places, strict=True):
        if message.tool_calls:
            why = f"this model's chat template has no place for tool calls: {capabilities.why_no_calls}"
            raise UnsupportedParameter(f"{place}.tool_calls: {why}", f"{place}.tool_calls")


def _turn(message: Message, place: str, capabilities: Capabilities) -> Turn:
    role = "system" if message.role == "developer" and not capabilities.developer else message.role
    turn: Turn = {"role": role, "content": _content(message, place, capabilities)}
    if message.reasoning:
        turn[capabilities.reasoning_key] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = _calls(message.tool_calls, f"{place}.tool_calls", capabilities)
        if message.reasoning and turn["content"] and not capabilities.text_and_reasoning:
            turn["content"] = join(turn.pop(capabilities.reasoning_key), turn["content"])
        turn = turn if turn["content"] else without_content(turn, capabilities)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _call_id(message.tool_call_id, capabilities)
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _content(message: Message, place: str, capabilities: Capabilities) -> Content:
    """Return the content as text parts if the client sent parts and the template accepts them, else as one string."""
    if not message.content or isinstance(message.content, str):
        return message.content or ""
    role = "system" if message.role == "developer" else message.role
    for index, part in enumerate(message.content):
        where, kind = f"{place}.content[{index}]", part.get("type")
        if kind == "image" and "image" in part and role not in capabilities.images:
            takers = " and ".join(sorted(capabilities.images)) or "nobody"
            raise UnsupportedParameter(f"{where}: this model's chat template takes images from {takers}, not {role}", where)
        if kind != "image" and (kind != "text" or not isinstance(part.get("text"), str)):
            raise UnsupportedParameter(f"{where} is of type {kind!r}; parts are texts or images here", where)
    if not any(part["type"] == "image" for part in message.content) and role not in capabilities.parts:
        return "\n".join(message.texts)
    return [{"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in message.content]


def _calls(calls: tuple[ToolCall, ...], place: str, capabilities: Capabilities) -> list[dict[str, Any]]:
    written = []
    for index, call in enumerate(calls):
        function = {"name": call.name, "arguments": _arguments(call, f"{place}[{index}].function.arguments", capabilities)}
        identity = {} if call.id is None else {"id": _call_id(call.id, capabilities)}
        written.append({**identity, "type": "function", "function": function})
    return written


def _arguments(call: ToolCall, place: str, capabilities: Capabilities) -> Any:
    """Return a call's arguments as a dict if the template takes one (it then formats them as in training), else as JSON text."""
    text = call.arguments.strip() or "{}"
    if capabilities.arguments == {"text"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) and "text" not in capabilities.arguments:
        raise InvalidRequest(f"{place} is not a JSON object; this model's chat template can write nothing else", place)
    return value if isinstance(value, dict) else call.arguments


def _call_id(given: str, capabilities: Capabilities) -> str:
    if capabilities.any_call_id or (len(given) == 9 and given.isalnum()):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _tools(conversation: Conversation, capabilities: Capabilities) -> list[dict[str, Any]] | None:
    if conversation.tools and not capabilities.tools:
        advice = "send none, or start weft with --tools-without-template describe"
        raise UnsupportedParameter(f"this model's chat template has no place for tools: {advice}", "tools")
    defaults = {} if capabilities.bare_tools else {"description": "", "parameters": {"type": "object", "properties": {}}}
    tools = []
    for tool in conversation.tools:
        given = {key: value for key, value in tool["function"].items() if value is not None}
        tools.append({**tool, "function": given | defaults | given})  # given values win, and come first
    return tools or None


def _as_it_is(conversation: Conversation) -> Conversation:
    return conversation


def _check_options(conversation: Conversation) -> None:
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in conversation.template_kwargs:
            message = f"chat_template_kwargs may not set {name}; the request has a field for it"
            raise InvalidRequest(message, "chat_template_kwargs")
    if not conversation.continue_final_message:
        return
    if conversation.add_generation_prompt:
        message = "continue_final_message goes on with an answer, add_generation_prompt begins one; set one of them to false"
        raise InvalidRequest(message, "continue_final_message")
    if not conversation.messages or conversation.messages[-1].role != "assistant" or conversation.messages[-1].tool_calls:
        message = "continue_final_message needs a last message of role assistant, without tool_calls"
        raise InvalidRequest(message, "continue_final_message")


def _check_nothing_lost(conversation: Conversation, prompt: str, capabilities: Capabilities) -> None:
    """Raise TemplateFailed if the prompt lacks a message's text; system texts may be apart, tool results in any order.

    A call's name may come before the text of its turn. Texts beside calls are not looked for, and neither are those merged with
    calls where the template keeps no text there.
    """
    written = _comparable(prompt)
    starts = {True: 0, False: 0}  # instructions may have a place of their own, so they are searched separately
    answer = 0  # where the present run of answers begins
    for index, message in enumerate(conversation.messages):
        instructs = message.role in INSTRUCTING
        if index == 0 or message.role != "assistant" or conversation.messages[index - 1].role != "assistant":
            answer = starts[False]
        if _is_lost_beside_calls(conversation.messages, index, capabilities):
            continue
        for text in map(_comparable, _texts_to_show(message)):
            found = written.find(text, answer if message.tool_calls else starts[instructs])
            if found < 0 and message.role == "tool":
                found = written.find(text)  # results may come in the order of their calls
            if found < 0:
                place = message.place or f"messages[{index}]"
                raise TemplateFailed(f"the model's chat template leaves out what {place} (role {message.role}) says", place)
            starts[instructs] = max(starts[instructs], found + len(text))


def _is_lost_beside_calls(messages: Sequence[Message], index: int, capabilities: Capabilities) -> bool:
    """Whether a text is merged into a turn of calls, where the template writes none."""
    if capabilities.call_text != "lost" or "assistant" in capabilities.repeats or messages[index].tool_calls:
        return False
    run = takewhile(lambda message: message.role == "assistant", messages[index:])
    return any(message.tool_calls for message in run)


def _texts_to_show(message: Message) -> list[str]:
    """Return texts that the prompt must contain: names of tool calls, else the content, but none if it includes reasoning."""
    if message.tool_calls:
        return [call.name for call in message.tool_calls]
    return [] if message.role == "assistant" and begins_with_reasoning("".join(message.texts)) else message.texts


def least_bytes(message: Message) -> int:
    """Return how many bytes of any prompt a message surely takes: a template that leaves out its text is refused.

    What templates may take out of a text is not counted, and nothing is for answers, of which reasoning may be left out.
    """
    if message.role == "assistant" or message.tool_calls:
        return 0
    return max((_least_bytes(text.encode()) for text in message.texts), default=0)


def _least_bytes(data: bytes) -> int:
    num_lost = _LONGEST_SWITCH * data.count(b"think") + _LONGEST_ESCAPE * data.count(b"\\")
    return max(0, len(data.translate(None, _LOST_BYTES)) - num_lost)


def _comparable(text: str) -> bytes:
    return _LOST.sub(b"", text.strip().encode()).translate(None, _LOST_BYTES)
