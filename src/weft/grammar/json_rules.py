"""Rewrites `%json` expressions whose schema has numbers under bounds: these get rules of weft's own, the rest stays llguidance's.

llguidance's numbers under a bound have no exponent, so 6.626e-34 would be written as 6.626. On the way from the schema's root to
such a number objects, lists, choices and references become Lark rules; all beside that way is `%json` as before. Where a schema
on the way says more than these rules do, it is left to llguidance as a whole, whose numbers are exact but plain.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from weft.grammar.number_rules import number_terminal

Node = dict[str, Any]

BOUNDS = {"minimum", "maximum"}
HAS_BOUNDS = re.compile(r'"(?:minimum|maximum)"')
PIECES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json )', re.DOTALL)
SETTINGS = "x-guidance"
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties")  # schemas by names, which may be those of keywords
REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
# Keywords that llguidance enforces. What is not among them says nothing here: strict schemas have none of them.
ENFORCED = {"$ref", "anyOf", "oneOf", "allOf", "const", "enum", "type", "items", "additionalItems", "prefixItems", "minItems"}
ENFORCED |= {"maxItems", "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
ENFORCED |= {"minLength", "maxLength", "pattern", "format", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", *BOUNDS}
TYPES = ["object", "array", "string", "number", "boolean", "null"]
COMPOSING = {"$ref", "anyOf", "oneOf", "allOf", "const", "enum"}
BEYOND = {  # what the rules of a type can not do
    "number": {"multipleOf", "exclusiveMinimum", "exclusiveMaximum"},
    "object": {"patternProperties", "minProperties", "maxProperties"},
    "array": {"prefixItems", "additionalItems"},
}
ANY_KEY = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'


def with_number_rules(schema: str, settings: Node) -> str:
    """Return a Lark grammar for a schema, given as JSON, that has bounded numbers and leads to them plainly; "" for any other."""
    if not HAS_BOUNDS.search(schema):
        return ""
    own = _Rules(json.loads(schema) | {SETTINGS: settings}, 0)
    return "\n".join(["%llguidance {}", f"start: {own.start}", *own.lines()]) if own.start else ""


def with_number_rules_within(grammar: str) -> str:
    """Return a Lark grammar in which `%json` expressions with bounded numbers are replaced by rules."""
    if not HAS_BOUNDS.search(grammar):
        return grammar
    written: list[str] = []
    rules: list[_Rules] = []
    end = 0
    while found := _next_json(grammar, end):
        schema, after = json.JSONDecoder().raw_decode(grammar, found.end())
        own = _Rules(schema, len(rules))  # numbered, for the names of its rules
        written += [grammar[end : found.start()], own.start or grammar[found.start() : after]]
        rules.append(own)
        end = after
    return "".join(written) + grammar[end:] + "".join(f"\n{line}" for one in rules if one.start for line in one.lines())


def _next_json(grammar: str, start: int) -> re.Match[str] | None:
    return next((found for found in PIECES.finditer(grammar, start) if found["json"]), None)


class _Unsupported(Exception):
    """A schema is left to llguidance."""


class _Rules:
    """The rules for one schema; `start` names the first, and is empty if the schema is left to llguidance."""

    def __init__(self, document: Node, number: int) -> None:
        self.document, self.number = document, number
        self.rules: dict[str, str] = {}
        self.start = ""
        self._known: dict[int | str, str] = {}  # rules by node or text
        self._bounded = _ways_to_numbers(document)
        if id(document) in self._bounded and SETTINGS in document:
            try:
                self.start = self.value(document)
            except _Unsupported:
                self.rules = {}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the rules."""
        blank = self.document[SETTINGS]["whitespace_pattern"]
        yield f"{self._blank}: /{blank}/"
        yield from (f"{name}: {body}" for name, body in self.rules.items())

    @property
    def _blank(self) -> str:
        return f"JSON_{self.number}_BLANK"

    def value(self, node: Any) -> str:
        """Return the name of a rule for a schema's values."""
        if not isinstance(node, dict) or id(node) not in self._bounded:
            return self._leaf(node)
        if id(node) not in self._known:
            self._known[id(node)] = name = self._rule("value", "")  # before its body, which may have it
            self.rules[name] = " | ".join(self._ways(node))
        return self._known[id(node)]

    def _ways(self, node: Node) -> Iterator[str]:
        for kind, inner in _forms(node):
            match kind:
                case "number":
                    yield from self._numbers(inner)
                case "object":
                    yield self._object(inner)
                case "array":
                    yield self._array(inner)
                case "choice":
                    yield from map(self.value, inner)
                case "$ref":
                    yield self.value(_resolve(self.document, inner))
                case _:
                    yield self._leaf(inner)

    def _numbers(self, node: Node) -> list[str]:
        low, high = (Decimal(repr(node[keyword])) if keyword in node else None for keyword in ("minimum", "maximum"))
        terminal = number_terminal(low, high)
        if terminal is None:
            raise _Unsupported
        if terminal not in self._known:
            self._known[terminal] = self._rule("NUMBER", terminal)
        return [self._known[terminal]]

    def _array(self, node: Node) -> str:
        low, high = node.get("minItems", 0), node.get("maxItems")
        if high is not None and high < max(low, 1):
            raise _Unsupported
        item, gap = self.value(node["items"]), f"{self._blank}?"
        more = f'({gap} "," {gap} {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f'"[" {gap} ({item} {more}){"" if low else "?"} {gap} "]"'

    def _object(self, node: Node) -> str:
        gap, names = f"{self._blank}?", node.get("properties", {})
        given = names | {name: node.get("additionalProperties", True) for name in node.get("required", ()) if name not in names}
        items = []
        for name, schema in given.items():
            is_required = name in node.get("required", ())
            if schema is False and is_required:
                raise _Unsupported
            if schema is not False:
                items.append(
                    (f'{_literal(json.dumps(name, ensure_ascii=False))} {gap} ":" {gap} {self.value(schema)}', is_required)
                )
        if (rest := node.get("additionalProperties", True)) is not False:
            item = f'{self._key(list(given))} {gap} ":" {gap} {self.value(rest)}'
            items.append((f'{item} ({gap} "," {gap} {item})*', False))
        return f'"{{" {gap} {self._sequence(items)} {gap} "}}"'

    def _sequence(self, items: list[tuple[str, bool]]) -> str:
        """Return the rule of comma-separated items in their order, of which some are required."""
        gap = f"{self._blank}?"
        behind = alone = self._rule("none", '""')  # the rest behind an item, and without one before
        for item, is_required in reversed(items):
            alone = self._rule("items", f"{item} {behind}" + ("" if is_required else f" | {alone}"))
            behind = self._rule("more", f'({gap} "," {gap} {item}){"" if is_required else "?"} {behind}')
        return alone

    def _key(self, names: list[str]) -> str:
        """Return a terminal of all keys but these."""
        taken = "|".join(map(_pattern, names))
        return self._rule("KEY", ANY_KEY + (f" & ~/({taken})/" if taken else ""))

    def _leaf(self, node: Any) -> str:
        """Return the rule of a schema that llguidance enforces, with the definitions that it needs."""
        node = {True: {}, False: None}.get(node) if isinstance(node, bool) else node
        if not isinstance(node, dict):
            raise _Unsupported
        whole: Node = {SETTINGS: self.document[SETTINGS]}
        whole |= {"$schema": self.document["$schema"]} if "$schema" in self.document else {}
        whole |= {keyword: value for keyword, value in node.items() if keyword not in (SETTINGS, *DEFINITIONS)}
        for place, name in _needed(self.document, node):
            whole.setdefault(place, {})[name] = self.document[place][name]
        text = json.dumps(whole)
        if text not in self._known:
            self._known[text] = self._rule("leaf", f"%json {text}")
        return self._known[text]

    def _rule(self, kind: str, body: str) -> str:
        prefix = "JSON" if kind.isupper() else "json"
        name = f"{prefix}_{self.number}_{kind}_{len(self.rules)}"
        self.rules[name] = body
        return name


