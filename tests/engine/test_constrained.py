"""Constrained rows inside the batch: they hold, their neighbours do not notice, and what fails fails alone."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema_rs
import mlx.core as mx
import pytest

import scripted
import weft.model
from driver import SMALL, Clock, Run, adapter_for, answers
from weft.engine.faults import Rule
from weft.engine.host import Host
from weft.engine.sequence import Sequence
from weft.errors import GrammarRejected, RowFailed
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint, Matcher
from weft.grammar.grammar_cache import ONCE_USED_SECONDS, GrammarCache
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, EngineEvents, GrammarSpec, ReasoningSpec, Submit, TokenEvent
from weft.memory.disk import DiskTier
from weft.model.adapter import Adapter
from weft.text.schema import json_schema_grammar
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.model.__file__).parent / "tiny-hybrid"
COMPILER = Compiler(FOLDER / "tokenizer.json", 4096, (4080, 4082))
TOKENIZER = Tokenizer(FOLDER)
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
STRICT = ConstraintSpec(GrammarSpec("json_schema", json.dumps(SCHEMA)))
GREEDY = Sampling(temperature=0.0, max_tokens=60)
STORIES = ["Once upon a time", "The dog was", "A little boy saw a big tree and", "Lily and Tom went to the park."]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_for(FOLDER)


def new_compiler() -> Compiler:
    return Compiler(FOLDER / "tokenizer.json", 4096, (4080, 4082))


def prompt(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=True)


def submit(run: Run, text: str, constraint: Constraint | None, **sampling: object) -> Sequence:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": 60, **sampling})  # type: ignore[arg-type]
    return run.engine.submit(prompt(text), chosen, constraint)


def is_valid(sequence: Sequence) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(TOKENIZER.decode(sequence.output)))


def test_an_answer_that_ignores_its_end_goes_on_where_its_grammar_lets_it(adapter: Adapter) -> None:
    run = Run(adapter)
    letters = COMPILER.constraint(ConstraintSpec(GrammarSpec("regex", "[a-z ]*")))
    open_ended = submit(run, STORIES[0], letters, ignore_eos=True, temperature=1.5, seed=1, logit_bias={4080: 20, 4082: 20})
    closed = submit(run, STORIES[0], COMPILER.constraint(STRICT), ignore_eos=True)
    run.finish()

    assert (open_ended.finish, len(open_ended.output)) == ("length", 60)
    assert closed.finish == "stop"
    assert is_valid(closed)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
def test_constrained_and_free_rows_share_the_step_and_both_are_right(adapter: Adapter, pipelined: bool) -> None:
    free = answers(adapter, [prompt(story) for story in STORIES], 20)
    run = Run(adapter, dataclasses.replace(SMALL, pipelined=pipelined))
    strict = COMPILER.constraint(STRICT)
    plain, constrained = [], []
    for index, story in enumerate(STORIES):
        plain.append(run.submit(prompt(story), 20))
        constrained.append(submit(run, story, strict, temperature=0.6 * index, seed=index))
        run.turn()
    run.finish()

    assert [sequence.output for sequence in plain] == free
    assert [sequence.finish for sequence in constrained] == ["stop"] * 4
    assert all(is_valid(sequence) for sequence in constrained)


def test_a_constrained_answer_is_the_same_alone_and_in_a_crowd(adapter: Adapter) -> None:
    alone = Run(adapter)
    expected = submit(alone, "Once upon a time", COMPILER.constraint(STRICT), temperature=1.0, seed=3)
    alone.finish()
    run = Run(adapter)
    for story in STORIES:
        run.submit(prompt(story), 25)
    subject = submit(run, "Once upon a time", COMPILER.constraint(STRICT), temperature=1.0, seed=3)
    submit(run, "The dog was", COMPILER.constraint(ConstraintSpec(GrammarSpec("regex", "[a-f]{30}"))))
    run.finish()

    assert subject.output == expected.output


def test_forks_have_constraints_of_their_own(adapter: Adapter) -> None:
    run = Run(adapter)
    chosen = tuple(Sampling(max_tokens=60, temperature=2.0, seed=seed) for seed in range(4))
    forks = run.engine.submit_all(Submit((1, 2, 3, 4), prompt(STORIES[2]), chosen), COMPILER.constraint(STRICT))
    run.finish()

    assert all(is_valid(fork) for fork in forks)
    assert len({tuple(fork.output) for fork in forks}) > 1


def test_a_constraint_that_fails_ends_its_own_request(adapter: Adapter) -> None:
    class Failing(Constraint):
        def accept(self, token: int) -> None:
            if len(self._fed) == 3:
                raise RowFailed("on purpose")
            super().accept(token)

        def fork(self) -> Constraint:
            return self

    free = answers(adapter, [prompt(STORIES[0])], 20)[0]
    run = Run(adapter)
    neighbour = run.submit(prompt(STORIES[0]), 20)
    failing = submit(run, STORIES[1], Failing(COMPILER.compile(GrammarSpec("regex", "[a-z ]+")), None))
    good = submit(run, STORIES[1], COMPILER.constraint(STRICT))
    run.finish()

    assert (failing.finish, failing.error) == ("error", "on purpose")
    assert neighbour.output == free
    assert is_valid(good)


def test_a_grammar_that_breaks_in_its_mask_ends_its_own_request(adapter: Adapter) -> None:
    broken = COMPILER.compile(GrammarSpec("regex", "[a-z]+"))
    broken.inner.consume_token(prompt("9")[-1])  # an error it never leaves
    assert broken.inner.is_error()
    sticky = Constraint(_Same(broken.inner, broken.tokenizer), None)
    run = Run(adapter)
    neighbour = submit(run, STORIES[0], COMPILER.constraint(STRICT))
    failing = submit(run, STORIES[1], sticky)
    run.finish()

    assert failing.finish == "error"
    assert "grammar" in (failing.error or "")
    assert is_valid(neighbour)


class _Same(Matcher):
    def fork(self) -> Matcher:
        return self


def test_a_ban_that_leaves_no_token_is_an_error_of_its_own_row(adapter: Adapter) -> None:
    yes = COMPILER.constraint(ConstraintSpec(GrammarSpec("choice", '["yes"]')))
    bans = {token: -float("inf") for token in range(4096)}
    run = Run(adapter)
    neighbour = submit(run, STORIES[0], COMPILER.constraint(STRICT))
    failing = submit(run, STORIES[1], yes, logit_bias=bans)
    run.finish()

    assert failing.finish == "error"
    assert "no token is left" in (failing.error or "")
    assert is_valid(neighbour)


def test_an_answer_that_is_complete_at_its_last_token_was_not_cut(adapter: Adapter) -> None:
    yes = COMPILER.constraint(ConstraintSpec(GrammarSpec("choice", '["yes"]')))
    tokens = len(COMPILER.tokenizer.tokenize_str("yes"))
    run = Run(adapter)
    sequence = submit(run, STORIES[0], yes, max_tokens=tokens)
    run.finish()

    assert (TOKENIZER.decode(sequence.output), sequence.finish) == ("yes", "stop")


def test_a_budget_beside_plain_rows_holds_to_the_token(adapter: Adapter) -> None:
    close = COMPILER.tokenizer.tokenize_str("</think>", parse_special=True)[0]
    free = answers(adapter, [prompt(story) for story in STORIES], 30)
    run = Run(adapter)
    plain = [run.submit(prompt(story), 30) for story in STORIES]
    spec = ConstraintSpec(None, ReasoningSpec("<think>", "</think>", True, False, 5))
    thinking = [
        submit(run, f"Story {number}: once", COMPILER.constraint(spec), ignore_eos=True, temperature=1.0, seed=number)
        for number in range(3)
    ]
    run.finish()

    assert all(sequence.output.index(close) <= 5 for sequence in thinking)
    assert [sequence.output for sequence in plain] == free


def test_thinking_without_a_budget_leaves_room_for_the_answer(adapter: Adapter) -> None:
    (close,) = COMPILER.tokenizer.tokenize_str("</think>", parse_special=True)
    spec = ConstraintSpec(GrammarSpec("choice", '["yes"]'), ReasoningSpec("<think>", "</think>", True, False))
    run = Run(adapter)
    sequence = submit(run, STORIES[0], COMPILER.constraint(spec), max_tokens=20, logit_bias={close: -100.0})
    run.finish()

    assert sequence.finish == "stop"
    assert TOKENIZER.decode(sequence.output[sequence.output.index(close) + 1 :]) == "yes"


class Wire:
    """The channel of an engine whose front sends these messages, one a turn."""

    def __init__(self, *messages: Submit) -> None:
        self.messages = list(messages)
        self.sent: list[object] = []

    def receive(self, _seconds: float) -> list[Submit]:
        return [self.messages.pop(0)] if self.messages else []

    def send(self, message: object) -> None:
        self.sent.append(message)


def serve_all(host: Host, wire: Wire) -> None:
    """All of the front's messages, to the end."""
    for _ in range(1000):
        host.receive()
        concurrent.futures.wait([one.future for one in host.compiling])
        host.take_compiled()
        host.engine.turn()
        host.send_events()
        if not (wire.messages or host.compiling or host.live):
            break


