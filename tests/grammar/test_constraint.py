"""A constraint is its sequence's own: masks as if alone, tokens taken back as if never taken, thinking counted to the token."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft.model
from weft.errors import GrammarRejected, RowFailed
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Masks, TokenDemand
from weft.grammar.reasoning_budget import missing_bytes
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec

FOLDER = Path(weft.model.__file__).parent / "tiny-hybrid"
VOCABULARY, END = 4096, 4082
COMPILER = Compiler(FOLDER / "tokenizer.json", VOCABULARY, (END,))
ENDS = (END,)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = [
    GrammarSpec("json_schema", json.dumps(PERSON)),
    GrammarSpec("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 5}'),
    GrammarSpec("regex", r"[a-z]{2,6}(-[0-9]{1,3})?"),
    GrammarSpec("choice", '["yes", "no", "maybe so"]'),
    GrammarSpec("lark", 'start: "a" middle "z"\nmiddle: /[0-9]+/ | start'),
]


def thinking(**changes: object) -> ReasoningSpec:
    return ReasoningSpec(**{"open": "<think>", "close": "</think>", "opened": True, "may_open": False, **changes})  # type: ignore[arg-type]


LACKING = np.array([missing_bytes(COMPILER.tokenizer.decode_bytes([token])) > 0 for token in range(VOCABULARY)])


def constraint(grammar: GrammarSpec | None = None, thought: ReasoningSpec | None = None) -> Constraint:
    return COMPILER.constraint(ConstraintSpec(grammar, thought))


def mask_of(*constraints: Constraint) -> np.ndarray:
    """(rows, V) what each of them allows, filled in one go."""
    allowed, errors = Masks(VOCABULARY).fill([one.demand(ENDS) for one in constraints])
    assert not errors
    return np.ones((len(constraints), VOCABULARY), bool) if allowed is None else allowed.copy()


def ids(text: str) -> list[int]:
    return list(COMPILER.tokenizer.tokenize_str(text, parse_special=True))


def text(tokens: list[int]) -> str:
    return COMPILER.tokenizer.decode_bytes(tokens).decode(errors="replace")


def walk(one: Constraint, rng: np.random.Generator, steps: int) -> list[int]:
    """Random allowed tokens, until it can not go on."""
    taken: list[int] = []
    while len(taken) < steps and not one.is_finished:
        allowed = np.flatnonzero(mask_of(one)[0])
        token = int(rng.choice(allowed))
        if token == END:
            break
        one.accept(token)
        taken.append(token)
    return taken


@given(st.lists(st.sampled_from(range(len(GRAMMARS))), min_size=2, max_size=4), st.integers(0, 10_000), st.data())
@settings(max_examples=40)
def test_interleaved_constraints_have_exactly_the_masks_they_have_alone(kinds: list[int], seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    together = [constraint(GRAMMARS[kind]) for kind in kinds]
    walks = [walk(constraint(GRAMMARS[kind]), rng, 6) for kind in kinds]
    alone = [constraint(GRAMMARS[kind]) for kind in kinds]
    order = data.draw(st.permutations([row for row, tokens in enumerate(walks) for _ in tokens]))
    places = [0] * len(kinds)
    for row in order:
        together[row].accept(walks[row][places[row]])
        places[row] += 1
    for one, tokens in zip(alone, walks, strict=True):
        for token in tokens:
            one.accept(token)

    live = [row for row, one in enumerate(alone) if not one.is_finished]
    if live:
        assert (mask_of(*(together[row] for row in live)) == np.concatenate([mask_of(alone[row]) for row in live])).all()
    assert [one.is_finished for one in together] == [one.is_finished for one in alone]


def test_rows_among_free_ones_have_exactly_the_masks_they_have_alone() -> None:
    rows = [None, constraint(GRAMMARS[0]), None, constraint(None, thinking(budget=0)), constraint(GRAMMARS[2]), None]
    allowed, errors = Masks(VOCABULARY).fill([None if one is None else one.demand(ENDS) for one in rows])

    assert not errors
    assert allowed is not None
    for mask, one in zip(allowed, rows, strict=True):
        assert (mask == (True if one is None else mask_of(one)[0])).all()


def test_threads_that_compile_and_advance_have_exactly_the_masks_of_one_after_the_other() -> None:
    """Sixteen at once, three for each grammar: they share its cache entry, and forks of one grammar share its lexer."""
    jobs = [(GRAMMARS[number % len(GRAMMARS)], number) for number in range(16)]

    def masks_along(compiler: Compiler, grammar: GrammarSpec, seed: int) -> list[bytes]:
        one, rng = compiler.constraint(ConstraintSpec(grammar)), np.random.default_rng(seed)
        found = []
        while len(found) < 25 and not one.is_finished:
            mask = mask_of(one)[0]
            found.append(mask.tobytes())
            token = int(rng.choice(np.flatnonzero(mask)))
            if token == END:
                break
            one.accept(token)
        return found

    serial = [masks_along(Compiler(COMPILER.path, VOCABULARY, ENDS), *job) for job in jobs]
    shared, start = Compiler(COMPILER.path, VOCABULARY, ENDS), threading.Barrier(len(jobs))
    assert shared.tokenizer  # built before the engine serves
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: (start.wait(), masks_along(shared, *job))[1], jobs))

    assert together == serial
    assert len({tuple(masks) for masks in serial}) > 10  # so that a mix-up would be seen


@given(st.sampled_from(GRAMMARS), st.sampled_from([None, 0, 2, 5]), st.integers(0, 10_000), st.integers(1, 6))
@settings(max_examples=60)
def test_taking_tokens_back_restores_the_mask(grammar: GrammarSpec, budget: int | None, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    one = constraint(grammar, thinking(budget=budget) if budget is not None else None)
    walk(one, rng, 3)
    if one.is_finished:
        return
    before = mask_of(one)
    taken = walk(one, rng, count)
    one.rollback(len(taken))

    assert (mask_of(one) == before).all()
    for token in taken:
        one.accept(token)  # and the same way can be gone again


@given(st.sampled_from(GRAMMARS), st.integers(0, 10_000))
@settings(max_examples=60)
def test_what_was_accepted_is_accepted_by_a_fresh_one(grammar: GrammarSpec, seed: int) -> None:
    one = constraint(grammar, thinking(budget=4))
    taken = walk(one, np.random.default_rng(seed), 40)
    fresh = constraint(grammar, thinking(budget=4))
    for token in taken:
        assert fresh.demand(ENDS) is None or mask_of(fresh)[0, token]
        fresh.accept(token)

    assert fresh.is_finished == one.is_finished


def test_a_fork_goes_its_own_way() -> None:
    first = constraint(GRAMMARS[3])
    first.accept(ids("y")[0])
    fork = first.fork()
    before = mask_of(fork)
    first.accept(ids("es")[0])

    assert first.is_finished
    assert not fork.is_finished
    assert (mask_of(fork) == before).all()


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_close_marker_is_forced_when_the_budget_is_spent(budget: int) -> None:
    one = constraint(GRAMMARS[0], thinking(budget=budget, gap="\n\n"))
    for _ in range(budget):
        never = np.flatnonzero(~mask_of(one)[0])  # an end, and what begins a character that the budget has no room for
        assert END in never
        assert all(token == END or LACKING[token] for token in never)
        one.accept(ids("hm")[0])
    forced = ids("</think>") + ids("\n\n")
    for token in forced:
        assert one.demand(ENDS) == TokenDemand(only=(token,))
        one.accept(token)

    assert (mask_of(one) == mask_of(constraint(GRAMMARS[0]))).all()  # and the grammar begins


def test_thinking_that_ends_by_itself_lets_the_grammar_begin() -> None:
    one = constraint(GRAMMARS[3], thinking(budget=50, gap="\n"))
    for token in ids("well, let me see.</think>"):
        one.accept(token)

    assert one.demand(ENDS) == TokenDemand(only=tuple(ids("\n")))
    one.accept(ids("\n")[0])
    assert (mask_of(one) == mask_of(constraint(GRAMMARS[3]))).all()


def test_what_is_thought_never_reaches_the_grammar() -> None:
    one = constraint(GRAMMARS[0], thinking())
    for token in ids('{"name": 5, no json at all'):
        one.accept(token)

    assert not one.is_finished
    assert one.demand(ENDS) == TokenDemand(never=ENDS)


@pytest.mark.parametrize("budget", range(1, 9))
def test_no_character_is_cut_by_the_end_of_the_budget_and_no_token_more_is_spent(budget: int) -> None:
    rng = np.random.default_rng(budget)
    for _ in range(20):
        one, taken = constraint(None, thinking(budget=budget)), []
        while (demand := one.demand(ENDS)) is None or demand.only is None:
            cut = np.flatnonzero(mask_of(one)[0] & LACKING)  # the model writes nothing but characters of several tokens
            missing = missing_bytes(COMPILER.tokenizer.decode_bytes(taken))
            token = ids("\x80")[-1] if missing else int(rng.choice(cut if cut.size else np.flatnonzero(mask_of(one)[0])))
            assert mask_of(one)[0, token], "a character that was begun may be finished"
            one.accept(token)
            taken.append(token)

        assert len(taken) == budget
        assert missing_bytes(COMPILER.tokenizer.decode_bytes(taken)) == 0
        assert demand == TokenDemand(only=tuple(ids("</think>")))


def test_thinking_again_is_counted_too_where_a_model_may() -> None:
    (again,) = ids("<think>")
    one = constraint(None, thinking(budget=3, reopens=True))
    for token in [*ids("a b"), *ids("</think>"), *ids("the answer"), again]:
        one.accept(token)
    spent = len(ids("a b"))
    while (demand := one.demand(ENDS)) is None or demand.only is None:
        one.accept(ids("hm")[0])
        spent += 1

    assert spent == 3
    for token in [*ids("</think>"), again]:
        one.accept(token)
    assert one.demand(ENDS) == TokenDemand(only=tuple(ids("</think>")))  # nothing is left of it


@pytest.mark.parametrize(("open_marker", "close_marker"), [("<think>", "</think>"), ("<reasoning>", "</reasoning>")])
@pytest.mark.parametrize("how", [{"opened": False}, {}], ids=["thinking off", "thinking over"])
def test_reasoning_closes_once_whatever_marker_the_answer_has(open_marker: str, close_marker: str, how: dict[str, bool]) -> None:
    one = constraint(None, thinking(open=open_marker, close=close_marker, budget=20, gap="\n\n", **how))
    for token in () if how else ids(f"a{close_marker}"):
        one.accept(token)
    for token in ids(f"an {open_marker} and a {close_marker} in the answer, {open_marker} again" + " and on" * 30):
        assert one.demand(ENDS) is None
        one.accept(token)


@pytest.mark.parametrize("answer", ["<html>", "<r", "< reasoning>", "<reasonin>", "<Reasoning>", "x<reasoning>", "</reasoning>"])
def test_nothing_but_the_whole_marker_opens_the_reasoning(answer: str) -> None:
    one = constraint(None, thinking(open="<reasoning>", close="</reasoning>", opened=False, may_open=True, budget=0))
    for token in ids(answer):
        assert one.demand(ENDS) is None
        one.accept(token)

    assert one.demand(ENDS) is None


@pytest.mark.parametrize("answer", ["<html>", "<r", "\n<p>", "<reasoning"])
def test_an_answer_that_begins_like_the_open_marker_is_what_the_grammar_asks(answer: str) -> None:
    spec = thinking(open="<reasoning>", close="</reasoning>", opened=False, may_open=True, gap="\n")
    choice = GrammarSpec("choice", json.dumps([answer]))
    one = constraint(choice, spec)
    forbidding = constraint(choice)
    for count, token in enumerate(tokens := COMPILER.tokenizer.tokenize_str(answer)):
        assert mask_of(one)[0, token]
        one.accept(token)
        one.rollback(1)
        one.accept(token)
        forbidding.accept(token)
        assert len(tokens) - count > 1 or (mask_of(one)[0] >= mask_of(forbidding)[0]).all()

    thinks = constraint(choice, spec)
    for token in [*ids("<reasoning>"), *ids("hm</reasoning>"), *ids("\n")]:
        thinks.accept(token)
    assert (mask_of(thinks) == mask_of(constraint(choice))).all()


def test_markers_of_several_tokens_work() -> None:
    spec = thinking(open="<reasoning>", close="</reasoning>", opened=False, may_open=True, budget=2)
    opening, closing = ids("<reasoning>"), ids("</reasoning>")
    assert len(opening) > 1
    assert len(closing) > 1
    one = constraint(GRAMMARS[3], spec)
    allowed = mask_of(one)[0]
    assert allowed[opening[0]]
    for token in opening:
        one.accept(token)
    for _ in range(2):
        one.accept(ids("hm")[0])
    for token in closing:
        assert one.demand(ENDS) == TokenDemand(only=(token,))
        one.accept(token)

    assert (mask_of(one) == mask_of(constraint(GRAMMARS[3]))).all()


def test_a_model_that_need_not_think_may_answer_at_once_or_think_first() -> None:
    (opening,) = ids("<think>")
    one = constraint(GRAMMARS[3], thinking(opened=False, may_open=True))
    plain = mask_of(constraint(GRAMMARS[3]))[0]

    assert mask_of(one)[0, opening]
    assert (np.delete(mask_of(one)[0], opening) == np.delete(plain, opening)).all()
    one.accept(ids("yes")[0])
    assert not one.is_finished or text(ids("yes")[:1]) == "yes"
    other = constraint(GRAMMARS[3], thinking(opened=False, may_open=True))
    other.accept(opening)
    assert other.demand(ENDS) == TokenDemand(never=ENDS)


@pytest.mark.parametrize(("max_tokens", "most"), [(20, 9), (1000, 743), (1, 0)])
def test_room_is_kept_for_the_answer(max_tokens: int, most: int) -> None:
    one = constraint(GRAMMARS[3], thinking())
    one.limit_to(max_tokens)
    count = 0
    while (demand := one.demand(ENDS)) is not None and demand.only is None:
        one.accept(ids("hm")[0])
        count += 1

    assert count == most


def test_a_token_the_grammar_does_not_have_ends_its_own_row() -> None:
    one = constraint(GRAMMARS[3])

    with pytest.raises(RowFailed):
        one.accept(ids("never")[0])


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (GrammarSpec("json_schema", '{"type": "zork"}'), "zork"),
        (GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (GrammarSpec("regex", "(unclosed"), "regex"),
        (GrammarSpec("lark", "start: nowhere"), "nowhere"),
        (GrammarSpec("choice", "[]"), "choice"),
        (GrammarSpec("structural_tag", "{}"), "structural_tag"),
    ],
)
def test_what_can_not_be_enforced_is_refused_with_the_reason_twice_alike(spec: GrammarSpec, word: str) -> None:
    reasons = []
    for _ in range(2):
        with pytest.raises(GrammarRejected) as caught:
            COMPILER.compile(spec)
        reasons.append(str(caught.value))

    assert reasons[0] == reasons[1]
    assert word in reasons[0]


def test_white_space_does_not_run_away() -> None:
    one = constraint(GRAMMARS[0])
    for token in ids('{"name":'):
        one.accept(token)
    blank = set(np.flatnonzero([not text([token]).strip() for token in range(VOCABULARY)]).tolist())
    count = 0
    while moves := [token for token in np.flatnonzero(mask_of(one)[0]).tolist() if token in blank]:
        one.accept(max(moves, key=lambda token: len(text([token]))))
        count += 1
        assert count < 40


def test_structural_tags_leave_text_free_and_hold_their_insides() -> None:
    tag = {
        "triggers": ["<call="],
        "structures": [{"begin": "<call=add>", "schema": {"type": "integer"}, "end": "</call>"}],
    }
    one = constraint(GrammarSpec("structural_tag", json.dumps(tag)))
    for token in ids("some words first <call=add>12</call> and more"):
        assert mask_of(one)[0, token], text([token])
        one.accept(token)
    for token in ids("<call=add>"):
        one.accept(token)

    assert not mask_of(one)[0, ids("x")[0]]