def _forms(node: Node) -> list[tuple[str, Any]]:
    """Return what a schema is: number, object, array, a choice, a reference, or a leaf that llguidance enforces."""
    says = node.keys() & ENFORCED
    if says == {"$ref"}:
        return [("$ref", node["$ref"])]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if says == {keyword} and (keyword != "allOf" or len(node[keyword]) == 1):
            return [("choice", node[keyword])]
    kinds = node.get("type", TYPES if "properties" in node else [])
    listed = [kinds] if isinstance(kinds, str) else kinds
    for kind, beyond in BEYOND.items():
        if kind in listed and not says & (COMPOSING | beyond) and _is_supported(kind, node):
            rest = [other for other in listed if other != kind and (kind, other) != ("number", "integer")]
            return [(kind, node), *([("leaf", {**node, "type": rest})] if rest else [])]
    return [("leaf", node)]


def _is_supported(kind: str, node: Node) -> bool:
    if kind == "number":
        return bool(node.keys() & BOUNDS) and not any(isinstance(node.get(keyword), bool) for keyword in BOUNDS)
    return (
        "items" in node and isinstance(node["items"], dict) if kind == "array" else isinstance(node.get("properties", {}), dict)
    )


def _inner(document: Node, node: Node) -> Iterator[Any]:
    """Yield the schemas that a rule for this one would refer to."""
    for kind, inner in _forms(node):
        match kind:
            case "object":
                yield from inner.get("properties", {}).values()
                yield inner.get("additionalProperties")
            case "array":
                yield inner["items"]
            case "choice":
                yield from inner
            case "$ref":
                yield _resolve(document, inner)


