"""Constraints on a sequence's next token, from its grammar and reasoning budget, and the token masks of a decode step.

A constraint belongs to its sequence and shares nothing mutable; it can be replayed over emitted ids.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from weft.errors import RowFailed
from weft.grammar.grammar_tokens import GrammarTokens
from weft.grammar.output_limits import OutputLimits
from weft.grammar.reasoning_budget import ReasoningBudget, ReasoningState

Mask = NDArray[np.bool_]  # (V,) or (rows, V): which tokens are allowed

SUSPICIOUS_SECONDS = 0.004  # of all masks of a step together: the next ones are measured one by one
MEASURED_STEPS = 16
LIMIT = re.compile(r"too (many|big|large)\b|fuel exhausted|_fuel\b|; max is ", re.IGNORECASE)  # of llguidance, in its words
ADVICE = "it is too complex: use smaller counts ({m,n}, maxLength, maxItems), fewer patterns and fewer alternatives"

NO_ANSWER = "NoExtensionBias"  # llguidance's only word where no text matches
CONTRADICTION = (
    "no text matches it: a part of it refers to nothing but itself, or asks for what excludes itself; change that part"
)


class Matcher:
    """The state of one sequence's grammar: which tokens it has accepted, and so which may come next."""

    def __init__(self, inner: LLMatcher, tokenizer: GrammarTokens, *, is_private: bool = False) -> None:
        self.inner = inner
        self.tokenizer = tokenizer
        self.is_private = is_private  # no other sequence shares its lexer

    def fork(self) -> Self:
        return type(self)(self.inner.deep_copy(), self.tokenizer, is_private=self.is_private)

    def accept(self, token: int) -> None:
        """Advance the grammar by a token. Raises RowFailed if the grammar does not allow that token next."""
        if not self.inner.consume_token(token):
            raise RowFailed(f"the grammar can not go on: {self.error}")

    def read(self, text: str) -> bool:
        """Advance the grammar by a text that is there already; return False if no answer begins with it."""
        tokens = self.tokenizer.tokenize_str(text)
        return self.inner.try_consume_tokens(tokens) == len(tokens) and not self.inner.is_error()

    def rollback(self, count: int) -> None:
        if count and not self.inner.rollback(count):
            raise RowFailed(f"the grammar can not go back: {self.error}")

    def allows(self, token: int) -> bool:
        return self.inner.validate_tokens([token]) == 1

    def mask(self) -> Mask:
        """Return the (V,) mask of tokens the grammar allows next, computed for this one sequence (not batched)."""
        bits = np.frombuffer(self.inner.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.tokenizer.vocab_size].astype(bool)

    @property
    def may_end(self) -> bool:
        """Whether the answer so far is complete, whatever may follow."""
        return self.inner.is_accepting()

    @property
    def error(self) -> str:
        """The error that the grammar never leaves again, in one line, with advice if it is a limit; empty if there is none."""
        words = self.inner.get_error().replace("<non-verbose/>", "").replace(NO_ANSWER, CONTRADICTION)
        line = " ".join(words.split())[:500]
        return f"{line}; {ADVICE}" if LIMIT.search(line) else line

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete, so that only an end-of-sequence token can follow."""
        return self.inner.is_stopped()


@dataclass(frozen=True)
class TokenDemand:
    """Which next tokens a sequence may take (grammar, allowed, forbidden and last-resort ids), as input for its mask row."""

    only: tuple[int, ...] | None = None  # it is one of these
    never: tuple[int, ...] = ()  # it is none of these
    matcher: Matcher | None = None  # the grammar allows it
    also: tuple[int, ...] = ()  # allowed beside what the grammar allows
    late: tuple[tuple[int, ...], ...] = ()  # groups, each allowed only where nothing else is
    within: Mask | None = None  # where it is chosen, it is one of these


class Constraint:
    """The constraints of one sequence: an optional reasoning budget, then an optional grammar; limits hold for all of it."""

    def __init__(self, matcher: Matcher | None, reasoning: ReasoningBudget | None, limits: OutputLimits | None = None) -> None:
        self.matcher = matcher
        self.reasoning = reasoning
        self.limits = limits
        self._begun = [b""]  # by token, where there are limits: their state
        self._history = [reasoning.begin() if reasoning is not None else ReasoningState("answer")]
        self._fed: list[int] = []  # by token: how many tokens the grammar took then

    def limit_to(self, max_tokens: int) -> None:
        """Limit reasoning, also without a budget, so that `max_tokens` leave room for the answer. Call before the first token."""
        if self.reasoning is not None:
            self.reasoning.limit_to(max_tokens)
            self._history = [self.reasoning.begin()]

    def fork(self) -> Self:
        other = type(self)(None if self.matcher is None else self.matcher.fork(), self.reasoning, self.limits)
        other._history, other._fed, other._begun = list(self._history), list(self._fed), list(self._begun)
        return other

    def demand(self, ends: tuple[int, ...], *, is_endless: bool = False, is_early: bool = False) -> TokenDemand | None:
        """Return the conditions on the next token, or None if any token may come. `ends` are the sequence's stop tokens.

        `is_early`: the answer may not end yet. A stop token that its grammar needs goes on with it.
        """
        found = self._demand(ends, is_endless=is_endless, is_early=is_early)
        if self.limits is None or (found is not None and found.only is not None):
            return found
        return replace(found or TokenDemand(), within=self.limits.mask(self._begun[-1]))

    def _demand(self, ends: tuple[int, ...], *, is_endless: bool = False, is_early: bool = False) -> TokenDemand | None:
        """Return what reasoning and grammar demand."""
        now = self._history[-1]
        if now.forced:
            return TokenDemand(only=now.forced[:1])
        is_reasoning = now.phase == "reasoning" and self.reasoning is not None
        if self.matcher is None or is_reasoning:
            never = ends if is_early or self.matcher is not None else ()  # no end before the answer
            never += self.reasoning.never(now) if self.reasoning is not None and is_reasoning else ()
            return TokenDemand(never=never) if never else None
        opening = self.reasoning.opening(now) if self.reasoning is not None else ()
        matcher = self._matcher_after(now.undecided)
        if matcher is None:
            return TokenDemand(only=opening)
        late = _late(matcher, ends, is_endless=is_endless, is_early=is_early)
        return TokenDemand(matcher=matcher, also=opening, late=late)

    def _matcher_after(self, undecided: tuple[int, ...]) -> Matcher | None:
        """Return the matcher as if it had taken the undecided tokens; None if it refuses them: they begin the open marker."""
        if not undecided or self.matcher is None:
            return self.matcher
        fork = self.matcher.fork()
        return fork if all(map(fork.inner.consume_token, undecided)) else None

    @property
    def may_end(self) -> bool:
        """Whether a stop token ends the answer here: there is no grammar, or the answer is complete."""
        if self.matcher is None:
            return True
        now = self._history[-1]
        if now.forced or now.phase == "reasoning":
            return False
        matcher = self._matcher_after(now.undecided)
        return matcher is not None and matcher.may_end

    def accept(self, token: int) -> None:
        """Advance grammar or reasoning budget by the sampled token. Raises RowFailed, which fails this sequence alone."""
        now = self._history[-1]
        after = now if self.reasoning is None or self._is_answering(now) else self.reasoning.after(now, token)
        is_answer = not now.forced and now.phase != "reasoning" and after.phase == "answer"
        taken = (*now.undecided, token) if is_answer and self.matcher is not None else ()
        for one in taken:
            assert self.matcher is not None
            self.matcher.accept(one)
        self._history.append(after)
        self._fed.append(len(taken))
        if self.limits is not None:
            self._begun.append(self.limits.after(self._begun[-1], token))

    def ahead(self, tokens: Iterable[int]) -> Iterator[Self]:
        """Yield the constraint as it will be after each of these tokens, up to the first that it refuses."""
        now = self
        for token in tokens:
            now = now._light_fork()
            try:
                now.accept(token)
            except RowFailed:
                return
            yield now

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next, because nothing else may; () where there is a choice or the answer may end."""
        now = self._history[-1]
        is_answering = now.phase == "answer" or self.reasoning is None
        if now.forced or not is_answering or self.matcher is None or self.matcher.is_finished:
            return now.forced
        return tuple(self.matcher.fork().inner.compute_ff_tokens())

    def forced_token(self) -> int | None:
        """Return the only token that may come next; None where there is a choice or the answer may end."""
        tokens = self.forced()
        if not tokens or (self.limits is not None and not self._history[-1].forced):
            return None
        if self._history[-1].forced or self.matcher is None:
            return tokens[0]
        # What llguidance forces is all that its mask allows; were it not, the token would be no more than a good guess.
        mask = int.from_bytes(self.matcher.inner.compute_bitmask(), "little")
        return tokens[0] if mask == 1 << tokens[0] else None

    def _light_fork(self) -> Self:
        """Return a fork that can not go back behind this state."""
        other = type(self)(None if self.matcher is None else self.matcher.fork(), self.reasoning, self.limits)
        other._history, other._begun = self._history[-1:], self._begun[-1:]
        return other

    def replay(self, tokens: Iterable[int]) -> None:
        """Advance over tokens that were emitted before, by the calls that sampling them took. Raises RowFailed.

        The masks are not used, but llguidance limits the work done since the last one: without them a long answer fails that
        did not fail when it was generated.
        """
        for token in tokens:
            demand = self._demand(())
            if demand is not None and demand.matcher is not None:
                demand.matcher.inner.compute_bitmask()
            self.accept(token)

    def _is_answering(self, now: ReasoningState) -> bool:
        """Whether all that comes is for the grammar: the reasoning is over and does not open again."""
        return self.matcher is not None and now.phase == "answer" and not now.forced

    def rollback(self, count: int) -> None:
        if count:
            if self.matcher is not None:
                self.matcher.rollback(sum(self._fed[-count:]))
            del self._history[-count:]
            del self._fed[-count:]
            if self.limits is not None:
                del self._begun[-count:]

    @property
    def may_be_broken_by_others(self) -> bool:
        """Whether the grammar has failed for good, and other sequences share the lexer in which it may have failed."""
        return self.matcher is not None and not self.matcher.is_private and self.matcher.inner.is_error()

    @property
    def is_finished(self) -> bool:
        return self.matcher is not None and self._history[-1].phase == "answer" and self.matcher.is_finished


