"""Writes calls in a family's format, for the histories of models whose chat template leaves calls out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.text.normalise import CallSpelling
from weft.text.tools.arguments import Pairs
from weft.text.tools.families import Family

PYTHON_WORDS = {True: "True", False: "False", None: "None"}


def spelling_of(family: Family) -> CallSpelling | None:
    """Return how a family writes calls; None for families whose own templates write them in other notations than these."""
    if family.is_harmony or not (family.notation is None or _is_python(family)):
        return None
    return CallSpelling(lambda functions: _write(family, functions), family.between is not None)


def _is_python(family: Family) -> bool:
    return isinstance(family.notation, Pairs) and family.notation.assign == "="


def _write(family: Family, functions: Sequence[Mapping[str, Any]]) -> str:
    calls = (_write_call(family, function, number) for number, function in enumerate(functions))
    return family.begin.replace(" [", "[") + (family.between or "").join(calls) + family.end


def _write_call(family: Family, function: Mapping[str, Any], number: int) -> str:
    given = function["arguments"]
    pairs = ", ".join(f"{key}={_python(value)}" for key, value in given.items())
    arguments = pairs if _is_python(family) else json.dumps(given, ensure_ascii=False)
    head = family.head.replace("⟨name⟩", function["name"]).replace("⟨id⟩", str(number))
    return head + arguments + family.tail.replace("⟨id⟩", str(number))


def _python(value: Any) -> str:
    """Return a value as a Python literal, with texts in JSON's quotes."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_python(key)}: {_python(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_python, value)) + "]"
        case bool() | None:
            return PYTHON_WORDS[value]
    return json.dumps(value, ensure_ascii=False)
