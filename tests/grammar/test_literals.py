"""Answers under a grammar have exactly the bytes that it asks for, with every kind of vocabulary and its odd tokens."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from vocabularies import ADDED, END, KINDS, LETTERS, SPECIAL, write
from weft.errors import GrammarRejected
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Masks
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec
from weft.text.schema import json_schema_grammar
from weft.text.tokenizer import Tokenizer
from weft.text.tools.call_reader import CallReader
from weft.text.tools.families import FAMILIES
from weft.text.tools.grammar import tool_grammar
from weft.text.tools.tool import Tool, ToolSelection
from weft.text.types import CallArguments

VOCABULARY = 1024  # more than any of them has tokens, as models often have more embeddings
LITERALS = [
    "New York",
    " a  b   the    c ",
    "x\ny\n\nz\n",
    "strip <|im_end|> tags",
    "</s><s>[INST] <unk>",
    "<think>a</think> <tool_call>",
    "]<]x[>[ and õ, covid",
    "a</b> <b>",
    "<0x41> ▁ Ġ",
    "naïve 字",
    "🙂\u2028 é",
    "\t\ttab",
]
WITHOUT_BYTES = {"metaspace", "metaspace, fuse", "replace, fuse, strip", "fuse"}
FAMILY_NAMES = ["hermes", "mistral", "qwen-xml"]  # JSON, JSON, tags
PATTERNS = [r"[^\s]{8}", r"[^ ]{8}", r" [a-z ]{3}\n\n[<>|a-z]{4}", r"<\|im_end\|>|</s> ?<think>", r"(New York ){2}"]
MAX_TOKENS = 900


@cache
def folder(kind: str) -> TemporaryDirectory[str]:
    made = TemporaryDirectory()
    write(kind, Path(made.name))
    return made


@cache
def compiler(kind: str) -> Compiler:
    return Compiler(Path(folder(kind).name) / "tokenizer.json", VOCABULARY, (END,))


def strict(schema: dict[str, Any]) -> GrammarSpec:
    return json_schema_grammar(schema, True, "schema")


def object_with(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"b": schema}, "required": ["b"], "additionalProperties": False}


def walked(constraint: Constraint, seed: int) -> list[int]:
    """Tokens of an answer, each a random one that the constraint allows; what is forced is all that the mask has."""
    masks, chance, taken = Masks(VOCABULARY), np.random.default_rng(seed), list[int]()
    while not constraint.is_finished:
        allowed, errors = masks.fill([constraint.demand((END,))])
        mask = np.ones(VOCABULARY, bool) if allowed is None else allowed[0]
        assert not errors
        if mask[END] and constraint.matcher is not None and constraint.may_end and (mask.sum() == 1 or chance.random() < 0.5):
            break
        mask[END] = False
        token, forced = int(chance.choice(np.flatnonzero(mask))), constraint.forced()
        assert not forced or (forced[0] == token and mask.sum() == 1)
        constraint.accept(token)
        taken.append(token)
        assert len(taken) < MAX_TOKENS
    return taken


def answers(kind: str, spec: GrammarSpec, count: int = 3, reasoning: ReasoningSpec | None = None) -> list[str]:
    """Answers under a grammar as the client reads them, without the reasoning before."""
    tokens, found = compiler(kind).tokenizer, []
    for seed in range(count):
        taken = walked(compiler(kind).constraint(ConstraintSpec(spec, reasoning)), seed)
        close = tokens.tokenize_str("</think>", parse_special=True)[0]
        taken = taken[taken.index(close) + 1 :] if close in taken else taken
        assert not tokens.reserved & {*taken}
        found.append(tokens.decode_bytes(taken).decode())
    return found


def lacks(kind: str, literal: str) -> bool:
    """Whether a vocabulary has no tokens for a letter of it: without bytes it has the letters listed, and "▁" is a blank."""
    letters = {" ", *(letter for text in [*LETTERS, "õ"] for letter in text)} - ({"▁"} if kind != "fuse" else set())
    return kind in WITHOUT_BYTES and not {*literal} <= letters


def expect(kind: str, literal: str, spec: GrammarSpec, wanted: Any) -> None:
    if lacks(kind, literal):
        with pytest.raises(GrammarRejected, match="has no tokens for '"):
            answers(kind, spec)
    else:
        found = answers(kind, spec)
        assert [text if spec.kind == "choice" else json.loads(text) for text in found] == [wanted] * len(found)


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_is_written_to_the_letter(kind: str, literal: str) -> None:
    expect(kind, literal, strict(object_with({"const": literal})), {"b": literal})
    expect(kind, literal, strict({"enum": [literal]}), literal)
    expect(kind, literal, GrammarSpec("choice", json.dumps([literal])), literal)


@pytest.mark.parametrize("kind", sorted(WITHOUT_BYTES))
@pytest.mark.parametrize(
    ("grammar_kind", "text"),
    [
        ("regex", "ab|(?:x{0,2}☂)"),
        ("regex", "[a-c]{2}|[☂]"),
        ("lark", 'root ::= ([b-d]){2} | "x ☂ y"'),
        ("lark", "start: /[b-d]{2}|☂/"),
        ("lark", 'start: "b" | "☂"'),
    ],
)
def test_an_alternative_that_the_vocabulary_can_not_write_is_refused_and_no_dead_end(
    kind: str, grammar_kind: Any, text: str
) -> None:
    with pytest.raises(GrammarRejected, match="has no tokens for '☂'"):
        answers(kind, GrammarSpec(grammar_kind, text))
    assert answers(kind, GrammarSpec(grammar_kind, text.replace("☂", "a")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_longer_than_the_trial_of_its_grammar_is_written_to_the_letter(kind: str) -> None:
    literal = "0123456789 " * 20 + "<think> strip <|im_end|> tags\n\n<tool_call>"

    expect(kind, literal, strict({"const": literal}), literal)
    expect(kind, literal, GrammarSpec("choice", json.dumps([literal])), literal)


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_several_literals_can_be_answered_and_nothing_else(kind: str) -> None:
    known = [literal for literal in LITERALS if not lacks(kind, literal)]
    found = answers(kind, GrammarSpec("choice", json.dumps(known)), 40)
    listed = answers(kind, strict({"enum": known}), 40)

    assert {*found} <= {*known}
    assert {json.loads(text) for text in listed} <= {*known}
    assert min(len({*found}), len({*listed})) > len(known) // 2


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_regex_is_matched_by_what_the_client_reads(kind: str, pattern: str) -> None:
    found = answers(kind, GrammarSpec("regex", pattern), 20)

    assert [text for text in found if not re.fullmatch(pattern, text, re.ASCII)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_strict_tool_gets_its_constants_to_the_letter(kind: str) -> None:
    tokens = compiler(kind).tokenizer
    (marker,) = tokens.tokenize_str("<tool_call>", parse_special=True)
    for literal in (one for one in LITERALS if not lacks(kind, one) and one == one.strip("\n")):
        tool = Tool("say", json.dumps(object_with({"const": literal})), strict=True)
        for family in (one for one in FAMILIES if one.name in FAMILY_NAMES):
            choice = ToolSelection("required", (tool,), is_parallel=False)
            spec = tool_grammar(family, choice, frozenset({("<tool_call>", marker)}), None)
            taken = walked(compiler(kind).constraint(ConstraintSpec(spec)), 0)
            read = CallReader(family, (tool,)).feed(tokens.decode_bytes(taken).decode())

            assert json.loads("".join(one.text for one in read if isinstance(one, CallArguments))) == {"b": literal}
            assert tokens.reserved & {*taken} == ({marker} if "<tool_call>" in family.literals else set())


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "may open"])
@pytest.mark.parametrize("kind", KINDS)
def test_behind_reasoning_an_answer_is_to_the_letter_and_the_markers_are_the_models_own(kind: str, opened: bool) -> None:
    reasoning = ReasoningSpec("<think>", "</think>", opened, may_open=not opened, budget=4, gap="\n\n")
    literal = "strip <|im_end|> and </think> tags"

    assert {text.removeprefix("\n\n") for text in answers(kind, GrammarSpec("choice", json.dumps([literal])), 3, reasoning)} == {
        literal
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_marker_is_its_token_where_it_is_meant_and_text_where_it_is_said(kind: str) -> None:
    tokens, known = compiler(kind).tokenizer, Tokenizer(Path(folder(kind).name))

    for text in (*SPECIAL, *ADDED):
        said = tokens.tokenize_str(text)
        assert tokens.decode_bytes(said).decode() == text or lacks(kind, text)
        assert not tokens.reserved & {*said}
        if known.id_of(text) in tokens.reserved:
            assert tokens.tokenize_str(f"{text}{text}", parse_special=True) == [known.id_of(text)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_markers_that_the_model_has_no_embeddings_for_are_text(kind: str) -> None:
    path = Path(folder(kind).name) / "tokenizer.json"
    beyond = Tokenizer(path.parent).id_of("<think>")
    assert beyond is not None
    tokens = Compiler(path, beyond, (END,)).tokenizer

    assert max(tokens.tokenize_str("<think></think>", parse_special=True)) < beyond
    assert tokens.decode_bytes(tokens.tokenize_str("<think></think>", parse_special=True)) == b"<think></think>"
