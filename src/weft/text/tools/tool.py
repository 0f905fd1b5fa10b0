"""Tool definitions and tool choice, validated from OpenAI's JSON formats; the other dialects translate theirs to these."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.messages import START_RULE, GrammarSpec
from weft.text.schema import MAX_DEPTH, json_schema_grammar, lark_grammar, levels_of, regex_grammar
from weft.text.schema_closing import names_no_key
from weft.text.tools.custom_tools import INPUT

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # what OpenAI and Anthropic take, and dots for names that were flattened
MAX_TOOLS = 512
MAX_REFERENCES = 16  # of references to references
# What a strict text may be required to be besides a list of choices.
ASSERTING = {"pattern", "format", "minLength", "maxLength", "allOf", "not", "contentEncoding", "contentMediaType"}

Facts = tuple[set[str], list[Any] | None]  # the kinds of values that fit a schema, and the values themselves where it lists them


@dataclass(frozen=True)
class Tool:
    """A function or custom tool that may be called, with the schema of its arguments; a custom tool takes one text, `input`."""

    name: str
    schema: str  # of its arguments, as JSON text
    strict: bool = False
    place: str = field(default="tools", compare=False)  # of the schema in the request
    is_custom: bool = False
    grammar: GrammarSpec | None = None  # what a custom tool's text must be
    _known: dict[bytes, Facts] = field(default_factory=dict, init=False, repr=False, compare=False)  # by schemas

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return msgspec.json.decode(self.schema, type=dict[str, Any])

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(name for name in _list(self.parameters.get("required")) if isinstance(name, str))

    @cached_property
    def properties(self) -> dict[str, Any]:
        given = self.parameters.get("properties")
        named: dict[str, Any] = given if isinstance(given, dict) else {}
        return named | {name: {} for name in sorted(self.required - named.keys())}

    @property
    def is_open(self) -> bool:
        """Whether calls may have arguments the schema does not name: as additionalProperties says, else only if it names none."""
        return self.parameters.get("additionalProperties", not self.properties) is not False  # {} allows everything

    def schema_of(self, key: str) -> Any:
        return self.properties.get(key, self.parameters.get("additionalProperties", {}))

    def resolve(self, schema: Any) -> dict[str, Any]:
        """Follow a schema's $ref within the tool's schema (an #anchor means the root); {} for a non-object or a broken path."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            reference = str(schema["$ref"])
            schema = self.parameters if reference.startswith("#") else None
            for step in reference.split("/")[1:]:
                schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) and "$ref" not in schema else {}

    def kind_of(self, schema: Any) -> Literal["text", "nullable", "json"]:
        """How to write values of a schema where strings need no quotes: "text" (raw), "nullable" (raw or null) or "json"."""
        kinds = self._facts(schema)[0]
        return "text" if kinds == {"text"} else "nullable" if kinds == {"text", "null"} else "json"

    def choices(self, schema: Any) -> list[Any] | None:
        """Return the list of all values that the schema allows (const, enum, branches of these); None if it lists none."""
        return self._facts(schema)[1]

    def _facts(self, schema: Any) -> Facts:
        node = self.resolve(schema)
        text = msgspec.json.encode(node)
        if text not in self._known:
            self._known[text] = {"json"}, None  # for a schema that refers to itself
            self._known[text] = self._find_facts(node)
        return self._known[text]

    def _find_facts(self, node: dict[str, Any]) -> Facts:
        if "const" in node or "enum" in node:
            values = [node["const"]] if "const" in node else _list(node["enum"])
            return {"text" if isinstance(value, str) else "null" if value is None else "json" for value in values}, values
        if branches := [self._facts(branch) for branch in alternatives(node)]:
            lists = [values for _, values in branches if values is not None]
            listed = [value for values in lists for value in values] if len(lists) == len(branches) else None
            return set().union(*(kinds for kinds, _ in branches)), listed
        if self.strict and node.keys() & ASSERTING:
            return {"json"}, None  # only as JSON the engine can enforce the form of a text
        kinds = {{"string": "text", "null": "null"}.get(name, "json") for name in types(node)}
        return kinds, [None] if kinds == {"null"} else None


@dataclass(frozen=True)
class ToolSelection:
    """The tools that may be called, whether a call is optional, forbidden or required, and whether several are allowed."""

    mode: Literal["auto", "none", "required"]
    tools: tuple[Tool, ...]
    is_parallel: bool = True  # several calls in one answer


def read_tools(tools: Sequence[Any] | None, places: Sequence[str] = (), schema_field: str = "parameters") -> tuple[Tool, ...]:
    """Validate a request's tools, in the format of Chat Completions, and return them as `Tool`s. Raises InvalidRequest.

    For error messages, other dialects pass each tool's path in their own request (`places`) and the name of its schema field.
    """
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are taken", "tools")
    read: dict[str, Tool] = {}
    for index, given in enumerate(tools):
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in ("function", "custom") or not isinstance(given.get(kind), dict):
            shapes = '{"type": "function", "function": {…}} or {"type": "custom", "custom": {…}}'
            raise InvalidRequest(f"tools[{index}] must be {shapes}", f"tools[{index}]")
        place = places[index] if places else f"tools[{index}].{kind}"
        tool = _read_custom(given[kind], place) if kind == "custom" else _read_function(given[kind], place, schema_field)
        if tool.name in read:
            where = f"{place}.name"
            raise InvalidRequest(f"{where} {tool.name!r} is the name of an earlier tool too; names must differ", where)
        read[tool.name] = tool
    return tuple(read.values())


