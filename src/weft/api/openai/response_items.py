"""Converts the input items of a Responses request to messages, and its tools (namespaces flattened) to Chat's format."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from weft.api.dialect import unseal
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.text.bodies import Shape, convert, shape_of
from weft.text.chat_messages import ChatMessage, Part, read_message
from weft.text.tools import ToolSelection, read_tool_selection, read_tools, template_tools, wrap_custom_input
from weft.text.types import Message, ToolCall

Item = dict[str, Any]


class MessageItem(msgspec.Struct, kw_only=True):
    """An input item of type message, from user, assistant, system or developer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]

    def read(self, place: str) -> Message:
        return read_message(ChatMessage(role=self.role, content=_content(self.content)), place)


class ReasoningItem(msgspec.Struct, kw_only=True):
    """Reasoning of an earlier answer: its content, else its encrypted_content if made by weft, else its summary."""

    content: list[Part] | None = None
    encrypted_content: str | None = None
    summary: list[Part] | None = None

    def read(self, _place: str) -> Message:
        return Message("assistant", None, _text(self.content) or unseal(self.encrypted_content or "") or _text(self.summary))


class CallItem(msgspec.Struct, kw_only=True):
    """An input item of type function_call: the call of a function in an earlier answer."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def read(self, place: str) -> Message:
        return _call(flat_name(self.name, self.namespace), self.arguments, self.call_id, place)


class CustomCallItem(msgspec.Struct, kw_only=True):
    """An input item of type custom_tool_call: the call of a tool that takes plain text, in an earlier answer."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def read(self, place: str) -> Message:
        return _call(flat_name(self.name, self.namespace), wrap_custom_input(self.input), self.call_id, place)


class ResultItem(msgspec.Struct, kw_only=True):
    """An input item with the output of a function call or custom tool call."""

    call_id: str
    output: str | list[Part]

    def read(self, place: str) -> Message:
        return read_message(ChatMessage(role="tool", content=_content(self.output), tool_call_id=self.call_id), place)


