"""The constants of a grammar: texts that an answer may have to contain, for models whose vocabulary lacks some letters."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from weft.grammar.gbnf import to_lark
from weft.ipc.messages import GrammarSpec

JSON = re.compile(r"%json (?=\{)")
TERMINALS = re.compile(r'(?P<text>"(?:[^"\\]|\\.)*")|/(?P<pattern>(?:[^/\\\n]|\\.)+)/')


def constants_of(spec: GrammarSpec) -> Iterator[str]:
    """Yield the constants of a choice, schema, regex or grammar; of what Python can not read none."""
    match spec.kind:
        case "choice":
            yield from json.loads(spec.text)
        case "json_schema":
            yield from _of_schema(json.loads(spec.text))
        case "regex":
            yield from _of_regex(spec.text)
        case "lark" if spec.is_ours:  # texts in quotes are marks and names there, and marks have tokens of their own
            yield from _of_calls(spec.text)
        case "lark":
            yield from _of_lark(to_lark(spec.text))


def _of_schema(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (json.dumps(schema[word], ensure_ascii=False) for word in ("const", "enum") if word in schema)
        yield from _of_regex(schema["pattern"]) if isinstance(schema.get("pattern"), str) else ()
        yield from schema.get("properties", {})
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _of_schema(inner)


def _of_lark(grammar: str) -> Iterator[str]:
    for found in TERMINALS.finditer(grammar):
        if found["pattern"] is not None:
            yield from _of_regex(found["pattern"])
        else:
            with suppress(ValueError):  # an escape that JSON lacks
                yield json.loads(found["text"])


def _of_calls(grammar: str) -> Iterator[str]:
    rest, end = [], 0
    for found in JSON.finditer(grammar):
        if found.start() >= end:
            schema, after = json.JSONDecoder().raw_decode(grammar, found.end())
            yield from _of_schema(schema)
            rest.append(grammar[end : found.start()])
            end = after
    for found in TERMINALS.finditer("".join([*rest, grammar[end:]])):
        yield from _of_regex(found["pattern"] or "")


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
    elif isinstance(node, tuple) and node and (node[0] is _constants.IN or _is_optional_letter(node)):
        return
    elif isinstance(node, list | tuple | _parser.SubPattern):
        for inner in node:
            yield from _letters(inner)


def _is_optional_letter(node: tuple[Any, ...]) -> bool:
    """Whether a parsed regex is one letter that may be missing: without a token for it, nothing is cut."""
    if node[0] not in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        return False
    least, _, inner = node[1]
    return least == 0 and len(inner) == 1 and inner[0][0] is _constants.LITERAL
