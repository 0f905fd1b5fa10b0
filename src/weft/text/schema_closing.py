"""Closes the objects of a JSON Schema as people send it: where `properties` is given, no other keys, unless it says otherwise.

JSON Schema lets any key come there, and a model that may write another one often does, to the end of its answer. An object that
allOf, anyOf, oneOf, $ref or if composes is closed as a whole: its parts closed one by one would exclude each other's keys. Where
a choice or a reference is all that a schema says, each branch is an object of its own.
"""

import copy
import re
from collections.abc import Callable, Iterator
from itertools import combinations, takewhile
from typing import Any

Node = dict[str, Any]
Resolve = Callable[[Any], Any]  # what a $ref names; None if nothing

COMPOSING = ("allOf", "anyOf", "oneOf")  # of schemas in a list, for the same object
BRANCHING = ("then", "else")  # of a schema each, for the same object
CONDITIONAL = ("if", *BRANCHING)
NAMING = {"properties", "patternProperties", "required"}
STATING = {"additionalProperties", "unevaluatedProperties"}  # what is said of other keys
UNKNOWN = {"$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies"}  # parts that are not followed
# With one of these a node is more than a choice between its branches.
SHAPING = {*NAMING, *STATING, *UNKNOWN, "if", "minProperties", "maxProperties", "dependentRequired"}
# The first letter of a pattern's match, as a letter or a class.
FIRST = re.compile(r"[\w-](?![?*{])|\[[\w-]+\](?![?*{])", re.ASCII)
LETTERS = "".join(map(chr, range(128)))
MAX_PATTERNS = 64  # of several parts together: each is compared with each
# With one of these an empty `properties` is not all that is said of an object's keys.
SPEAKING = SHAPING - {"properties", "required"} | {*COMPOSING, "$ref", "propertyNames", "not", "const", "enum"}
MAX_COPIED = 10_000  # values within definitions that are both an object of their own and part of another


def close_objects(document: Node, resolve: Resolve) -> None:
    """Add `additionalProperties: false` to each object of the document that names properties and says nothing of others."""
    room = MAX_COPIED
    while True:
        wholes = list(_wholes(document, resolve))
        copied = _separate(wholes, resolve, room)
        if not copied:
            break
        room -= copied
    shared = {id(part) for node, parts in wholes for part in parts if part is not node}
    closings = [(node, _closing(node, parts)) for node, parts in wholes if id(node) not in shared]
    for node, closing in closings:
        node |= closing


def names_no_key(node: Node) -> bool:
    """Whether a schema lists an object's keys and lists none, as programs write that it has none."""
    return node.get("properties") == {} and not node.get("required") and not node.keys() & SPEAKING


def _wholes(document: Node, resolve: Resolve) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each schema that describes a value of its own, with all schemas that describe the same value, itself first.

    A node that only chooses between schemas, or names one, is none itself: each of those is.
    """
    seen: set[int] = set()
    found: list[Any] = [document]
    for node in found:  # grows while it is walked
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        if (branches := _branches(node, resolve)) is not None:
            found += branches
            continue
        yield node, _parts(node, resolve, CONDITIONAL)
        found += [child for part in _parts(node, resolve, BRANCHING) for child in _values(part)]  # a condition stays as it is


def _branches(node: Node, resolve: Resolve) -> list[Any] | None:
    """Return the schemas between which a node chooses, if that is all it does; None if it is more."""
    steps = [keyword for keyword in ("$ref", *COMPOSING) if keyword in node]
    if len(steps) != 1 or node.keys() & SHAPING:
        return None
    if steps == ["$ref"]:
        return [resolve(node["$ref"])]
    branches = list(node[steps[0]])
    return branches if steps != ["allOf"] or len(branches) == 1 else None


def _parts(node: Node, resolve: Resolve, branching: tuple[str, ...]) -> list[Node]:
    """Return the node and all schemas that it composes, in the order in which they are written."""
    parts: list[Node] = []
    rest: list[Any] = [node]
    while rest:
        part = rest.pop()
        if isinstance(part, dict) and all(part is not one for one in parts):
            parts.append(part)
            inner = [resolve(part["$ref"])] if "$ref" in part else []
            inner += [branch for keyword in COMPOSING for branch in part.get(keyword, ())]
            rest += reversed([*inner, *(part[keyword] for keyword in branching if keyword in part)])
    return parts


def _values(part: Node) -> Iterator[Any]:
    """Yield the schemas of what is in a value: of its properties and items."""
    for keyword in ("properties", "patternProperties"):
        yield from part.get(keyword, {}).values()
    for keyword in ("items", "prefixItems", "additionalItems", "additionalProperties", "unevaluatedProperties"):
        given = part.get(keyword)
        yield from given if isinstance(given, list) else [given]


def _separate(wholes: list[tuple[Node, list[Node]]], resolve: Resolve, room: int) -> int:
    """Copy definitions that are closed by themselves into the objects of which they are part too, at most `room` values.

    Returns how many values were copied.
    """
    alone = {id(node) for node, parts in wholes if _closing(node, parts)}
    copied = 0
    for node, parts in wholes:
        for part in parts:
            target = resolve(part["$ref"]) if "$ref" in part else None
            if isinstance(target, dict) and target is not node and id(target) in alone:
                size = _size(target)
                if copied + size > room:
                    return copied
                copied += size
                del part["$ref"]
                part["allOf"] = [copy.deepcopy(target), *part.get("allOf", ())]
    return copied


def _size(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _closing(node: Node, parts: list[Node]) -> Node:
    """Return the keywords that close a node as a whole; {} if it names no property, or is to stay open."""
    says = [part for part in parts if part.keys() & STATING]
    is_closed = node.get("unevaluatedProperties") is False and says == [node] and "additionalProperties" not in node
    if any(part.keys() & UNKNOWN for part in parts) or (says and not is_closed):
        return {}
    keywords = list(node)
    if {"allOf", "properties"} <= node.keys() and keywords.index("allOf") < keywords.index("properties"):
        parts = [*parts[1:], node]
    named = [name for part in parts for keyword in ("properties", "required") for name in part.get(keyword, ())]
    own = node.get("properties", {})
    if not any(part.get("properties") for part in parts):
        return {}
    patterns = {name: True for part in parts for name in part.get("patternProperties", {})} | node.get("patternProperties", {})
    if any(patterns.keys() - part.get("patternProperties", {}).keys() for part in parts) and not _are_disjoint([*patterns]):
        return {}
    closing: Node = {"properties": {name: own.get(name, True) for name in named}, "additionalProperties": False}
    return closing | ({"patternProperties": patterns} if patterns else {})


def _are_disjoint(patterns: list[str]) -> bool:
    """Whether no key provably matches two of the patterns; llguidance refuses an object where one does."""
    return len(patterns) <= MAX_PATTERNS and all(_differ(one, other) for one, other in combinations(patterns, 2))


def _differ(one: str, other: str) -> bool:
    """Whether two patterns without alternatives begin alike and go on with different letters."""
    alike = "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    common = re.match(r"\^[\w-]*", alike, re.ASCII)
    if common is None or "|" in one + other:
        return False
    firsts = [FIRST.match(pattern, common.end()) for pattern in (one, other)]
    letters = [set(re.findall(first[0], LETTERS)) for first in firsts if first]
    return len(letters) == 2 and not letters[0] & letters[1]
