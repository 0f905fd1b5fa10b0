"""A tool as readers and grammars of calls need it: its name, and which of its arguments are texts.

Knows JSON Schema only that far; what of a schema can be enforced is `enforcement`'s business, and `choice` makes tools from
what clients send.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from weft.ipc.messages import GrammarSpec

Kind = Literal["text", "nullable", "json"]

# What a strict text may be held to besides a list of choices.
ASSERTING = {"pattern", "format", "minLength", "maxLength", "allOf", "not", "contentEncoding", "contentMediaType"}
MAX_STEPS = 16  # of references to references


@dataclass(frozen=True)
class Tool:
    """A function that may be called. A custom one takes a text, its `input`."""

    name: str
    schema: str  # of its arguments, as JSON text
    strict: bool = False
    place: str = field(default="tools", compare=False)  # of the schema in the request
    is_custom: bool = False
    grammar: GrammarSpec | None = None  # what a custom one's text must be

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The schema of its arguments."""
        parameters: dict[str, Any] = msgspec.json.decode(self.schema)
        return parameters

    @cached_property
    def required(self) -> frozenset[str]:
        """The arguments that must be there."""
        return frozenset(name for name in _list(self.parameters.get("required")) if isinstance(name, str))

    @cached_property
    def properties(self) -> dict[str, Any]:
        """Schemas of the arguments that have a name, in their order."""
        given = self.parameters.get("properties")
        named: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
        return named | {name: {} for name in sorted(self.required - named.keys())}

    @cached_property
    def _known(self) -> dict[bytes, tuple[set[str], list[Any] | None]]:
        return {}

    @property
    def is_open(self) -> bool:
        """Whether a call may have arguments without a name here: only where the schema says so, or says nothing at all."""
        return bool(self.parameters.get("additionalProperties", not self.properties))

    def schema_of(self, key: str) -> Any:
        """What an argument must be."""
        return self.properties.get(key, self.parameters.get("additionalProperties", {}))

    def resolved(self, schema: Any) -> dict[str, Any]:
        """A schema that is not a reference; {} for what is none or leads nowhere."""
        for _ in range(MAX_STEPS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._named(str(schema["$ref"]))
        return schema if isinstance(schema, dict) and "$ref" not in schema else {}

    def kind_of(self, schema: Any) -> Kind:
        """How a value is written where texts stand as they are: a text, a text or null, or JSON.

        Under strict a text that must have a certain form is written as JSON: only so the engine can hold it to that.
        """
        kinds = self._facts(schema)[0]
        return "text" if kinds == {"text"} else "nullable" if kinds == {"text", "null"} else "json"

    def choices(self, schema: Any) -> list[Any] | None:
        """The values it must be one of; None where there is no such list."""
        return self._facts(schema)[1]

    def _facts(self, schema: Any) -> tuple[set[str], list[Any] | None]:
        """Kinds of values, and the values themselves where they are listed. Worked out once for each schema."""
        node = self.resolved(schema)
        text = msgspec.json.encode(node)
        if text not in self._known:
            self._known[text] = {"json"}, None  # what it is to itself, if it refers to itself
            self._known[text] = self._worked_out(node)
        return self._known[text]

    def _worked_out(self, node: dict[str, Any]) -> tuple[set[str], list[Any] | None]:
        if "const" in node or "enum" in node:
            values = [node["const"]] if "const" in node else _list(node["enum"])
            return {"text" if isinstance(value, str) else "null" if value is None else "json" for value in values}, values
        if branches := [self._facts(branch) for branch in alternatives(node)]:
            lists = [values for _, values in branches if values is not None]
            listed = [value for values in lists for value in values] if len(lists) == len(branches) else None
            return set().union(*(kinds for kinds, _ in branches)), listed
        if self.strict and node.keys() & ASSERTING:
            return {"json"}, None
        kinds = {{"string": "text", "null": "null"}.get(name, "json") for name in types(node)}
        return kinds, [None] if kinds == {"null"} else None

    def _named(self, reference: str) -> Any:
        node: Any = self.parameters if reference.startswith("#") else None
        for step in reference.split("/")[1:]:
            node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node


def types(node: dict[str, Any]) -> list[str]:
    """The types a value may have, as far as the schema names them."""
    given = node.get("type")
    return [given] if isinstance(given, str) else [name for name in _list(given) if isinstance(name, str)]


def alternatives(node: dict[str, Any]) -> list[Any]:
    """The schemas of which a value must fit one."""
    return _list(node.get("anyOf", node.get("oneOf")))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
