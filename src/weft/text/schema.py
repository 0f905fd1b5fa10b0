"""What an answer must look like: schemas, patterns, choices and grammars become `GrammarSpec`s, and answers are checked.

Raises InvalidRequest naming the place that can not be honoured; what a schema may ask for is `enforcement`'s business. Knows
no wire, no token and no grammar engine: the wires make specs here, the service checks answers.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.enforcement import MAX_TEXT, MAX_WORDS, examined, path_of, validator

MAX_BYTES = 2**19  # of a schema or a list of choices; programs send a tenth of it
MAX_ERRORS = 5


def json_schema_grammar(schema: Any, strict: bool, place: str) -> GrammarSpec:
    """An answer that is JSON and fits this schema, which may come as text."""
    if isinstance(schema, str):
        schema = _parsed(schema, place)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{place} must be a JSON Schema: an object, or true", place)
    if schema is False:
        raise InvalidRequest(f"{place} is false, which no answer fits", place)
    enforced, problem = examined(_encoded({} if schema is True else schema, place), strict)
    if problem is not None:
        path, words = problem
        raise InvalidRequest(f"{place}{path}: {words}", place + path)
    return GrammarSpec("json_schema", enforced, lenient=not strict)


def regex_grammar(pattern: str, place: str) -> GrammarSpec:
    """An answer that is one match from end to end."""
    return GrammarSpec("regex", _bounded(pattern, place, MAX_TEXT))


def choice_grammar(choices: list[str], place: str) -> GrammarSpec:
    """One of several texts."""
    if len(set(choices)) < len(choices):
        raise InvalidRequest(f"{place} has a text twice", place)
    for index, text in enumerate(choices):
        _bounded(text, f"{place}[{index}]", MAX_TEXT)
    return GrammarSpec("choice", _encoded(choices, place))


def lark_grammar(text: str, place: str) -> GrammarSpec:
    """A sentence of a grammar in Lark's or GBNF's notation."""
    if "%json" in text:  # it would get past `json_schema`
        raise InvalidRequest(f"{place}: %json is not taken within a grammar; ask for a schema instead", place)
    return GrammarSpec("lark", _bounded(text, place, MAX_TEXT))


def structural_tag_grammar(tag: dict[str, Any] | str, place: str) -> GrammarSpec:
    """Free text in which certain words are followed by JSON; its schemas are strict ones."""
    value = _parsed(tag, place) if isinstance(tag, str) else tag
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be an object", place)
    return GrammarSpec("structural_tag", _encoded(_tagged(value, place), place))


class SchemaCheck:
    """Tells where answers leave a schema that was not strict."""

    def __init__(self, spec: GrammarSpec) -> None:
        self._validator = validator(spec.text)

    def errors(self, text: str) -> tuple[str, ...]:
        """Up to five places and what is wrong there; none for an answer that fits."""
        try:
            answer = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            is_cut = "truncated" in str(error)
            return ("the answer was cut before it was complete" if is_cut else f"the answer is not valid JSON: {error}",)
        found = islice(self._validator.iter_errors(answer), MAX_ERRORS)
        return tuple(f"${path_of(error.instance_path)}: {error.message[:MAX_WORDS]}" for error in found)


def _tagged(value: Any, place: str) -> Any:
    """A structural tag with its schemas made ready."""
    match value:
        case list():
            return [_tagged(item, f"{place}[{index}]") for index, item in enumerate(value)]
        case dict():
            return {
                name: msgspec.Raw(json_schema_grammar(item, True, f"{place}.{name}").text)
                if name in ("schema", "json_schema")
                else _tagged(item, f"{place}.{name}")
                for name, item in value.items()
            }
    return value


def _parsed(text: str, place: str) -> Any:
    try:
        return msgspec.json.decode(_bounded(text, place))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not valid JSON: {error}", place) from None


def _encoded(value: Any, place: str) -> str:
    return _bounded(msgspec.json.encode(value).decode(), place)


def _bounded(text: str, place: str, most: int = MAX_BYTES) -> str:
    if (size := len(text.encode())) > most:
        raise InvalidRequest(f"{place} has {size} bytes; at most {most} are taken", place)
    return text
