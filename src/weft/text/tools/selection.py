"""Tools and the choice among them, read from JSON; errors name the place and what to do.

Takes the shapes of OpenAI's two wires; others translate theirs. Knows no model: how calls are written is `families`' matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.enforcement import MAX_DEPTH
from weft.text.schema import json_schema_grammar, lark_grammar, regex_grammar
from weft.text.tools.custom_input import INPUT
from weft.text.tools.tool import Tool

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # what OpenAI and Anthropic take, and dots for names that were flattened
STARTS = re.compile(r"^\s*[!?]*start\s*[:\[]", re.MULTILINE)
MAX_TOOLS = 512
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class ToolSelection:
    """Which tools may be called, and whether one must be."""

    mode: Mode
    tools: tuple[Tool, ...]
    is_parallel: bool = True  # several calls in one answer


def read_tools(tools: Sequence[Any] | None, place: str = "tools") -> tuple[Tool, ...]:
    """Tools in the shape of Chat Completions: {"type": "function", "function": {"name", "parameters", "strict"}}, or
    {"type": "custom", "custom": {"name", "format"}}. Raises InvalidRequest.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidRequest(f"{place} has {len(tools or ())} entries; at most {MAX_TOOLS} are taken", place)
    read = tuple(_tool(tool, f"{place}[{index}]") for index, tool in enumerate(tools or ()))
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            where = f"{place}[{index}].{'custom' if tool.is_custom else 'function'}.name"
            raise InvalidRequest(f"{where} {tool.name!r} is the name of an earlier tool too; names must differ", where)
        seen.add(tool.name)
    return read


def template_tools(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Tools, read before, as chat templates know them: a custom one is a function that takes a text."""
    return tuple(tool if tool["type"] == "function" else _as_function(tool["custom"]) for tool in tools)


def read_tool_selection(
    given: Any, tools: tuple[Tool, ...], parallel: bool | None = None, place: str = "tool_choice"
) -> ToolSelection:
    """What a client wants called. A tool asked for by name is called once: who names one expects one answer."""
    is_parallel = parallel is not False
    match given:
        case None:
            return ToolSelection("auto" if tools else "none", tools, is_parallel)
        case "none":
            return ToolSelection("none", tools)
        case "auto" if not tools:
            return ToolSelection("none", tools)
        case "auto" | "required":
            choice = ToolSelection(given, tools, is_parallel)
        case (
            {"type": "function", "function": {"name": str(name)}}
            | {"type": "custom", "custom": {"name": str(name)}}
            | {"type": "function" | "custom", "name": str(name)}
        ):
            choice = ToolSelection("required", (_named(name, tools, place),), is_parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}} | {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": list(allowed),
        }:
            names = [_name_of(one, f"{place}.tools[{index}]") for index, one in enumerate(allowed)]
            chosen = {_named(name, tools, place).name for name in names}
            choice = ToolSelection(mode, tuple(tool for tool in tools if tool.name in chosen), is_parallel)
        case _:
            message = f"{place} must be auto, none, required, a tool by its name, or allowed_tools with mode and tools"
            raise InvalidRequest(message, place)
    if not choice.tools:
        raise InvalidRequest(f"{place} asks for tools, but there are none; send some in tools", place)
    return choice


def _tool(given: Any, place: str) -> Tool:
    match given:
        case {"type": "function", "function": dict(function)}:
            return _function(function, f"{place}.function")
        case {"type": "custom", "custom": dict(custom)}:
            return _custom(custom, f"{place}.custom")
    shapes = '{"type": "function", "function": {…}} or {"type": "custom", "custom": {…}}'
    raise InvalidRequest(f"{place} must be {shapes}", place)


def _function(function: dict[str, Any], place: str) -> Tool:
    name, parameters, strict = _checked_name(function, place), function.get("parameters"), function.get("strict")
    if strict not in (None, True, False):
        raise InvalidRequest(f"{place}.strict must be true or false", f"{place}.strict")
    where = f"{place}.parameters"
    parameters = NOTHING if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f'{where} must be a JSON Schema of type "object"', where)
    parameters = {"type": "object", **parameters}
    if _depth(parameters) > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
    if strict:
        json_schema_grammar(parameters, True, where)
    return Tool(name, msgspec.json.encode(parameters).decode(), bool(strict), where)


def _custom(custom: dict[str, Any], place: str) -> Tool:
    name, where = _checked_name(custom, place), f"{place}.format"
    if not isinstance(custom.get("description"), str | None):
        raise InvalidRequest(f"{place}.description must be a text", f"{place}.description")
    syntax, definition = _format(custom, where)
    made: GrammarSpec | None = None
    if syntax == "lark":
        made = lark_grammar(definition, where)
        if not STARTS.search(definition):
            raise InvalidRequest(f"{where}: the grammar needs a rule that is called start", where)
    elif syntax:
        made = regex_grammar(definition, where)
    return Tool(name, msgspec.json.encode(_takes_text()).decode(), place=where, is_custom=True, grammar=made)


def _format(custom: dict[str, Any], place: str) -> tuple[str, str]:
    """The syntax of what its text must be, and the definition; nothing where any text will do."""
    match custom.get("format"):
        case None | {"type": "text"}:
            return "", ""
        case {"type": "grammar", "grammar": {"syntax": "lark" | "regex" as syntax, "definition": str(definition)}} | {
            "type": "grammar",
            "syntax": "lark" | "regex" as syntax,
            "definition": str(definition),
        }:
            return syntax, definition
    shape = '{"type": "grammar", "grammar": {"syntax": "lark" or "regex", "definition": …}}'
    raise InvalidRequest(f'{place} must be {{"type": "text"}} or {shape}', place)


def _as_function(custom: dict[str, Any]) -> dict[str, Any]:
    syntax, definition = _format(custom, "format")
    said = {"description": f"{syntax.capitalize()} it must follow:\n{definition}"} if syntax else {}
    told = {"description": custom["description"]} if custom.get("description") else {}
    return {"type": "function", "function": {"name": custom["name"], **told, "parameters": _takes_text(**said)}}


def _takes_text(**said: str) -> dict[str, Any]:
    text = {"type": "string", **said}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _checked_name(given: dict[str, Any], place: str) -> str:
    name, where = given.get("name"), f"{place}.name"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{where} {name!r} must be 1 to 128 letters, digits, underscores, hyphens or dots", where)
    return name


def _depth(value: Any) -> int:
    """How many levels a value has, as far as that matters."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            one for each in level if isinstance(each, dict | list) for one in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _name_of(given: Any, place: str) -> str:
    match given:
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise InvalidRequest(f"{place} must name a tool", place)


def _named(name: str, tools: tuple[Tool, ...], place: str) -> Tool:
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        names = ", ".join(tool.name for tool in tools[:8]) or "none"
        raise InvalidRequest(f"{place} names the tool {name!r}, which is not in tools ({names})", place)
    return found
