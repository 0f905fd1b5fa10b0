"""The tools of a Responses request: read as Chat Completions writes them, and named in the output as the client knows them.

Namespaces are flattened: models call a tool by one name. Tools that a server would have to run itself are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidRequest
from weft.text.tools import ToolSelection, read_tool_selection, read_tools, template_tools

ToolShape = dict[str, Any]

ACTING_FIELDS = ("name", "description", "parameters", "strict", "format")


def flat_name(name: str, namespace: str | None) -> str:
    """The one name by which a model calls a tool of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


@dataclass(frozen=True)
class SentTool:
    """A tool as its client sent it."""

    kind: str
    name: str = ""
    namespace: str | None = None
    place: str = "tools"
    shape: ToolShape | None = None  # as Chat Completions writes it; None: a kind that is not done here

    @property
    def names(self) -> dict[str, str]:
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


class OutputTools:
    """The tools that an answer may call. Raises InvalidRequest with the place of the first misfit."""

    def __init__(self, given: Sequence[Any] = ()) -> None:
        sent = [one for index, tool in enumerate(given) for one in _read_tool(tool, f"tools[{index}]")]
        self.missing = tuple(one.kind for one in sent if one.shape is None)
        shapes = [one.shape for one in sent if one.shape is not None]
        ours = [one for one in sent if one.shape is not None]
        self._tools = read_tools(shapes, [one.place for one in ours])
        self.template_tools = template_tools(shapes)
        self._sent = {tool.name: one for tool, one in zip(self._tools, ours, strict=True)}  # by flat name

    def find(self, flat: str) -> SentTool:
        """The tool that the model calls by this flat name."""
        return self._sent.get(flat) or SentTool("function", flat)

    def select(self, given: Any, parallel: bool | None) -> ToolSelection | None:
        """Which tools may be called; None where there are none. Raises InvalidRequest."""
        selection = read_tool_selection(self._flatten_choice(given), self._tools, parallel)
        return selection if self._tools else None

    def _flatten_choice(self, given: Any) -> Any:
        match given:
            case {"type": "function" | "custom", "name": str(name)}:
                return {"type": "function", "name": self._find_flat(name, given.get("namespace"))}
            case {"type": "allowed_tools", "tools": list(tools)}:
                return {**given, "tools": [{"name": name} for tool in tools for name in self._allowed(tool)]}
            case {"type": str(kind)} if kind != "allowed_tools":
                raise InvalidRequest(f"tool_choice asks for {kind}, which is not to be had here", "tool_choice")
        return given

    def _allowed(self, tool: Any) -> Iterator[str]:
        """The flat names of one entry of allowed_tools; none for a tool of a kind that is not done here."""
        match tool:
            case {"type": "namespace", "name": str(name)}:
                yield from (flat for flat, one in self._sent.items() if one.namespace == name)
            case {"type": "function" | "custom", "name": str(name)}:
                yield self._find_flat(name, tool.get("namespace"))
            case {"type": str()}:
                return
            case _:
                raise InvalidRequest("tool_choice.tools must be tools with a type and a name", "tool_choice")

    def _find_flat(self, name: str, namespace: Any) -> str:
        if isinstance(namespace, str) or name in self._sent:
            return flat_name(name, namespace)
        return next((flat for flat, one in self._sent.items() if one.name == name), name)


def _read_tool(tool: Any, place: str, namespace: str | None = None) -> Iterator[SentTool]:
    match tool:
        case {"type": "namespace", "name": str(name), "tools": list(tools)} if namespace is None:
            for index, inner in enumerate(_introduce(tools, tool.get("description"))):
                yield from _read_tool(inner, f"{place}.tools[{index}]", name)
        case {"type": "namespace"}:
            raise InvalidRequest(f"{place} must have a name and tools, none of which is a namespace itself", place)
        case {"type": "function" | "custom" as kind}:
            inner = tool[kind] if isinstance(tool.get(kind), dict) else tool  # some send it as Chat Completions has it
            shape = {key: inner[key] for key in ACTING_FIELDS if inner.get(key) is not None}
            if isinstance(own := shape.get("name"), str):
                shape["name"] = flat_name(own, namespace)
            yield SentTool(kind, str(own), namespace, place, {"type": kind, kind: shape})
        case {"type": str(kind)}:
            yield SentTool(kind)
        case _:
            raise InvalidRequest(f"{place}.type must be a string", f"{place}.type")


def _introduce(tools: list[Any], description: Any) -> list[Any]:
    """The tools of a namespace; the first one's description begins with the namespace's."""
    if not (isinstance(description, str) and tools and isinstance(tools[0], dict)):
        return tools
    words = [text for text in (description, tools[0].get("description")) if isinstance(text, str) and text]
    return [{**tools[0], "description": "\n\n".join(words)}, *tools[1:]]
