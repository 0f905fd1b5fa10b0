"""The engine and the front read the same reasoning out of any tokens: where it begins, where it ends, and how long it is."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readers import reader_of
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Masks
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec
from weft.model.resolve import TINY_HYBRID
from weft.text.reasoning import Markers
from weft.text.stream import StreamReader
from weft.text.tokenizer import Tokenizer
from weft.text.types import Delta, Reasoning, Text

VOCABULARY, END = 4096, 4082
COMPILER = Compiler(TINY_HYBRID / "tokenizer.json", VOCABULARY, (END,))
TOKENIZER = Tokenizer(TINY_HYBRID)
PAIRS = [  # of one token, of several, with blanks inside, one the beginning of the other
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<reasoning>", "</reasoning>"),
    Markers("<|channel>thought", "<channel|>"),
    Markers("Here are my steps:", "[BEGIN FINAL RESPONSE]"),
    Markers("<t>", "<tt>"),
    Markers("<think>", "</reasoning>"),
]
WAYS = ["opened", "may open", "off"]
GAPS = ["", "\n", "\n\n"]


@dataclass
class Both:
    """What the engine and the front know of one answer."""

    engine: Constraint
    front: StreamReader

    @classmethod
    def of(cls, markers: Markers, way: str, *, grammar: GrammarSpec | None = None, **more: object) -> Both:
        told = {"may_open": way == "may open", **more}
        spec = ReasoningSpec(markers.open, markers.close, way == "opened", **told)  # type: ignore[arg-type]
        has_grammar = grammar is not None
        reopening = TOKENIZER.id_of(markers.open) if spec.reopens and not has_grammar else None
        front = reader_of(
            TOKENIZER,
            markers=markers,
            opened=way == "opened",
            before_grammar=has_grammar,
            spec=told,
            reopening=reopening,
            logprobs=random.Random(markers.open).random() < 0.5,
        )
        return cls(COMPILER.constraint(ConstraintSpec(grammar, spec)), front)

    @property
    def is_agreed(self) -> bool:
        """Whether both are in the same phase; the front waits for the rest of a character that is cut."""
        engine, front = self.phases
        return engine == front or bool(self.front._detokenizer.unfinished)

    @property
    def phases(self) -> tuple[str, str]:
        splitter, state = self.front._splitter, self.engine._history[-1]
        assert splitter is not None
        waits = splitter._may_open and not splitter.is_reasoning
        return state.phase, "reasoning" if splitter.is_reasoning else "start" if waits else "answer"

    def take(self, token: int) -> list[Delta]:
        self.engine.accept(token)
        return self.front.feed(token)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def pieces(markers: Markers) -> st.SearchStrategy[list[int]]:
    texts = [
        *markers,
        markers.open[:3],
        markers.close[:3],
        markers.open[2:],
        " ",
        "\n\n",
        " " * 9,
        "a",
        "Hi there",
        "🙂",
        "<html>",
    ]
    written = st.sampled_from(texts)
    spelled = written.map(lambda text: [token for letter in text for token in encode(letter)])
    halves = st.sampled_from(["🙂", "é", "漢"]).map(lambda text: encode(text)[:1])
    any_token = st.integers(0, VOCABULARY - 1).map(lambda token: [token])
    return st.one_of(written.map(encode), written.map(encode), spelled, halves, any_token)


@pytest.mark.parametrize("reopens", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("markers", PAIRS, ids=lambda markers: markers.open)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_engine_and_front_are_in_the_same_phase_after_every_token(
    markers: Markers, way: str, reopens: bool, data: st.DataObject
) -> None:
    both = Both.of(markers, way, reopens=reopens)
    parts = data.draw(st.lists(pieces(markers), max_size=10))

    for token in [token for part in parts for token in part]:
        both.take(token)
        assert both.is_agreed, both.phases


@pytest.mark.parametrize("budget", range(0, 12, 3))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("markers", PAIRS, ids=lambda markers: markers.open)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_more_tokens_of_reasoning_are_counted_than_the_budget_has(
    markers: Markers, way: str, budget: int, data: st.DataObject
) -> None:
    both = Both.of(markers, way, budget=budget, gap="\n\n")
    wishes = [token for part in data.draw(st.lists(pieces(markers), max_size=12)) for token in part]

    for wish in wishes:
        allowed, errors = Masks(VOCABULARY).fill([both.engine.demand((END,))])
        assert not errors
        both.take(wish if allowed is None or allowed[0, wish] else int(np.flatnonzero(allowed[0])[wish % allowed[0].sum()]))
        assert both.is_agreed, both.phases
    both.front.finish()

    assert both.front.num_reasoning_tokens <= budget


CHOICES = [
    ["Yes", "No"],
    ["\nYes", "\nNo"],
    ["\n\n\n", "\n\n x"],
    ["<html>", "<r"],
    ["<think> tag", "</think>"],
    [" a", "a", "[THINK"],
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("markers", PAIRS, ids=lambda markers: markers.open)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_what_is_shown_behind_any_reasoning_is_what_the_grammar_asks(
    markers: Markers, way: str, choices: list[str], data: st.DataObject
) -> None:
    gap = data.draw(st.sampled_from(GAPS))
    both = Both.of(markers, way, grammar=GrammarSpec("choice", json.dumps(choices)), gap=gap, budget=data.draw(st.integers(0, 6)))
    chance, deltas = random.Random(data.draw(st.integers(0, 1 << 20))), []

    for _ in range(60):
        allowed, errors = Masks(VOCABULARY).fill([both.engine.demand((END,))])
        assert not errors
        assert allowed is not None
        if allowed[0, END]:
            break
        deltas += both.take(int(chance.choice(np.flatnonzero(allowed[0]))))
        assert both.is_agreed, both.phases
    deltas += both.front.finish()

    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) in choices
    assert all(isinstance(delta, Text | Reasoning) for delta in deltas)
