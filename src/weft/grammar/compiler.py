"""What an answer must look like becomes a matcher, off the loop: in a thread, under limits, with a cache.

llguidance does the work; what it can not do is refused in its own words. Nobody waits for a compile but who asked for it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from weft.errors import GrammarRejected
from weft.grammar.constraint import Constraint, ForbiddenText, Matcher, ReasoningBudget
from weft.ipc.messages import JSON_OPTIONS, ConstraintSpec, GrammarSpec

MAX_CACHED = 64
WORKERS = 4  # so that a slow compile is its owner's trouble alone
QUICK_SECONDS = 0.004  # of a core: most compiles are over by then; one that is not has all others go before it
TICK_SECONDS = 0.002
STACK_BYTES = 256 << 20  # llguidance recurses over chains of references; the usual stack ends at a thousand of them
MAX_USES = 256  # forks share a lexer whose states only grow; after so many a grammar is compiled anew


class Compiler:
    """Compiles for one model's vocabulary."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.path = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._cache: OrderedDict[GrammarSpec, tuple[Matcher | GrammarRejected, int]] = OrderedDict()  # and its uses
        self._known_shunned: dict[str, ForbiddenText] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WORKERS, "compile")

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's view of the vocabulary; read at the first constraint."""
        text = self.path.read_text(encoding="utf-8")
        eos = list(self.eos_token_ids) or None
        found = LLTokenizer(text, eos_token=eos)
        return found if found.vocab_size >= self.vocab_size else LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)

    def start(self, spec: ConstraintSpec) -> Future[Constraint]:
        """Compile in the background."""
        return self._pool.submit(self._aside, spec)

    def _aside(self, spec: ConstraintSpec) -> Constraint:
        """A constraint, made in a thread with a deep stack. It steps back when it takes long, which can not be taken back."""
        made: Future[Constraint] = Future()

        def make() -> None:
            try:
                made.set_result(self.constraint(spec))
            except Exception as error:  # told to who asked for it
                made.set_exception(error)
            except BaseException as error:  # so a panic of llguidance's comes: it must end neither the wait nor the engine
                made.set_exception(GrammarRejected(f"the constraint could not be compiled: {error}"))

        thread = threading.Thread(target=make, name="compiling", daemon=True)
        with self._lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        while thread.is_alive() and _seconds_used(thread) < QUICK_SECONDS:
            thread.join(TICK_SECONDS)
        if thread.is_alive():
            _step_back(thread)
        return made.result()

    def constraint(self, spec: ConstraintSpec) -> Constraint:
        """A fresh constraint. Raises GrammarRejected."""
        matcher = None if spec.grammar is None else self.compile(spec.grammar)
        thinking = None
        if spec.thinking is not None:
            thinking = ReasoningBudget(
                spec.thinking, self.tokenizer, self._shunned(spec.thinking.forbidden), before_grammar=matcher is not None
            )
        return Constraint(matcher, thinking)

    def _shunned(self, text: str) -> ForbiddenText:
        """Of texts that must not come there are few: the trigger of the model's tools."""
        if text not in self._known_shunned:
            self._known_shunned[text] = ForbiddenText(text, self.tokenizer)
        return self._known_shunned[text]

    def compile(self, spec: GrammarSpec) -> Matcher:
        """A fresh matcher, made or taken from the cache. Raises GrammarRejected, for what was refused before at once."""
        with self._lock:
            found, uses = self._cache.pop(spec, (None, 0))
        if found is None or uses >= MAX_USES:
            found, uses = self._compile(spec), 0
        with self._lock:
            self._cache[spec] = found, uses + 1
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        if isinstance(found, GrammarRejected):
            raise found
        return found.fork()

    def _compile(self, spec: GrammarSpec) -> Matcher | GrammarRejected:
        try:
            grammar = _grammar(spec)
        except Exception as error:  # llguidance's converters raise bare ones; whatever they say is about this text alone
            return GrammarRejected(f"the {spec.kind} can not be read: {error}")
        inner = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_limits(spec.kind))
        if why := inner.get_error():
            return GrammarRejected(f"the {spec.kind} can not be enforced: {_first_lines(why)}")
        matcher = Matcher(inner, self.tokenizer)
        if why := _tried(matcher.fork()):
            return GrammarRejected(f"the {spec.kind} can not be enforced: {_first_lines(why)}")
        return matcher


def _grammar(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json_schema":
            schema = json.loads(spec.text)
            options = {**JSON_OPTIONS, "lenient": spec.lenient}
            return LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=options)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            texts = json.loads(spec.text)
            if not texts:
                raise ValueError("it has nothing to choose from")
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts))
        case "lark":
            return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
        case "structural_tag":
            return _tags(json.loads(spec.text))


def _tags(tag: dict[str, object]) -> str:
    """{"structures": [{begin, schema, end}], "triggers": […]}: free text in which each begin is followed by its schema."""
    triggers, structures = tag["triggers"], tag["structures"]
    assert isinstance(triggers, list), "triggers must be a list"
    assert isinstance(structures, list), "structures must be a list"
    tags = [
        StructTag(
            trigger=next(trigger for trigger in triggers if one["begin"].startswith(trigger)),
            begin=one["begin"],
            grammar=one["schema"],
            end=one["end"],
        )
        for one in structures
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _limits(kind: str) -> LLParserLimits:
    """Measured on two Zen 4 cores: with these a compile stays below a second, but for what the front counts itself."""
    rows = 8_000 if kind == "json_schema" else 1_000
    return LLParserLimits(verbose_errors=False, max_grammar_size=30_000, max_items_in_row=rows)


def _tried(matcher: Matcher) -> str:
    """What goes wrong in the first steps."""
    for _ in range(8):
        mask = matcher.mask()
        if matcher.inner.is_error() or matcher.is_finished:
            break
        mask[matcher.tokenizer.eos_token] = False
        if not mask.any() or not matcher.inner.consume_token(int(mask.argmax())):
            break
    return matcher.inner.get_error()


def _first_lines(words: str) -> str:
    return " ".join(line.strip() for line in words.strip().splitlines()[:4])[:500]


def _seconds_used(thread: threading.Thread) -> float:
    """Of a core, by a thread that runs; where nobody tells, as many as you like."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):  # it has just ended, or this is no Linux
        return math.inf


def _step_back(thread: threading.Thread) -> None:
    """Let a compile yield to the engine's own threads: they wait for each other, and one that is held up holds up all."""
    if sys.platform == "linux" and thread.native_id is not None:
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
