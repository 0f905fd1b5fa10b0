"""A pattern means the same in the answer as in the schema, or is refused: a letter that JSON can not hold is not left out."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from test_corpus import compiled, takes

from weft.errors import InvalidRequest
from weft.text.schema import json_schema_grammar
from weft.text.schema_patterns import UNWRITABLE, exact_regex

CONTROL = [chr(code) for code in range(0x80) if UNWRITABLE.fullmatch(chr(code))]
WRITABLE = [chr(code) for code in range(0x100) if not UNWRITABLE.fullmatch(chr(code)) and chr(code) not in r"\^$.|?*+()[]{}/-"]


def spellings(letter: str) -> list[str]:
    """The ways to write a letter in a regex."""
    code = ord(letter)
    named = {"\v": [r"\v"]}.get(letter, [])
    return [letter, f"\\x{code:02x}", f"\\u{code:04x}", f"\\u{{{code:x}}}", *named]


@pytest.mark.parametrize("letter", CONTROL, ids=lambda letter: f"{ord(letter):02x}")
@pytest.mark.parametrize("around", ["^{}$", "^a{}b$", "^{}\\[31m$", "^(a|{})b$", "^a{}?$", "^[{}]$", "x{}"])
def test_a_pattern_with_a_letter_that_json_can_not_hold_is_refused_by_name(letter: str, around: str) -> None:
    for spelt in spellings(letter):
        pattern = around.format(spelt)
        for schema, word in (
            ({"type": "string", "pattern": pattern}, "pattern"),
            ({"patternProperties": {pattern: True}}, "pattern"),
        ):
            with pytest.raises(InvalidRequest, match=f"s: {word}") as refusal:
                json_schema_grammar(schema, True, "s")
            assert refusal.value.param == "s"


@pytest.mark.parametrize("letter", CONTROL, ids=lambda letter: f"{ord(letter):02x}")
def test_without_strict_such_a_pattern_is_left_to_the_check(letter: str) -> None:
    for spelt in spellings(letter):
        matcher = compiled({"type": "string", "pattern": f"^a{spelt}b$"}, strict=False)

        assert takes(matcher, '"ab"')  # which `schema_validation` calls invalid


CLASSES = ["[^a-z]", ".", r"\s", r"\S", r"[\x1b!]", r"[\x01-\x1f!]", r"\D", r"\W", r"[^\x7f]", r"[^\n]", r"[^\w\s]"]
CLASSES += [
    '[^"]',
    r"[^\\]",
    r'[^"\\]',
    r'[^\\/:*?"<>|]',
    '[^-"]',
    '[^"-]',
    '[^"\n]',
    r'(?:[^"]|\\\\)',
    "[^!-/]",
    r"[^\x00-\x1f]",
]


@pytest.mark.parametrize("inner", CLASSES)
def test_a_class_has_the_letters_it_has_in_the_schema(inner: str) -> None:
    schema: Any = {"type": "string", "pattern": f"^a{inner}b$"}
    matcher, judge = compiled(schema), jsonschema_rs.validator_for(schema)

    for letter in (*map(chr, range(0x100)), "", "\\\\", "☃"):
        is_right = judge.is_valid(f"a{letter}b") and not UNWRITABLE.search(letter)
        assert takes(matcher, json.dumps(f"a{letter}b", ensure_ascii=False)) == is_right, repr(letter)


@pytest.mark.parametrize("inner", [r"[\x00-\x1f]", r"[\x00-\x1f!]", r"[\x00a]"])
def test_a_class_with_nul_is_refused(inner: str) -> None:
    with pytest.raises(InvalidRequest, match="pattern can not be enforced"):
        json_schema_grammar({"pattern": f"^a{inner}b$"}, True, "s")


def test_every_other_letter_is_taken_in_every_spelling() -> None:
    for letter in WRITABLE:
        for spelt in spellings(letter):
            assert exact_regex(f"^a{spelt}b$") is not None, spelt
        matcher = compiled({"type": "string", "pattern": f"^a{spellings(letter)[1]}b$"})
        assert takes(matcher, json.dumps(f"a{letter}b", ensure_ascii=False)), repr(letter)
