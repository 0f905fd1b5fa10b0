"""Lark for the values of arguments as Python prints them: True, None, {'key': ['text', 1]}.

Chat templates that print values without a filter write them so, and models write what their templates showed them.
"""

import json
from collections.abc import Callable
from typing import Any

from weft.text.tools.custom_tools import quoted
from weft.text.tools.tool import Tool, alternatives, types

KINDS = ("string", "number", "boolean", "null", "array", "object")
ENFORCED = {"type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "anyOf", "oneOf", "enum"}
ENFORCED |= {"const", "title", "description", "default", "examples", "$defs", "definitions"}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ESCAPE = r"""\\(['"\\nrt]|x[0-9a-f]{2}|u([0-9a-ce-f][0-9a-f]{3}|d[0-7][0-9a-f]{2})|U0001[0-9a-f]{4})"""
# Some templates put quotes around a text and escape nothing in it: an apostrophe before a letter ends no text.
TEXT = rf"""/'([^'\\]|'[A-Za-z0-9À-ɏ]|{ESCAPE})*'|"([^"\\]|{ESCAPE})*"/"""
KEY = r"""/'[^'\\\n]{1,64}'/"""
COMMA, COLON = '"," " "?', '":" " "?'


class NotWritable(Exception):
    """A strict schema has a keyword that can not be enforced in Python's notation."""


class PythonValues:
    """Builds expressions for one tool's values; adds the rules that they use to a grammar."""

    def __init__(self, tool: Tool, rules: dict[str, str], number: Callable[[dict[str, Any]], str]) -> None:
        self._tool, self._rules, self._number = tool, rules, number
        self._known: dict[str, str] = {}  # rules by schemas

    def value(self, schema: Any) -> str:
        """Return an expression for a value that fits the schema. Raises NotWritable."""
        node = self._tool.resolve(schema)
        known_as = json.dumps(node)
        if known_as not in self._known:
            bounds = BOUNDS if {"integer", "number"} & {*types(node)} else ()
            if schema is False or (self._tool.strict and node.keys() - ENFORCED.union(bounds)):
                raise NotWritable
            name = self._known[known_as] = self._add("python", "")  # before its body: it may refer to itself
            self._rules[name] = " | ".join(self._forms(node))
        return self._known[known_as]

    def _forms(self, node: dict[str, Any]) -> list[str]:
        if choices := self._tool.choices(node):
            return [quoted(repr(one)) for one in choices]
        if branches := alternatives(node):
            return [self.value(branch) for branch in branches]
        return [self._typed(kind, node) for kind in types(node) or KINDS]

    def _typed(self, kind: str, node: dict[str, Any]) -> str:
        match kind:
            case "string":
                self._rules["PYTHON_TEXT"] = TEXT
                return "PYTHON_TEXT"
            case "boolean":
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "array":
                return f'"[" {self._items(node)} "]"'
            case "object":
                return f'"{{" {self._members(node)} "}}"'
            case _:
                return self._number({"type": kind, **{word: node[word] for word in BOUNDS if word in node}})

    def _items(self, node: dict[str, Any]) -> str:
        item = self.value(node.get("items", {}))
        low, high = (int(count) if isinstance(count := node.get(word), int) else 0 for word in ("minItems", "maxItems"))
        more = f"({COMMA} {item}){{{max(0, low - 1)},{high - 1 if high else ''}}}"
        return f"({item} {more}){'' if low else '?'}"

    def _members(self, node: dict[str, Any]) -> str:
        inner = Tool(self._tool.name, json.dumps(node))
        parts = []
        for key, schema in inner.properties.items():
            if schema is not False:
                pair = f"{quoted(repr(key))} {COLON} {self.value(schema)}"
                parts.append((self._add("pair", pair), "" if key in inner.required else "?"))
        if inner.is_open:
            known = " | ".join(quoted(repr(key)) for key in inner.properties)
            key = self._add("KEY", KEY + (f" & ~({known})" if known else ""))
            parts.append((self._add("pair", f"{key} {COLON} {self.value(inner.schema_of(''))}"), "*"))
        return in_order(parts, COMMA)

    def _add(self, kind: str, body: str) -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules[name] = body
        return name


def in_order(parts: list[tuple[str, str]], comma: str) -> str:
    """Return an expression for parts with commas between them; each may be missing ("?"), repeated ("*"), or must come ("")."""
    starts = []
    for index, (part, repeat) in enumerate(parts):
        more = f"({comma} {part})*" if repeat == "*" else ""
        rest = (f"({comma} {other}){often}" for other, often in parts[index + 1 :])
        starts.append(" ".join([part, more, *rest]))
        if not repeat:  # this one must come, so it or one of those before it begins
            return f"({' | '.join(starts)})"
    return f"({' | '.join(starts)})?" if starts else ""
