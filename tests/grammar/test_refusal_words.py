"""What can not be enforced is refused in sentences that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_corpus import COMPILER

from weft.errors import GrammarRejected
from weft.ipc.messages import GrammarSpec

LOOP = {"$ref": "#/$defs/A", "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}}


def refusal(kind: Any, text: str) -> str:
    with pytest.raises(GrammarRejected) as found:
        COMPILER.compile(GrammarSpec(kind, text))
    return str(found.value)


def tag(*structures: dict[str, Any], triggers: tuple[str, ...] = ("<f", "<g")) -> str:
    return json.dumps({"structures": structures, "triggers": triggers})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps(LOOP)),
        ("regex", "[a&&b]"),
        ("regex", r"[^\s\S]"),
        ("lark", r"start: /[^\s\S]/"),
        ("lark", r"root ::= [^\x00-\U0010ffff]"),
    ],
)
def test_a_constraint_that_no_text_matches_is_refused_with_a_sentence(kind: str, text: str) -> None:
    words = refusal(kind, text)

    assert words.startswith(f"the {kind} can not be enforced: no text matches it")
    assert "change that part" in words
    assert "Bias" not in words


@pytest.mark.parametrize("place", range(3))
def test_a_tag_whose_begin_has_no_trigger_is_named(place: int) -> None:
    known = [{"begin": f"<{'fg'[index % 2]}{index}>", "schema": {}, "end": "</>"} for index in range(2)]
    words = refusal("structural_tag", tag(*known[:place], {"begin": "<other>", "schema": {}, "end": "</>"}, *known[place:]))

    assert f'structures[{place}].begin "<other>" begins with none of the triggers ["<f", "<g"]; add one' in words


@pytest.mark.parametrize("missing", ["begin", "schema", "end"])
def test_a_tag_that_lacks_a_part_is_told_which(missing: str) -> None:
    one = {"begin": "<f>", "schema": {}, "end": "</f>"}
    words = refusal("structural_tag", tag(one, {name: part for name, part in one.items() if name != missing}))

    assert f"structures[1] has no {missing}; each has a begin, a schema and an end" in words
