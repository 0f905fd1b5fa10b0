"""A hostile grammar costs its owner a refusal, or everybody a bounded moment: in compiling, in masks, in depth of stack.

A grammar that explodes takes minutes or for ever, so the limits are the engine's own and far above what an admitted one takes on
a slow machine, in CPU seconds of this process. What ends the process ends the test run with it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hostile import ATTACKS, Attack

import weft.model
from waiting import HANG_SECONDS
from weft.engine.host import MAX_COMPILE_SECONDS
from weft.errors import GrammarRejected, InvalidRequest, RowFailed
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Matcher
from weft.grammar.grammar_cache import NOBODY, Owner
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.text import schema
from weft.text.schema import MAX_TEXT

VOCABULARY, END = 4096, 4082
COMPILER = Compiler(Path(weft.model.__file__).parent / "tiny-hybrid" / "tokenizer.json", VOCABULARY, (END,))
PLACE = "structured_outputs"
MASK_SECONDS = 2.0
TOKENS = 20
MAX_WORDS = 2_000  # characters of a refusal
ALL = [pytest.param(attack, id=f"{attack.kind}: {attack.name}") for attack in ATTACKS]
DEEP = [pytest.param(attack, id=attack.name) for attack in ATTACKS if "deep" in attack.name or "chain" in attack.name]


def examined(attack: Attack) -> GrammarSpec:
    """What the front hands on of a request with this grammar. Raises InvalidRequest."""
    made = attack.make()
    match attack.kind:
        case "json_schema":
            return schema.json_schema_grammar(made, True, PLACE)
        case "regex":
            return schema.regex_grammar(made, PLACE)
        case "choice":
            return schema.choice_grammar(made, PLACE)
        case _:
            return schema.lark_grammar(made, PLACE)


def whole(constraint: Constraint) -> Constraint:
    return constraint


def compiled(spec: GrammarSpec) -> Matcher:
    """Compiled where the engine compiles: in a thread of the compiler's, on its stack. Raises InvalidRequest."""
    matcher = COMPILER.start(ConstraintSpec(spec), whole).result().matcher
    assert matcher is not None
    return matcher


def tried(attack: Attack) -> Matcher | InvalidRequest:
    try:
        return compiled(examined(attack))
    except InvalidRequest as refusal:
        return refusal


def take_some(matcher: Matcher) -> float:
    """Take some random tokens; the longest that one mask or one token took, in CPU seconds. The grammar may give up."""
    rng, longest = np.random.default_rng(0), 0.0
    for _ in range(TOKENS):
        since = time.process_time()
        mask = matcher.mask()
        longest = max(longest, time.process_time() - since)
        mask[END] = False
        if matcher.is_finished or not mask.any():
            break
        since = time.process_time()
        try:
            matcher.accept(int(rng.choice(np.flatnonzero(mask))))
        except RowFailed:
            break
        finally:
            longest = max(longest, time.process_time() - since)
    return longest


@pytest.mark.parametrize("attack", ALL)
def test_a_hostile_grammar_is_refused_or_compiled_and_matched_within_the_limits(attack: Attack) -> None:
    since = time.process_time()
    outcome = tried(attack)

    assert time.process_time() - since < MAX_COMPILE_SECONDS
    if isinstance(outcome, InvalidRequest):
        assert 10 < len(str(outcome)) < MAX_WORDS
    else:
        assert take_some(outcome) < MASK_SECONDS


@pytest.mark.parametrize("attack", DEEP)
def test_depth_does_not_end_an_engine_whose_front_let_it_pass(attack: Attack) -> None:
    made = attack.make()
    spec = GrammarSpec(attack.kind, made if isinstance(made, str) else json.dumps(made))
    future = COMPILER.start(ConstraintSpec(spec), whole)

    refusal = future.exception()
    assert refusal is None or isinstance(refusal, InvalidRequest)


def test_a_grammar_without_a_first_token_is_refused() -> None:
    for attack in ATTACKS:
        if attack.name in ("regex that matches nothing", "lark empty language", "lark endless loop of rules"):
            assert isinstance(tried(attack), InvalidRequest), attack.name


