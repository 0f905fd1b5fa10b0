"""The constants of a grammar: texts that an answer may have to contain, for models whose vocabulary lacks some letters."""

import json
import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from weft.grammar.gbnf import to_lark
from weft.ipc.messages import GrammarSpec

IN_QUOTES = re.compile(r'"(?:[^"\\]|\\.)*"')
IN_SLASHES = re.compile(r"/((?:[^/\\\n]|\\.)+)/")


def constants_of(spec: GrammarSpec) -> Iterator[str]:
    """Yield the constants of a choice, schema, regex or client's own grammar; of what Python can not read none."""
    match spec.kind:
        case "choice":
            yield from json.loads(spec.text)
        case "json_schema":
            yield from _of_schema(json.loads(spec.text))
        case "regex":
            yield from _of_regex(spec.text)
        case "lark" if not spec.is_ours:
            yield from _of_lark(to_lark(spec.text))


def _of_schema(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (json.dumps(schema[word], ensure_ascii=False) for word in ("const", "enum") if word in schema)
        yield from schema.get("properties", {})
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _of_schema(inner)


def _of_lark(grammar: str) -> Iterator[str]:
    for found in IN_QUOTES.finditer(grammar):
        try:
            yield json.loads(found[0])
        except ValueError:  # an escape that JSON lacks
            continue
    for found in IN_SLASHES.finditer(IN_QUOTES.sub("", grammar)):
        yield from _of_regex(found[1])


def _of_regex(pattern: str) -> Iterator[str]:
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError):
        return
    yield from _letters(parsed)


def _letters(node: Any) -> Iterator[str]:
    """Yield the letters that a parsed regex names outside of classes, of which an answer can take another letter."""
    if isinstance(node, tuple) and len(node) == 2 and node[0] is _constants.LITERAL:
        yield chr(node[1])
    elif isinstance(node, tuple) and node and node[0] is _constants.IN:
        return
    elif isinstance(node, list | tuple | _parser.SubPattern):
        for inner in node:
            yield from _letters(inner)
