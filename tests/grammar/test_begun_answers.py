"""A constraint holds for the answer as a whole: what the last message begins, and what the model goes on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_corpus import COMPILER, END, compiled, takes, walk

import weft.model
from weft.api.anthropic import request as messages
from weft.api.openai import chat
from weft.errors import GrammarRejected
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.text.codec import Codec
from weft.text.schema import choice_grammar, json_schema_grammar, regex_grammar
from weft.text.types import GenerationRequest

CODEC = Codec(Path(weft.model.__file__).parent / "tiny-hybrid")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
WHOLE = '{"name": "Ada é", "n": -12}'
FORMS = {
    "json_schema": (json_schema_grammar(SCHEMA, True, "s"), WHOLE),
    "choice": (choice_grammar(["yes it is", "no"], "c"), "yes it is"),
    "regex": (regex_grammar(r"\n?[a-z]+ [0-9]{3}", "r"), "\nabc 123"),
    "lark": (GrammarSpec("lark", 'root ::= "a" [0-9]+ "b"'), "a123b"),
}
USER = {"role": "user", "content": "Hi"}


def begun(grammar: GrammarSpec, text: str) -> ConstraintSpec:
    return ConstraintSpec(grammar, None, text)


@pytest.mark.parametrize("kind", FORMS)
def test_an_answer_goes_on_where_it_was_begun(kind: str) -> None:
    grammar, whole = FORMS[kind]
    for cut in range(len(whole) + 1):
        matcher = COMPILER.constraint(begun(grammar, whole[:cut])).matcher
        assert matcher is not None
        assert takes(matcher, whole[cut:]), whole[:cut]
        assert cut == 0 or not takes(matcher, whole) or (kind == "json_schema" and whole[:cut].endswith('": "')), whole[:cut]


def test_what_is_begun_and_its_end_are_together_what_was_asked_for() -> None:
    rng, judge = np.random.default_rng(7), compiled(SCHEMA)
    for cut in range(1, len(WHOLE)):
        matcher = COMPILER.constraint(begun(FORMS["json_schema"][0], WHOLE[:cut])).matcher
        assert matcher is not None
        answer = walk(matcher.fork(), rng)
        assert answer is not None
        text = WHOLE[:cut] + COMPILER.tokenizer.decode_bytes(answer).decode()
        assert takes(judge, text), text
        assert list(json.loads(text)) == ["name", "n"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "["),
        ("json_schema", '{"other'),
        ("json_schema", '{"name":  '),
        ("json_schema", "Here it is: {"),
        ("choice", "maybe"),
        ("choice", " yes"),
        ("regex", "abc  "),
        ("lark", "b"),
    ],
)
def test_what_no_answer_begins_with_is_refused_and_shown(kind: str, text: str) -> None:
    with pytest.raises(GrammarRejected, match="no answer in the form that is asked for begins as the last message") as refusal:
        COMPILER.constraint(begun(FORMS[kind][0], text))
    assert json.dumps(text, ensure_ascii=False) in str(refusal.value)
    assert refusal.value.param == "messages"
    assert COMPILER.constraint(begun(FORMS[kind][0], "")).matcher is not None  # others are not refused with it


def test_a_finished_answer_has_nothing_to_add() -> None:
    one = COMPILER.constraint(begun(FORMS["json_schema"][0], WHOLE))
    assert one.matcher is not None
    assert np.flatnonzero(one.matcher.mask()).tolist() == [END]


# --- from the wire to the constraint


def in_chat(text: Any, **fields: Any) -> GenerationRequest:
    begun = [USER, {"role": "assistant", "content": text}]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "response_format": form}
    return chat.translate({**body, **fields}).generation


def in_messages(text: Any, **fields: Any) -> GenerationRequest:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {"messages": [USER, {"role": "assistant", "content": text}], "max_tokens": 9, "output_config": form}
    return messages.translate({**body, **fields}).generation


@pytest.mark.parametrize("ask", [in_chat, in_messages])
@pytest.mark.parametrize("cut", range(1, len(WHOLE)))
def test_the_last_message_is_the_beginning_of_the_answer(ask: Any, cut: int) -> None:
    for content in (WHOLE[:cut], [{"type": "text", "text": WHOLE[:cut]}], "\n " + WHOLE[:cut]):
        prompt = CODEC.encode_request(ask(content))[0]
        assert prompt.constraint is not None
        assert prompt.constraint.begun == WHOLE[:cut]
        one = COMPILER.constraint(prompt.constraint)
        assert one.matcher is not None
        assert takes(one.matcher, WHOLE[cut:])


def test_reasoning_is_no_beginning_of_the_answer_and_comes_not_behind_one() -> None:
    thought = CODEC.encode_request(in_chat("<think>\nwell</think>\n\n" + WHOLE[:9]))[0].constraint
    thinking = CODEC.encode_request(in_chat("<think>\nwell"))[0].constraint

    assert thought is not None
    assert thinking is not None
    assert thought.begun == WHOLE[:9]
    assert thinking.begun == ""
    assert thought.reasoning is None or not thought.reasoning.may_open


def test_without_a_constraint_nothing_is_compared() -> None:
    plain = replace(in_chat(WHOLE[:9]), grammar=None)

    assert CODEC.encode_request(plain)[0].constraint is None
