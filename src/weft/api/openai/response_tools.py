"""The tools of a Responses request: read as Chat Completions has them, and known again by their own names in the answer.

Namespaces are flattened, because models call by one name. Tools that a server would have to run itself are left out and
told. Knows no model and no HTTP; `responses` reads tools here, `response_reply` asks for the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidRequest
from weft.text.tools import ToolSelection, read_tool_selection, read_tools, template_tools

Shape = dict[str, Any]

FIELDS = ("name", "description", "parameters", "strict", "format")  # of a tool that act


def flat_name(name: str, namespace: str | None) -> str:
    """The one name by which a model calls a tool of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


@dataclass(frozen=True)
class Called:
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def fields(self) -> dict[str, str]:
        """How a call names it."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


@dataclass(frozen=True)
class _Sent:
    """A tool as it was sent; without a shape it is one that is not to be had here."""

    place: str
    kind: str
    namespace: str | None = None
    shape: Shape | None = None


class Tools:
    """What may be called. Raises InvalidRequest with the place of the first misfit."""

    def __init__(self, given: Sequence[Any] = ()) -> None:
        sent = [one for index, tool in enumerate(given) for one in _read(tool, f"tools[{index}]")]
        self.missing = tuple(one.kind for one in sent if one.shape is None)
        ours = [(one, one.shape) for one in sent if one.shape is not None]
        self._shapes = [_flattened(shape, one.namespace) for one, shape in ours]
        self._tools = read_tools(self._shapes, [one.place for one, _ in ours])
        self._called = {
            tool.name: Called(shape[one.kind]["name"], one.namespace, tool.is_custom)
            for tool, (one, shape) in zip(self._tools, ours, strict=True)
        }

    @property
    def shown(self) -> tuple[Shape, ...]:
        """All of them as chat templates take them."""
        return template_tools(self._shapes)

    def called(self, flat: str) -> Called:
        """The tool that the model calls by this name."""
        return self._called.get(flat) or Called(flat)

    def choice(self, given: Any, parallel: bool | None) -> ToolSelection | None:
        """What is to be called; None where there is nothing to call."""
        choice = read_tool_selection(self._choice(given), self._tools, parallel)
        return choice if self._tools else None

    def _choice(self, given: Any) -> Any:
        match given:
            case {"type": "function" | "custom", "name": str(name)}:
                return {"type": "function", "name": self._flat(name, given.get("namespace"))}
            case {"type": "allowed_tools", "tools": list(tools)}:
                return {**given, "tools": [{"name": name} for tool in tools for name in self._allowed(tool)]}
            case {"type": str(kind)} if kind != "allowed_tools":
                raise InvalidRequest(f"tool_choice asks for {kind}, which is not to be had here", "tool_choice")
        return given

    def _allowed(self, tool: Any) -> Iterator[str]:
        """The flat names of one entry of allowed_tools; none for a tool that is not to be had."""
        match tool:
            case {"type": "namespace", "name": str(name)}:
                yield from (flat for flat, called in self._called.items() if called.namespace == name)
            case {"type": "function" | "custom", "name": str(name)}:
                yield self._flat(name, tool.get("namespace"))
            case {"type": str()}:
                return
            case _:
                raise InvalidRequest("tool_choice.tools must be tools with a type and a name", "tool_choice")

    def _flat(self, name: str, namespace: Any) -> str:
        if isinstance(namespace, str) or name in self._called:
            return flat_name(name, namespace)
        return next((flat for flat, called in self._called.items() if called.name == name), name)


def told(tools: Sequence[Any]) -> list[Any]:
    """The tools as a response tells them: functions with all of their fields."""
    empty = dict.fromkeys(("description", "parameters", "strict"))
    return [{**empty, **tool} if tool.get("type") == "function" else tool for tool in tools]


def _read(tool: Any, place: str, namespace: str | None = None) -> Iterator[_Sent]:
    match tool:
        case {"type": "namespace", "name": str(name), "tools": list(tools)} if namespace is None:
            for index, inner in enumerate(_introduced(tools, tool.get("description"))):
                yield from _read(inner, f"{place}.tools[{index}]", name)
        case {"type": "namespace"}:
            raise InvalidRequest(f"{place} must have a name and tools, none of which is a namespace itself", place)
        case {"type": "function" | "custom" as kind}:
            inner = tool[kind] if isinstance(tool.get(kind), dict) else tool  # some send it as Chat Completions has it
            shape = {key: inner[key] for key in FIELDS if inner.get(key) is not None}
            yield _Sent(place, kind, namespace, {"type": kind, kind: shape})
        case {"type": str(kind)}:
            yield _Sent(place, kind)
        case _:
            raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")


def _flattened(shape: Shape, namespace: str | None) -> Shape:
    kind = shape["type"]
    name = shape[kind].get("name")
    return {"type": kind, kind: {**shape[kind], "name": flat_name(name, namespace) if isinstance(name, str) else name}}


def _introduced(tools: list[Any], description: Any) -> list[Any]:
    """The tools of a namespace; the first one says what all of them are for."""
    if not (isinstance(description, str) and tools and isinstance(tools[0], dict)):
        return tools
    words = [text for text in (description, tools[0].get("description")) if isinstance(text, str) and text]
    return [{**tools[0], "description": "\n\n".join(words)}, *tools[1:]]