def template_tools(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Convert the request's tool dicts for chat templates: a custom tool becomes a function with one string parameter."""
    return tuple(tool if tool["type"] == "function" else _as_function(tool["custom"]) for tool in tools)


def read_tool_selection(
    given: Any, tools: tuple[Tool, ...], parallel: bool | None = None, missing: Sequence[str] = ()
) -> ToolSelection:
    """Convert a client's tool_choice to a ToolSelection; a tool chosen by name is called exactly once. Raises InvalidRequest.

    `missing` are the kinds of tools that the client sent and weft lacks.
    """
    is_parallel, place = parallel is not False, "tool_choice"
    match _flattened(given):
        case None:
            return ToolSelection("auto" if tools else "none", tools, is_parallel)
        case "none" | "auto" if given == "none" or not tools:
            return ToolSelection("none", tools)
        case "auto" | "required":
            selection = ToolSelection(given, tools, is_parallel)
        case {"type": "function" | "custom", "name": str(name)}:
            selection = ToolSelection("required", _select([name], tools, place), is_parallel=False)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = [_name_of(one, f"{place}.tools[{index}]") for index, one in enumerate(allowed)]
            selection = ToolSelection(mode, _select(names, tools, place), is_parallel)
        case _:
            message = f"{place} must be auto, none, required, a tool by its name, or allowed_tools with mode and tools"
            raise InvalidRequest(message, place)
    if not selection.tools and missing:
        kinds = ", ".join(dict.fromkeys(missing))
        raise UnsupportedParameter(f"{place} asks for tools of a kind that is not to be had here: {kinds}; send functions", place)
    if not selection.tools:
        raise InvalidRequest(f"{place} asks for tools, but there are none; send some in tools", place)
    return selection


def types(node: dict[str, Any]) -> list[str]:
    """Return the names in a schema's `type` keyword as a list; empty if there is none."""
    given = node.get("type")
    return [given] if isinstance(given, str) else [name for name in _list(given) if isinstance(name, str)]


def alternatives(node: dict[str, Any]) -> list[Any]:
    """Return the branches of a schema's anyOf, or of its oneOf if it has no anyOf; empty if it has neither."""
    return _list(node.get("anyOf", node.get("oneOf")))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _flattened(given: Any) -> Any:
    """Convert {"type": "x", "x": {…}} of Chat Completions to {"type": "x", …} of Responses; return other values unchanged."""
    match given:
        case {"type": str(kind)} if isinstance(given.get(kind), dict):
            return {**given, **given[kind], "type": kind}
    return given


def _read_function(function: dict[str, Any], place: str, schema_field: str) -> Tool:
    name, parameters, strict = _read_name(function, place), function.get("parameters"), function.get("strict")
    if strict not in (None, True, False):
        raise InvalidRequest(f"{place}.strict must be true or false", f"{place}.strict")
    where = f"{place}.{schema_field}"
    parameters = {"properties": {}, "additionalProperties": False} if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f'{where} must be a JSON Schema of type "object"', where)
    parameters = {"type": "object", **parameters}
    if len(levels_of(parameters)) > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
    if not strict and names_no_key(parameters):
        parameters["additionalProperties"] = False
    if strict:
        json_schema_grammar(parameters, True, where)
    return Tool(name, msgspec.json.encode(parameters).decode(), bool(strict), where)


def _read_custom(custom: dict[str, Any], place: str) -> Tool:
    name, where = _read_name(custom, place), f"{place}.format"
    if not isinstance(custom.get("description"), str | None):
        raise InvalidRequest(f"{place}.description must be a text", f"{place}.description")
    syntax, definition = _read_format(custom, where)
    grammar = {"lark": lark_grammar, "regex": regex_grammar}[syntax](definition, where) if syntax else None
    if syntax == "lark" and not START_RULE.search(definition):
        raise InvalidRequest(f"{where}: the grammar needs a rule that is called start", where)
    return Tool(name, msgspec.json.encode(_custom_parameters({})).decode(), place=where, is_custom=True, grammar=grammar)


def _read_format(custom: dict[str, Any], place: str) -> tuple[str, str]:
    """Return syntax ("lark" or "regex") and definition of a custom tool's grammar; two empty strings if any text is allowed."""
    match _flattened(custom.get("format")):
        case None | {"type": "text"}:
            return "", ""
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(definition)}:
            return syntax, definition
    shape = '{"type": "grammar", "grammar": {"syntax": "lark" or "regex", "definition": …}}'
    raise InvalidRequest(f'{place} must be {{"type": "text"}} or {shape}', place)


def _as_function(custom: dict[str, Any]) -> dict[str, Any]:
    syntax, definition = _read_format(custom, "format")
    parameters = _custom_parameters({"description": f"{syntax.capitalize()} it must follow:\n{definition}"} if syntax else {})
    description = {"description": custom["description"]} if custom.get("description") else {}
    return {"type": "function", "function": {"name": custom["name"], **description, "parameters": parameters}}


def _custom_parameters(more: dict[str, str]) -> dict[str, Any]:
    properties = {INPUT: {"type": "string", **more}}
    return {"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": False}


def _read_name(given: dict[str, Any], place: str) -> str:
    name, where = given.get("name"), f"{place}.name"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{where} {name!r} must be 1 to 128 letters, digits, underscores, hyphens or dots", where)
    return name


def _name_of(given: Any, place: str) -> str:
    match given:
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise InvalidRequest(f"{place} must name a tool", place)


def _select(names: list[str], tools: tuple[Tool, ...], place: str) -> tuple[Tool, ...]:
    known = [tool.name for tool in tools]
    if unknown := [name for name in names if name not in known]:
        message = f"{place} names the tool {unknown[0]!r}, which is not in tools ({', '.join(known[:8]) or 'none'})"
        raise InvalidRequest(message, place)
    return tuple(tool for tool in tools if tool.name in names)
