"""Grammars near llguidance's limits: what is accepted can be answered, and what can not be answered is refused at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schemas import FORMATS, opened, record, string
from test_corpus import COMPILER, compiled

from weft.errors import GrammarRejected, RowFailed
from weft.grammar.constraint import Constraint, Masks, Matcher

RANGES = "".join(f"{chr(first)}-{chr(first + 3)}" for first in range(0x100, 0x2E0, 8))
LONG_CLASSES = ["^[a-zA-Z0-9_.-]{1,200}$", f"^[a-z{RANGES}]{{1,100}}$", "^[^/]{1,255}$", "^.{1,500}$", "^.{1,1000}$"]
TOO_LONG = "^.{1,5000}$"
EXAMPLES = {
    "date": "2024-02-29",
    "time": "12:30:00Z",
    "date-time": "2024-02-29T12:30:00Z",
    "duration": "P1DT2H",
    "email": "some.body@example.org",
    "hostname": "www.example.org",
    "ipv4": "192.168.0.1",
    "ipv6": "2001:db8::1",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "uri": "https://example.org/a?b=c",
}


def after(first: dict[str, Any], pattern: str, value: Any) -> Any:
    """An object with keys of a pattern, behind other properties."""
    return record({**first, "keyed": opened(patternProperties={pattern: value})})


def write(matcher: Matcher, text: str) -> None:
    """Take a text as the engine does: each token after its mask."""
    for token in COMPILER.tokenizer.tokenize_str(text):
        mask = matcher.mask()
        assert not matcher.error
        assert mask[token], COMPILER.tokenizer.decode_bytes([token])
        matcher.accept(token)


@pytest.mark.parametrize("pattern", LONG_CLASSES, ids=lambda pattern: pattern[:30])
def test_keys_of_a_long_class_can_be_written_beside_values_of_any_format(pattern: str) -> None:
    assert EXAMPLES.keys() == set(FORMATS)
    for name, value in EXAMPLES.items():
        matcher = compiled(after({"id": string(maxLength=20)}, pattern, string(format=name)))

        write(matcher, json.dumps({"id": "some", "keyed": {"thefirstkey": value, "k": value}}))

        assert matcher.is_finished


@pytest.mark.parametrize("count", [0, 1, 5])
def test_keys_beyond_the_limits_are_refused_when_compiled_also_behind_other_properties(count: int) -> None:
    first = {f"part{index}": string(maxLength=20) for index in range(count)}

    with pytest.raises(GrammarRejected, match=r"too many expressions.*use smaller counts") as refusal:
        compiled(after(first, TOO_LONG, string(format="date-time")))

    assert "verbose" not in str(refusal.value)


def test_a_limit_that_is_reached_amid_an_answer_says_what_to_change() -> None:
    text = "a long text, behind which no trial comes; " * 10
    matcher = compiled(after({"text": {"const": text}}, TOO_LONG, string()))
    write(matcher, json.dumps({"text": text, "keyed": {}})[:-2])
    quote = COMPILER.tokenizer.tokenize_str('"')[0]
    matcher.accept(quote)

    _, errors = Masks(COMPILER.vocab_size).fill([Constraint(matcher, None).demand(())])
    assert "use smaller counts" in errors[0]
    with pytest.raises(RowFailed, match=r"the grammar can not go on.*too many expressions.*use smaller counts"):
        matcher.accept(quote)