ITEMS: dict[str, type[MessageItem | ReasoningItem | CallItem | CustomCallItem | ResultItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": ResultItem,
}
ACTING_FIELDS = ("name", "description", "parameters", "strict", "format")  # of a tool
# Calls of OpenAI's own tools and their results: the tool's name, the field with the arguments, the field with the result.
OWN_ITEMS: dict[str, tuple[str, str | None, str | None]] = {
    "local_shell_call": ("local_shell", "action", None),
    "local_shell_call_output": ("local_shell", None, "output"),
    "shell_call": ("shell", "action", None),
    "shell_call_output": ("shell", None, "output"),
    "apply_patch_call": ("apply_patch", "operation", None),
    "apply_patch_call_output": ("apply_patch", None, "output"),
    "tool_search_call": ("tool_search", "arguments", None),
    "tool_search_output": ("tool_search", None, "tools"),
    "web_search_call": ("web_search", "action", "results"),
    "file_search_call": ("file_search", "queries", "results"),
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "mcp_call": ("mcp", "arguments", "output"),
}


def item_shapes() -> dict[str, Shape]:
    """Return the fields that are read of input items, by their type; of an item without one, those of a message."""
    shapes = {kind: Shape({**(shape_of(struct).fields or {}), "type": Shape()}) for kind, struct in ITEMS.items()}
    return {**shapes, "": shapes["message"]}


def read_items(items: Sequence[tuple[str, Item]]) -> tuple[Message, ...]:
    """Convert (path, item) pairs to messages; reasoning, text and calls of an answer are merged. Raises InvalidRequest."""
    messages: list[Message] = []
    held: list[Message] = []  # results that came with their calls, while calls in the same message wait for theirs
    for place, item in _identified(_without_cut_calls(items)):
        for number, message in enumerate(_read(item, place)):
            if number and len(messages[-1].tool_calls) > 1:
                held.append(replace(message, place=place))
                continue
            if message.role != "assistant":
                messages, held = messages + held, []
            last = messages[-1] if messages else message
            is_next = bool(message.tool_calls) or (last.content is None and not last.tool_calls)  # reasoning, text, calls
            if messages and is_next and last.role == message.role == "assistant":
                content = last.content if message.content is None else message.content
                reasoning = "\n\n".join(filter(None, (last.reasoning, message.reasoning))) or None
                calls, marks = last.tool_calls + message.tool_calls, message.breakpoints or last.breakpoints
                messages[-1] = replace(last, content=content, reasoning=reasoning, tool_calls=calls, breakpoints=marks)
            else:
                messages.append(replace(message, place=place))
    return tuple(message for message in messages + held if message.content is not None or message.tool_calls)


def _without_cut_calls(items: Sequence[tuple[str, Item]]) -> list[tuple[str, Item]]:
    """Return the items without calls that were cut short: these have no result, unless the client sends one."""
    kinds = ("function_call", "custom_tool_call")
    outputs = [item.get("call_id") for _, item in items if item.get("type") in [f"{kind}_output" for kind in kinds]]

    def is_cut(item: Item) -> bool:
        return item.get("type") in kinds and item.get("status") == "incomplete" and item.get("call_id") not in outputs

    return [(place, item) for place, item in items if not is_cut(item)]


def _identified(items: Sequence[tuple[str, Item]]) -> Iterator[tuple[str, Item]]:
    """Yield the items; outputs of OpenAI's own tools that lack a call_id get that of their call: by its id, else in order."""
    waiting: list[tuple[str, Any, Item]] = []  # calls whose outputs are items of their own: tool, call_id, item
    for place, given_item in items:
        item = given_item
        kind, found = item.get("type"), None
        name, arguments, result = OWN_ITEMS.get(kind, ("", None, None)) if isinstance(kind, str) else ("", None, None)
        if arguments and not result:
            waiting.append((name, _own_id(item, place), item))
        elif result and not arguments:
            given = item.get("call_id") or item.get("id")
            fitting = [one for one in waiting if one[0] == name]
            fitting.sort(key=lambda one: given not in (one[1], one[2].get("id")))
            found = next(iter(fitting), None)
        if found is not None:
            waiting.remove(found)
            item = {"call_id": found[1]} | {key: value for key, value in item.items() if value is not None}
        yield place, item


def resolve_items(given: str | Sequence[Item], referred: Mapping[str, Item]) -> list[Item]:
    """Return an input as items: a text becomes a user message, references become items. Raises InvalidRequest if unknown."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    for index, item in enumerate(given):
        if _is_reference(item) and str(item.get("id")) not in referred:
            message = f"input[{index}]: no item {item.get('id')!r} is kept here; send the item itself"
            raise InvalidRequest(message, f"input[{index}].id")
    return [referred[str(item.get("id"))] if _is_reference(item) else item for item in given]


def unknown_kinds(items: Sequence[Item]) -> set[str]:
    """Return the types of items that weft does not know, as `input.TYPE`; such items are ignored, not refused."""
    return {f"input.{item['type']}" for item in items if "type" in item and item["type"] not in ITEMS | OWN_ITEMS}


def find_references(given: Any) -> set[str]:
    """Return the ids of all item references (items that have only an id, or type item_reference) in an input."""
    items = given if isinstance(given, list) else []
    return {item["id"] for item in items if isinstance(item, dict) and _is_reference(item) and isinstance(item.get("id"), str)}


def complete_item(item: Item, item_id: str) -> Item:
    """Return an item as it is stored and listed: type, status and id are added if absent, and a text becomes a part."""
    given = {name: value for name, value in item.items() if value is not None}
    if not isinstance(given.get("id", ""), str):  # nothing could refer to it
        del given["id"]
    if isinstance(text := given.get("content"), str):
        kind = "output_text" if given.get("role") == "assistant" else "input_text"
        given["content"] = [{"type": kind, "text": text}]
    return {"type": "message", "status": "completed", "id": item_id} | given


def _read(item: Item, place: str) -> list[Message]:
    kind = item.get("type", "message")
    if kind == "compaction":
        why = "only the server that wrote it can read it; send the conversation itself"
        raise InvalidRequest(f"{place}.type compaction: {why}", f"{place}.type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")
    if kind in ITEMS:
        read = convert(item, ITEMS[kind], place).read(place)
        return [] if read.reasoning == "" else [read]  # reasoning that can not be read
    return _read_own(item, place, *OWN_ITEMS[kind]) if kind in OWN_ITEMS else []


def _read_own(item: Item, place: str, name: str, arguments: str | None, result: str | None) -> list[Message]:
    call_id = _own_id(item, place)
    messages = []
    if arguments is not None:
        called, given = item.get("name"), item.get(arguments)
        if given is None:
            raise InvalidRequest(f"{place}.{arguments} is required", f"{place}.{arguments}")
        if not (isinstance(given, str) and arguments == "arguments"):
            given = msgspec.json.encode(given if isinstance(given, dict) else {arguments: given}).decode()
        messages.append(_call(called if isinstance(called, str) else name, given, call_id, place))
    if result is not None:  # where there is none, the error or the status says something
        given = next((item[field] for field in (result, "error", "status") if item.get(field) is not None), "completed")
        text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        messages.append(Message("tool", text, tool_call_id=call_id))
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{place}.call_id must be a string", f"{place}.call_id")
    return messages


def _own_id(item: Item, place: str) -> Any:
    return item.get("call_id") or item.get("id") or f"call_{place}"


def _call(name: str, arguments: str, call_id: str, place: str) -> Message:
    return Message("assistant", None, tool_calls=(ToolCall(name, arguments, call_id, place),))


def _is_reference(item: Item) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _content(content: str | list[Item]) -> str | list[Item]:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Item) -> Item:
    if part.get("type") != "input_image" or not isinstance(part.get("image_url"), str):
        return part
    return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail")}}


def _text(parts: list[Item] | None) -> str:
    texts = (part.get("text") for part in parts or ())
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool: `namespace__name`, or just the name if there is no namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


@dataclass(frozen=True)
class SentTool:
    """A tool of a Responses request, with its namespace and path; `shape` is None if its type is not supported."""

    kind: str
    name: str = ""
    namespace: str | None = None
    place: str = "tools"
    shape: Item | None = None  # as Chat Completions writes it; None: a kind that is not done here

    @property
    def names(self) -> dict[str, str]:
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


class OutputTools:
    """The tools of a Responses request by flat name, namespace included; kinds that weft lacks are noted as missing."""

    def __init__(self, given: Sequence[Any] = ()) -> None:
        sent = [one for index, tool in enumerate(given) for one in _read_tool(tool, f"tools[{index}]")]
        self.missing = tuple(one.kind for one in sent if one.shape is None)
        shapes = [one.shape for one in sent if one.shape is not None]
        ours = [one for one in sent if one.shape is not None]
        self._tools = read_tools(shapes, [one.place for one in ours])
        self.template_tools = template_tools(shapes)
        self._sent = {tool.name: one for tool, one in zip(self._tools, ours, strict=True)}  # by flat name

    def find(self, flat: str) -> SentTool:
        return self._sent.get(flat) or SentTool("function", flat)

    def select(self, given: Any, parallel: bool | None) -> ToolSelection | None:
        """Return the tool selection for a tool_choice; None if there are no tools. Raises InvalidRequest."""
        missing = self.missing
        match given:
            case {"type": "function" | "custom", "name": str(name)}:
                given = {"type": "function", "name": self._find_flat(name, _namespace(given, "tool_choice"))}
            case {"type": "allowed_tools", "tools": list(tools)}:
                missing = tuple(tool["type"] for tool in tools if _is_hosted(tool))
                given = {**given, "tools": [{"name": name} for tool in tools for name in self._allowed(tool)]}
            case {"type": str(kind)} if kind != "allowed_tools":
                raise InvalidRequest(f"tool_choice asks for {kind}, which is not to be had here", "tool_choice")
        selection = read_tool_selection(given, self._tools, parallel, missing)
        return selection if self._tools else None

    def _allowed(self, tool: Any) -> list[str]:
        match tool:
            case {"type": "namespace", "name": str(name)}:
                return [flat for flat, one in self._sent.items() if one.namespace == name]
            case {"type": "function" | "custom", "name": str(name)}:
                return [self._find_flat(name, _namespace(tool, "tool_choice.tools"))]
            case _ if _is_hosted(tool):
                return []
        raise InvalidRequest("tool_choice.tools must be tools with a type and a name", "tool_choice")

    def _find_flat(self, name: str, namespace: str | None) -> str:
        if namespace is not None or name in self._sent:
            return flat_name(name, namespace)
        return next((flat for flat, one in self._sent.items() if one.name == name), name)


def _is_hosted(tool: Any) -> bool:
    """Whether a tool is of a kind that a server would have to run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in ("namespace", "function", "custom")


def _namespace(chosen: Item, place: str) -> str | None:
    namespace = chosen.get("namespace")
    if not isinstance(namespace, str | None):
        raise InvalidRequest(f"{place}.namespace must be a string", f"{place}.namespace")
    return namespace


def _read_tool(tool: Any, place: str, namespace: str | None = None) -> Iterator[SentTool]:
    match tool:
        case {"type": "namespace", "name": str(name), "tools": list(tools)} if namespace is None:
            for index, inner in enumerate(_introduce(tools, tool.get("description"))):
                yield from _read_tool(inner, f"{place}.tools[{index}]", name)
        case {"type": "namespace"}:
            raise InvalidRequest(f"{place} must have a name and tools, none of which is a namespace itself", place)
        case {"type": "mcp"}:
            why = "the server calls no other servers, and a model without its tools invents their results"
            raise UnsupportedParameter(f"{place} is a tool of type mcp: {why}; leave it out", place)
        case {"type": "function" | "custom" as kind}:
            inner = tool[kind] if isinstance(tool.get(kind), dict) else tool  # some send it as Chat Completions has it
            shape = {key: value for key in ACTING_FIELDS if (value := inner.get(key, tool.get(key))) is not None}
            if isinstance(own := shape.get("name"), str):
                shape["name"] = flat_name(own, namespace)
            yield SentTool(kind, str(own), namespace, place, {"type": kind, kind: shape})
        case {"type": str(kind)}:
            yield SentTool(kind)
        case _:
            raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")


def _introduce(tools: list[Any], description: Any) -> list[Any]:
    """Return a namespace's tools, with the namespace's description put before that of the first tool."""
    if not (isinstance(description, str) and tools and isinstance(tools[0], dict)):
        return tools
    words = [text for text in (description, tools[0].get("description")) if isinstance(text, str) and text]
    return [{**tools[0], "description": "\n\n".join(words)}, *tools[1:]]