def test_a_grammar_that_gives_up_after_its_first_token_is_refused() -> None:
    for attack in ATTACKS:
        if attack.name in ("lark 3,000 overlapping terminals", "lark of no finite text", "lark doubled 30 times"):
            assert isinstance(tried(attack), InvalidRequest), attack.name


@pytest.mark.parametrize(
    "text",
    [
        'start: s\ns: s s | "a" | "b" | " "',
        "start: s\ns: s s s | s s | /[a-z ]/",
        'start: a*\na: b | c\nb: "x" | "x" b\nc: "x" | "x" c',
    ],
    ids=["pairs", "triples", "two ways"],
)
def test_a_grammar_that_reads_a_text_in_every_way_is_refused_when_it_is_compiled(text: str) -> None:
    with pytest.raises(GrammarRejected, match=r"items; max is 150.*it is too complex"):
        compiled(schema.lark_grammar(text, PLACE))


@pytest.mark.parametrize(
    "text",
    [
        'start: r\nr: "x" r | "x"',
        'start: list\nlist: item "," list | item\nitem: /[a-z]/ | "(" list ")"',
        'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/',
        'root ::= item ("," root)?\nitem ::= [a-z]+ ws\nws ::= (" " ws)?',
    ],
    ids=["right recursion", "list", "expression", "gbnf"],
)
def test_a_grammar_that_names_itself_last_is_taken_for_long_answers(text: str) -> None:
    matcher, rng = compiled(schema.lark_grammar(text, PLACE)), np.random.default_rng(0)
    for _ in range(200):
        mask = matcher.mask()
        mask[END] = False
        matcher.accept(int(rng.choice(np.flatnonzero(mask))))

    assert not matcher.error


def test_a_text_that_compiles_for_seconds_is_refused_by_its_size() -> None:
    long = "x" * (MAX_TEXT + 1)
    for ask in (
        lambda: schema.regex_grammar(long, PLACE),
        lambda: schema.lark_grammar(f'start: "{long}"', PLACE),
        lambda: schema.choice_grammar(["y", long], PLACE),
        lambda: schema.json_schema_grammar({"type": "string", "pattern": long}, True, PLACE),
    ):
        with pytest.raises(InvalidRequest, match=f"at most {MAX_TEXT} are taken"):
            ask()


def test_ten_thousand_choices_are_taken_whole() -> None:
    matcher = compiled(schema.choice_grammar([f"value {index:05d}" for index in range(10_000)], PLACE))

    for token in COMPILER.tokenizer.tokenize_str("value 09999"):
        assert matcher.mask()[token]
        matcher.accept(token)
    assert matcher.is_finished


def test_other_threads_run_while_a_grammar_compiles() -> None:
    properties = {f"p{index}": {"type": "string", "maxLength": index} for index in range(1_500)}
    spec = schema.json_schema_grammar({"type": "object", "properties": properties}, True, PLACE)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    beside = threading.Thread(target=tick)
    beside.start()
    try:
        compiled(spec)
    finally:
        done.set()
        beside.join()
    assert ticks[0] >= 10  # the compile takes a fifth of a second; with the interpreter's lock held there would be one


class Endless(Compiler):
    """Compiles until its thread has a low priority."""

    def constraint(self, spec: ConstraintSpec, owner: Owner = NOBODY, *, is_private: bool = False) -> Constraint:  # noqa: ARG002
        while os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 0:
            sum(range(1_000))
        return Constraint(None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priority for a thread")
def test_a_compile_that_takes_long_yields_to_the_engine() -> None:
    future = Endless(COMPILER.path, VOCABULARY, (END,)).start(ConstraintSpec(None), whole)

    assert future.result(timeout=HANG_SECONDS)


class Panicking(Compiler):
    """llguidance is Rust: what panics there comes as an exception that is no Exception."""

    def constraint(self, spec: ConstraintSpec, owner: Owner = NOBODY, *, is_private: bool = False) -> Constraint:  # noqa: ARG002
        raise KeyboardInterrupt(f"a panic over {spec}")


def test_a_panic_while_compiling_is_a_refusal_and_nobody_waits_for_ever() -> None:
    future = Panicking(COMPILER.path, VOCABULARY, (END,)).start(ConstraintSpec(None), whole)

    with pytest.raises(GrammarRejected, match="a panic"):
        future.result(timeout=HANG_SECONDS)