def serve(run: Run, compiler: Compiler, *messages: Submit) -> dict[int, list[TokenEvent]]:
    """Serve messages until all their sequences have ended; the events of each."""
    wire = Wire(*messages)
    serve_all(Host(run.engine, compiler, wire, has_canary=False), wire)  # type: ignore[arg-type]
    events: dict[int, list[TokenEvent]] = {}
    for event in [event for message in wire.sent if isinstance(message, EngineEvents) for event in message.tokens]:
        events.setdefault(event.sequence, []).append(event)
    return events


def test_an_idle_engine_drops_grammars_that_were_asked_for_once_and_long_ago(adapter: Adapter) -> None:
    clock, compiler, run = Clock(), new_compiler(), Run(adapter, clock=Clock())
    compiler.cache = GrammarCache(clock)
    serve(run, compiler, Submit((0,), prompt(STORIES[0]), (GREEDY,), STRICT))
    run.finish()
    num_kept = len(compiler.cache)
    clock.now += ONCE_USED_SECONDS + 1
    Host(run.engine, compiler, Wire(), has_canary=False).receive()  # type: ignore[arg-type]

    assert (num_kept, len(compiler.cache)) == (1, 0)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


@pytest.mark.parametrize("fails", [True, False])
def test_the_grammar_of_a_row_that_failed_is_compiled_anew(adapter: Adapter, fails: bool) -> None:
    """Forks of one grammar share its lexer: an error that one of them has left there would be met by every later request."""
    compiler = new_compiler()
    run = Run(adapter, clock=Clock())  # compiling takes no time
    ids = TOKENIZER.encode(STORIES[0], add_special_tokens=False)
    run.engine.faults.rules = [Rule("accept", ids[0] if fails else -1, after=1)]
    events = serve(run, compiler, Submit((0,), ids, (GREEDY,), STRICT))

    assert (events[0][-1].finish == "error") == fails
    assert len(compiler.cache) == (0 if fails else 1)


