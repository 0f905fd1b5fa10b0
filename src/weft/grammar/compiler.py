"""Compiles constraints (grammar and reasoning rules) in threads of their own, under limits; grammars are kept for later requests.

llguidance compiles; a grammar that it can not enforce is refused with its message. A slow compile delays only its own request.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, StructTag
from numpy.typing import NDArray

from weft.errors import GrammarRejected
from weft.fair_pool import FairPool
from weft.grammar.constants import constants_of
from weft.grammar.constraint import Constraint, Mask, Matcher
from weft.grammar.gbnf import to_lark
from weft.grammar.grammar_cache import NOBODY, GrammarCache, Owner
from weft.grammar.grammar_tokens import GrammarTokens
from weft.grammar.json_rules import with_number_rules, with_number_rules_within
from weft.grammar.output_limits import ForbiddenTexts, OutputLimits
from weft.grammar.reasoning_budget import CutCharacters, ReasoningBudget
from weft.ipc.messages import JSON_OPTIONS, ConstraintSpec, GrammarSpec

Made = TypeVar("Made")

WORKERS = 4  # compiles at the same time, so that a slow one does not hold up the others
QUICK_SECONDS = 0.004  # of a core: most compiles are over by then; a longer one yields to all other threads
TICK_SECONDS = 0.002
LOW_PRIORITY = 10  # of a slow compile: a tenth of the time of a thread that competes with it
# llguidance recurses over chains of references; the usual stack ends at a thousand of them. Python sets stack sizes for the
# whole process, so the engine's process sets this one before it starts its first thread.
DEEP_STACK_BYTES = 256 << 20
STEP_FUEL = 500_000  # of the lexer for one mask: 15 ms of a Zen 4 core. Under llguidance's 200,000 a key of ^.{1,500}$ fails
MIN_TRIAL_TOKENS, MAX_TRIAL_TOKENS = 8, 64  # of an answer that is tried when a grammar is compiled
TRIAL_SECONDS = 0.1  # of a core; after that a trial has no more than its fewest tokens
MAX_SHOWN = 80  # characters of the beginning of an answer, in a message
# Earley items that the parser may have after a token. The more ways there are to read an answer the more items, and the time of a
# mask grows with their square: where a text can be read in every way there are 1,000 after 240 tokens, and a mask takes 600 ms.
MAX_ITEMS = {"json_schema": 8_000, "regex": 1_000, "choice": 1_000, "lark": 1_000, "structural_tag": 1_000}
# While a client's own grammar is tried, in bytes and items: one for each byte, as a list has that names itself last, is fewer.
MAX_TRIAL_BYTES, MAX_TRIAL_ITEMS = 112, 150


class Compiler:
    """Compiles constraints for one model's vocabulary in a thread pool, and caches the compiled grammars."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.path = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.cache = GrammarCache()
        self._forbidden: dict[str, ForbiddenTexts] = {}
        self._pool = FairPool(WORKERS, "compile")
        self._replay_pool = FairPool(WORKERS, "replay")  # so that new requests do not wait behind long replays

    @cached_property
    def tokenizer(self) -> GrammarTokens:
        return GrammarTokens(self.path, self.vocab_size, self.eos_token_ids)

    @cached_property
    def _token_lengths(self) -> NDArray[np.int32]:
        tokenizer = self.tokenizer
        return np.array([len(tokenizer.decode_bytes([token])) for token in range(tokenizer.vocab_size)], np.int32)

    @cached_property
    def _cut_characters(self) -> CutCharacters:
        return CutCharacters(self.tokenizer)

    def start(
        self,
        spec: ConstraintSpec,
        make: Callable[[Constraint], Made],
        owner: Owner = NOBODY,
        *,
        is_replay: bool = False,
        is_private: bool = False,
    ) -> Future[Made]:
        """Compile a constraint and call `make` with it, in one thread; the future has what `make` returns, or the error."""
        pool = self._replay_pool if is_replay else self._pool
        return pool.submit(owner[0], lambda: _run_aside(lambda: make(self.constraint(spec, owner, is_private=is_private))))

    def constraint(self, spec: ConstraintSpec, owner: Owner = NOBODY, *, is_private: bool = False) -> Constraint:
        """Return a new constraint for one request; its grammar is kept for its owner's next ones unless it is private.

        Raises GrammarRejected.
        """
        matcher = None if spec.grammar is None else self._begun(spec.grammar, spec.begun, owner, is_private)
        has_limits = spec.allowed_tokens is not None or spec.bad_words
        limits = OutputLimits(spec.allowed_tokens, spec.bad_words, self.tokenizer) if has_limits else None
        if spec.reasoning is None:
            return Constraint(matcher, None, limits)
        text = spec.reasoning.forbidden  # the trigger of the model's tool calls, so there are few of them
        if text not in self._forbidden:
            self._forbidden[text] = ForbiddenTexts((text,), self.tokenizer)
        before, texts = matcher is not None, (self._forbidden[text], self._cut_characters)
        return Constraint(matcher, ReasoningBudget(spec.reasoning, self.tokenizer, *texts, before_grammar=before), limits)

    def _begun(self, grammar: GrammarSpec, text: str, owner: Owner, is_private: bool) -> Matcher:
        """Return a new matcher that has read the beginning of an answer. Raises GrammarRejected if there is none such."""
        matcher = self.compile(grammar, owner, is_private=is_private)
        if text and not matcher.read(text):
            shown = json.dumps(text[-MAX_SHOWN:], ensure_ascii=False)
            message = f"no answer in the form that is asked for begins as the last message does (it ends with {shown})"
            raise GrammarRejected(f"{message}; change that message, or ask for another form or none", "messages")
        return matcher

    def forget(self, spec: ConstraintSpec, owner: Owner = NOBODY) -> None:
        """Drop a constraint's grammar from the cache: forks share its lexer, so one's error would be met by all later ones."""
        if spec.grammar is not None:
            self.cache.forget(owner, spec.grammar)

    def compile(self, spec: GrammarSpec, owner: Owner = NOBODY, *, is_private: bool = False) -> Matcher:
        """Return a new matcher for a grammar, forked from the cached one unless private. Raises GrammarRejected, also cached."""
        found = self._compile(spec, is_private=True) if is_private else self._cached(spec, owner)
        if isinstance(found, GrammarRejected):
            raise found
        return found.fork()

    def _cached(self, spec: GrammarSpec, owner: Owner) -> Matcher | GrammarRejected:
        found = self.cache.take(owner, spec)
        if found is None:
            found = self._compile(spec)
            self.cache.keep(owner, spec, found)
        return found

    def _compile(self, spec: GrammarSpec, *, is_private: bool = False) -> Matcher | GrammarRejected:
        try:
            grammar = _grammar(spec)
        except Exception as error:  # llguidance's converters raise bare ones; whatever they say is about this text alone
            return GrammarRejected(f"the {spec.kind} can not be read: {error}")
        if (letter := self._unwritable(spec)) is not None:
            return GrammarRejected(f"the {spec.kind} can not be enforced: this model has no tokens for {letter!r}; leave it out")
        # Under these limits a compile stays below a second on two Zen 4 cores, but for what the front bounds itself.
        matcher = self._matcher(grammar, MAX_ITEMS[spec.kind], is_private=is_private)
        why = matcher.error or _error_of_trials(matcher)
        if why and grammar != (plain := _plain_grammar(spec, grammar)):
            matcher = self._matcher(plain, MAX_ITEMS[spec.kind], is_private=is_private)
            why = matcher.error or _error_of_trials(matcher)
        if not why and spec.kind == "lark" and not spec.is_ours:
            why = _error_of_ambiguity(self._matcher(grammar, MAX_TRIAL_ITEMS), self._token_lengths)
        if why:
            return GrammarRejected(f"the {spec.kind} can not be enforced: {why}")
        return matcher

    def _unwritable(self, spec: GrammarSpec) -> str | None:
        """Return a character of the grammar's constants that the model has no tokens for; None if there is none."""
        if self.tokenizer.has_every_byte:
            return None
        found = (self.tokenizer.unwritable(text) for text in constants_of(spec))
        return next((letter for letter in found if letter is not None), None)

    def _matcher(self, grammar: str, max_items: int, *, is_private: bool = False) -> Matcher:
        limits = LLParserLimits(
            verbose_errors=False, max_grammar_size=30_000, max_items_in_row=max_items, step_lexer_fuel=STEP_FUEL
        )
        inner = LLMatcher(self.tokenizer.inner, grammar, log_level=0, limits=limits)
        return Matcher(inner, self.tokenizer, is_private=is_private)