def _ways_to_numbers(document: Node) -> set[int]:
    """Return the ids of the schemas from which a bounded number is reached; none if a reference leads elsewhere than to $defs."""
    nodes: dict[int, Node] = {}
    above: dict[int, list[int]] = {}
    rest: list[Any] = [document]
    try:
        while rest:
            node = rest.pop()
            if isinstance(node, dict) and id(node) not in nodes:
                nodes[id(node)] = node
                inner = [one for one in _inner(document, node) if isinstance(one, dict)]
                for one in inner:
                    above.setdefault(id(one), []).append(id(node))
                rest += inner
    except _Unsupported:
        return set()
    todo = [key for key, node in nodes.items() if _forms(node)[0][0] == "number"]
    found: set[int] = set()
    while todo:
        key = todo.pop()
        if key not in found:
            found.add(key)
            todo += above.get(key, [])
    return found


def _resolve(document: Node, reference: str) -> Any:
    match = REFERENCE.fullmatch(reference)
    if match is None or match[2] not in document.get(match[1], {}):
        raise _Unsupported
    return document[match[1]][match[2]]


def _needed(document: Node, node: Any) -> list[tuple[str, str]]:
    """List the definitions that a schema refers to, and those that these refer to. Raises _Unsupported for other references."""
    found: list[tuple[str, str]] = []
    rest = [node]
    while rest:
        value = rest.pop()
        if isinstance(value, dict) and isinstance(reference := value.get("$ref"), str):
            _resolve(document, reference)
            match = REFERENCE.fullmatch(reference)
            if match is not None and (match[1], match[2]) not in found:
                found.append((match[1], match[2]))
                rest.append(document[match[1]][match[2]])
        if isinstance(value, dict):
            rest += [inner for keyword, inner in value.items() if keyword not in (*NAMED, "const", "enum", *DEFINITIONS)]
            rest += [inner for keyword in NAMED if isinstance(value.get(keyword), dict) for inner in value[keyword].values()]
        elif isinstance(value, list):
            rest += value
    return found


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(name: str) -> str:
    """Return a regex of a key as JSON writes it."""
    return "".join(one if one.isalnum() else f"\\x{{{ord(one):x}}}" for one in json.dumps(name, ensure_ascii=False))