def test_how_soon_a_grammar_is_there_tells_a_tenant_nothing_of_another(adapter: Adapter) -> None:
    class Counting(Compiler):
        num_compiled = 0

        def _compile(self, spec: GrammarSpec, *, is_private: bool = False) -> Matcher | GrammarRejected:
            self.num_compiled += 1
            return super()._compile(spec, is_private=is_private)

    compiler = Counting(FOLDER / "tokenizer.json", 4096, (4080, 4082))
    counts = []
    for number, (scope, salt) in enumerate([("anna", ""), ("anna", ""), ("ben", ""), ("anna", "own"), ("", "")]):
        serve(
            Run(adapter, clock=Clock()),
            compiler,
            Submit((number,), prompt(STORIES[0]), (GREEDY,), STRICT, scope=scope, salt=salt),
        )
        counts.append(compiler.num_compiled)

    assert counts == [1, 1, 2, 3, 4]


def test_one_thread_evaluates_arrays_while_others_compile_and_write(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating: set[int] = set()
    compiling: set[int] = set()

    def noting(function: Callable[..., Any], threads: set[int]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            threads.add(threading.get_ident())
            return function(*given, **named)

        return call

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, noting(getattr(mx, name), evaluating))
    compiler = Compiler(FOLDER / "tokenizer.json", 4096, (4080, 4082))
    monkeypatch.setattr(compiler, "constraint", noting(compiler.constraint, compiling))
    disk = DiskTier(tmp_path, "0" * 32, 1 << 30)
    disk.open()
    run = Run(adapter, dataclasses.replace(SMALL, cache_bytes=1 << 30), disk=disk, clock=Clock())
    chosen = (Sampling(temperature=0.0, max_tokens=8, ignore_eos=True),)
    wire = Wire(*(Submit((number,), prompt(story * 9), chosen, STRICT) for number, story in enumerate(STORIES)))
    host = Host(run.engine, compiler, wire, has_canary=True)  # type: ignore[arg-type]
    serve_all(host, wire)
    while host.canary is not None and host.canary.check():
        pass
    disk.close(10)

    assert disk.num_written > 4
    assert compiling
    assert evaluating == {threading.get_ident()}
    assert threading.get_ident() not in compiling


def test_a_resumed_answer_goes_on_as_if_it_had_not_been_interrupted(adapter: Adapter) -> None:
    whole = tokens_of(serve(Run(adapter, clock=Clock()), new_compiler(), Submit((0,), prompt(STORIES[0]), (GREEDY,), STRICT))[0])

    for count in (1, len(whole) // 2, len(whole) - 1):
        resumed = Submit((0,), prompt(STORIES[0]), (GREEDY,), STRICT, emitted=(tuple(whole[:count]),))
        events = serve(Run(adapter, clock=Clock()), new_compiler(), resumed)[0]

        assert tokens_of(events) == whole[count:]
        assert events[-1].finish == "stop"


def test_emitted_tokens_are_replayed_outside_of_the_engines_thread(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes a mask for each token: thousands of them would hold up every row."""
    threads: list[threading.Thread] = []
    replay = Constraint.replay

    def noted(constraint: Constraint, tokens: Iterable[int]) -> None:
        threads.append(threading.current_thread())
        replay(constraint, tokens)

    monkeypatch.setattr(Constraint, "replay", noted)
    emitted = tuple(COMPILER.tokenizer.tokenize_str('{"color"'))
    serve(Run(adapter, clock=Clock()), new_compiler(), Submit((0,), prompt(STORIES[0]), (GREEDY,), STRICT, emitted=(emitted,)))

    assert threads
    assert threading.main_thread() not in threads


def test_a_resumed_request_that_can_not_be_replayed_fails_alone(adapter: Adapter) -> None:
    broken = Submit((0, 1), prompt(STORIES[0]), (GREEDY, GREEDY), STRICT, emitted=(tuple(prompt("never")), ()))
    neighbour = Submit((2,), prompt(STORIES[1]), (GREEDY,), STRICT)
    compiler = new_compiler()
    events = serve(Run(adapter, clock=Clock()), compiler, neighbour, broken)

    for number in (0, 1):
        assert [event.finish for event in events[number]] == ["error"]
        assert "the grammar can not go on" in (events[number][0].error or "")
        assert events[number][0].is_refused
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(TOKENIZER.decode(tokens_of(events[2]))))
    assert len(compiler.cache) == 0  # what broke it may be in the lexer that later requests would share


def branching(text: str) -> dict[str, object]:
    """Two kinds of answers, of which the wild one exhausts the lexer behind a text that is longer than what compiling tries."""
    keyed = {"type": "object", "patternProperties": {"^.{1,5000}$": {"type": "string"}}}
    branches = [
        {"kind": {"const": "calm"}, "text": {"const": text}, "more": {"type": "string", "minLength": 40, "maxLength": 50}},
        {"kind": {"const": "wild"}, "text": {"const": text}, "keyed": keyed},
    ]
    shared = {"type": "object", "additionalProperties": False}
    return {"anyOf": [{**shared, "properties": branch, "required": list(branch)} for branch in branches]}


def leaning(letter: str) -> Sampling:
    """Greedy, with a strong preference for words that begin with a letter, and for another key instead of an end."""
    wanted = [token for token in range(4080) if TOKENIZER.decode([token]).startswith(letter)]
    return Sampling(temperature=0.0, max_tokens=200, logit_bias=dict.fromkeys([*wanted, *prompt('"')[-1:]], 50.0))


def test_a_grammar_that_is_exhausted_by_one_row_breaks_no_other_row(adapter: Adapter) -> None:
    """Rows under the same grammar share its lexer, and a lexer that has reached its limit is broken for all of them."""
    strict = ConstraintSpec(json_schema_grammar(branching("once upon a time there was a text; " * 8), True, "schema"))
    calm = Submit((0,), prompt(STORIES[0]), (leaning("c"),), strict)
    wild = Submit((1,), prompt(STORIES[1]), (leaning("w"),), strict)
    alone = serve(Run(adapter, clock=Clock()), new_compiler(), calm)[0]
    together = serve(Run(adapter, clock=Clock()), new_compiler(), calm, wild)

    assert together[1][-1].finish == "error"
    assert "use smaller counts" in (together[1][-1].error or "")
    assert tokens_of(together[0]) == tokens_of(alone)
    assert [event.finish for event in together[0]] == [event.finish for event in alone]
    assert sum(event.timings is not None for event in together[0]) == 2  # of the first token and the last


def test_a_grammar_that_is_exhausted_by_a_draft_breaks_no_answer(adapter: Adapter) -> None:
    """A line behind a draft token shares the lexer of its row, and may be where the answer never goes."""
    keyed = {"type": "object", "patternProperties": {"^.{1,5000}$": {"type": "string"}}}
    text = {"const": "once upon a time there was a text; " * 8}
    properties = {"text": text, "body": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, keyed]}}
    schema = {"type": "object", "additionalProperties": False, "properties": properties, "required": list(properties)}
    request = Submit((0,), prompt(STORIES[0]), (leaning("7"),), ConstraintSpec(json_schema_grammar(schema, True, "schema")))
    expected = serve(Run(adapter, clock=Clock()), new_compiler(), request)[0]
    run, wild = Run(adapter, clock=Clock()), COMPILER.tokenizer.tokenize_str('{"a":"b"')
    scripted.add_drafts(run, [wild], [lambda *_: tuple(wild)])
    events = serve(run, new_compiler(), request)[0]

    assert tokens_of(events) == tokens_of(expected)
    assert events[-1].finish == expected[-1].finish == "stop"