def _late(matcher: Matcher, ends: tuple[int, ...], *, is_endless: bool, is_early: bool) -> tuple[tuple[int, ...], ...]:
    """Return groups of tokens that come only where nothing else may: all that would end an answer too early, then the model's."""
    is_end = is_early and matcher.may_end  # elsewhere a stop token is text
    eos = tuple(matcher.tokenizer.eos_tokens)
    stops = ((*{*ends, *eos},),) if is_end else ()
    return (*stops, eos) if is_end or is_endless else ()


class Masks:
    """Computes the masks of allowed tokens for the rows of a step, for one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seconds: dict[int, float] = {}  # by row: what its mask of the last step took of a core, where that was measured
        self._executor: LLExecutor | None = None
        self._num_measured = 0  # steps for which masks are still filled one by one, to see whose is slow

    def fill(self, demands: Sequence[TokenDemand | None]) -> tuple[Mask | None, dict[int, str]]:
        """Return the (rows, vocab) mask of allowed tokens, None if no row has a demand, and grammar errors by row index."""
        self.seconds = {}
        if not any(demands):
            return None, {}
        matchers = {row: one.matcher for row, one in enumerate(demands) if one is not None and one.matcher is not None}
        allowed, errors = self._matched(len(demands), matchers)
        for row, demand in enumerate(demands):
            try:
                if demand is not None:
                    _apply(demand, allowed[row])
            except IndexError:  # this row alone can not go on
                errors[row] = "it needs a token that the model does not have"
        return allowed, errors

    def _matched(self, rows: int, matchers: dict[int, Matcher]) -> tuple[Mask, dict[int, str]]:
        words = max([-(-self.vocab_size // 32), *(one.tokenizer.mask_words for one in matchers.values())])
        bits = np.full((rows, words), -1, np.int32)
        if len(matchers) == 1 or self._num_measured:
            self._fill_measured(matchers, bits)
        elif matchers:
            started = time.perf_counter()
            self._executor = self._executor or LLExecutor()
            pairs = [(matcher.inner, row) for row, matcher in matchers.items()]
            self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, words * 4, rows)
            if time.perf_counter() - started > SUSPICIOUS_SECONDS:
                self._num_measured = MEASURED_STEPS
        errors = {row: matcher.error for row, matcher in matchers.items() if matcher.inner.is_error()}
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self.vocab_size]
        return unpacked.view(bool), errors

    def _fill_measured(self, matchers: dict[int, Matcher], bits: NDArray[np.int32]) -> None:
        """Fill masks one by one and note what each took."""
        for row, matcher in matchers.items():
            started = time.thread_time()
            matcher.inner.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits.shape[1] * 4)
            self.seconds[row] = time.thread_time() - started
        is_slow = any(seconds > SUSPICIOUS_SECONDS / 2 for seconds in self.seconds.values())
        self._num_measured = MEASURED_STEPS if is_slow else max(0, self._num_measured - 1)


def _apply(demand: TokenDemand, allowed: Mask) -> None:
    """Change the mask (V,) of one row, in which a matcher has left what its grammar allows."""
    if demand.only is not None:
        allowed[:] = False
        allowed[list(demand.only)] = True
    if demand.never:
        allowed[list(demand.never)] = False
    if demand.within is not None:
        allowed &= demand.within
    if demand.also:
        allowed[list(demand.also)] = True
    for group in demand.late:
        if allowed.sum() > allowed[list(group)].sum():
            allowed[list(group)] = False