def _run_aside(make: Callable[[], Made]) -> Made:
    """Call `make` in a new thread and block until it is done; a slow one gets a low priority."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # raised where the result is read
            made.set_exception(error)
        except BaseException as error:  # a panic in llguidance: it must end neither the wait nor the engine
            made.set_exception(GrammarRejected(f"the constraint could not be compiled: {error}"))

    thread = threading.Thread(target=run, name="compiling", daemon=True)
    thread.start()
    while thread.is_alive() and _cpu_seconds(thread) < QUICK_SECONDS:
        thread.join(TICK_SECONDS)
    if thread.is_alive():
        _lower_priority(thread)
    return made.result()


def _grammar(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json_schema":
            own = with_number_rules(spec.text, _json_options(spec))
            return LLMatcher.grammar_from_lark(own) if own else _json_grammar(spec)
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            texts = json.loads(spec.text)
            if not texts:
                raise ValueError("it has nothing to choose from")
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts))
        case "lark":
            grammar = to_lark(spec.text)
            return LLMatcher.grammar_from_lark(with_number_rules_within(grammar) if spec.is_ours else grammar)
        case "structural_tag":
            return _tags(json.loads(spec.text))


def _plain_grammar(spec: GrammarSpec, grammar: str) -> str:
    """Return a grammar in which numbers are left to llguidance; the given one if weft has written no rules for numbers there."""
    if spec.kind == "json_schema":
        return _json_grammar(spec)
    return LLMatcher.grammar_from_lark(to_lark(spec.text)) if spec.kind == "lark" and spec.is_ours else grammar


def _json_grammar(spec: GrammarSpec) -> str:
    schema = json.loads(spec.text)
    options = _json_options(spec)
    return LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=options)  # type: ignore[arg-type]


def _json_options(spec: GrammarSpec) -> dict[str, object]:
    return {**JSON_OPTIONS, "lenient": spec.lenient}


def _tags(tag: dict[str, object]) -> str:
    """Return the grammar of {"structures": [{begin, schema, end}], "triggers": […]}: free text with schemas after their begin."""
    triggers, structures = tag["triggers"], tag["structures"]
    assert isinstance(triggers, list), "triggers must be a list"
    assert isinstance(structures, list), "structures must be a list"
    tags = []
    for place, one in enumerate(structures):
        if missing := {"begin", "schema", "end"} - one.keys():
            raise ValueError(f"structures[{place}] has no {sorted(missing)[0]}; each has a begin, a schema and an end")
        trigger = next((trigger for trigger in triggers if one["begin"].startswith(trigger)), None)
        if trigger is None:
            begin, known = (json.dumps(words, ensure_ascii=False)[:MAX_SHOWN] for words in (one["begin"], triggers))
            raise ValueError(
                f"structures[{place}].begin {begin} begins with none of the triggers {known}; add one that it begins with"
            )
        tags.append(StructTag(trigger=trigger, begin=one["begin"], grammar=one["schema"], end=one["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


def _error_of_trials(matcher: Matcher) -> str:
    """Try the beginnings of two answers and return the error that this causes; an empty string if there is none.

    One ends strings and goes on to the next property wherever it may, to see much of a schema; the other takes any token.
    """
    chance = np.random.default_rng(0)
    brief = [matcher.tokenizer.tokenize_str(text)[0] for text in ('"', ",")]

    def take_brief(mask: Mask) -> int:
        return next((token for token in brief if mask[token]), int(mask.argmax()))

    def take_any(mask: Mask) -> int:
        return int(chance.choice(np.flatnonzero(mask)))

    return _error_of_trial(matcher.fork(), take_brief) or _error_of_trial(matcher.fork(), take_any)


def _error_of_ambiguity(matcher: Matcher, lengths: NDArray[np.int32]) -> str:
    """Try MAX_TRIAL_BYTES of an answer of the longest tokens, which have the most ways to be read; return the error."""
    num_bytes = 0
    while num_bytes < MAX_TRIAL_BYTES and not (matcher.error or matcher.is_finished):
        mask = matcher.mask()
        mask[matcher.tokenizer.eos_tokens] = False
        if not mask.any():
            break
        token = int(np.where(mask, lengths, -1).argmax())
        num_bytes += max(1, int(lengths[token]))
        matcher.inner.consume_token(token)
    return matcher.error


def _error_of_trial(matcher: Matcher, take: Callable[[Mask], int]) -> str:
    until = time.thread_time() + TRIAL_SECONDS
    for step in range(MAX_TRIAL_TOKENS):
        mask = matcher.mask()
        mask[matcher.tokenizer.eos_tokens] = False
        is_over = step >= MIN_TRIAL_TOKENS and time.thread_time() > until
        if is_over or matcher.error or matcher.is_finished or not mask.any():
            break
        matcher.inner.consume_token(take(mask))
    return matcher.error


def _cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time that a thread has used, in seconds; infinity if it has ended or the system is not Linux."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):  # it has just ended, or this is no Linux
        return math.inf


def _lower_priority(thread: threading.Thread) -> None:
    """Let a compiling thread yield to the engine's threads, which wait for each other: one delayed delays all. Linux only.

    Not below all others (SCHED_IDLE): where they leave it no time while it holds the interpreter's lock, the engine stands still.
    """
    if sys.platform == "linux" and thread.native_id is not None:
        with suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id, LOW_PRIORITY)
