"""One sequence's rule of what may come next: the thinking with its budget first, then the grammar.

A constraint belongs to its sequence and shares nothing that changes. It says what it wants (`demand`), takes each token
(`accept`), takes tokens back (`rollback`), and can be replayed over given ids. Knows tokens and bytes, nothing of batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from weft.errors import RowFailed
from weft.ipc.messages import ReasoningSpec

ANSWER_TOKENS = 256  # of a limited answer so many, or half of it, are kept from the thinking


class Matcher:
    """A grammar's position inside one sequence."""

    def __init__(self, inner: LLMatcher, tokenizer: LLTokenizer) -> None:
        self.inner = inner
        self.tokenizer = tokenizer

    def fork(self) -> Matcher:
        """Another one at the same position."""
        return Matcher(self.inner.deep_copy(), self.tokenizer)

    def accept(self, token: int) -> None:
        """Take a token. Raises RowFailed when the grammar does not have it here."""
        if not self.inner.consume_token(token):
            raise RowFailed(f"the grammar can not go on: {self.inner.get_error()[:300]}")

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""
        if count and not self.inner.rollback(count):
            raise RowFailed(f"the grammar can not go back: {self.inner.get_error()[:300]}")

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        return self.inner.validate_tokens([token]) == 1

    def mask(self) -> NDArray[np.bool_]:
        """(V,) what may come next; the plain way, for tests and for the first look at a new grammar."""
        bits = np.frombuffer(self.inner.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.tokenizer.vocab_size].astype(bool)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return tuple(self.tokenizer.eos_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end can follow."""
        return self.inner.is_stopped()


@dataclass(frozen=True)
class TokenDemand:
    """What a constraint wants of the next token: all of these conditions."""

    only: tuple[int, ...] | None = None  # one of these
    never: tuple[int, ...] = ()  # none of these
    matcher: Matcher | None = None  # what the grammar has here
    also: tuple[int, ...] = ()  # beside the grammar: these
    late: tuple[int, ...] = ()  # these only where nothing else may come


@dataclass(frozen=True)
class ReasoningState:
    """Where the thinking stands. Frozen, so that taking tokens back is going back to an earlier one."""

    phase: str  # "start": it may begin; "thinking"; "answer"
    tail: bytes = b""  # the last bytes, in which a marker may be under way
    spent: int = 0  # tokens thought
    late: int = 0  # tokens beyond the budget, waiting for the end of a character
    forced: tuple[int, ...] = ()  # tokens that must come next
    then: str = "answer"  # the phase after them


class ForbiddenText:
    """Which tokens would complete a text that must not come. Made once for a vocabulary."""

    def __init__(self, text: str, tokenizer: LLTokenizer) -> None:
        self.data = text.encode()
        self._whole: list[int] = []  # tokens that have it whole
        self._rest: list[list[int]] = [[] for _ in self.data]  # tokens that begin with what is left of it after so many bytes
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        for token in range(tokenizer.vocab_size) if text else ():
            data = tokenizer.decode_bytes([token])
            if self.data in data:
                self._whole.append(token)
            for begun in range(1, len(self.data)) if data[:1] in self.data else ():
                if data.startswith(self.data[begun:]):
                    self._rest[begun].append(token)

    def after(self, tail: bytes) -> tuple[int, ...]:
        """The tokens that may not follow these bytes."""
        begun = tuple(length for length in range(1, len(self.data)) if tail.endswith(self.data[:length]))
        if begun not in self._known:
            self._known[begun] = tuple({*self._whole, *(token for length in begun for token in self._rest[length])})
        return self._known[begun]


class ReasoningBudget:
    """Counts the thinking and ends it when its budget is spent. Markers may be one token or several."""

    def __init__(self, spec: ReasoningSpec, tokenizer: LLTokenizer, forbidden: ForbiddenText, *, before_grammar: bool) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.forbidden = forbidden
        self.before_grammar = before_grammar
        self.open_bytes, self.close_bytes = spec.open.encode(), spec.close.encode()
        self.open_ids = tuple(tokenizer.tokenize_str(spec.open, parse_special=True))
        self.close_ids = tuple(tokenizer.tokenize_str(spec.close, parse_special=True))
        self.gap_ids = tuple(tokenizer.tokenize_str(spec.gap)) if spec.gap else ()
        self.budget = spec.budget

    def begin(self) -> ReasoningState:
        """Where it stands before the first token."""
        first = ReasoningState("thinking" if self.spec.opened else "start" if self.spec.may_open else "answer")
        return self._checked(first) if self.spec.opened else first

    def limit_to(self, max_tokens: int) -> None:
        """Keep room for the answer: thinking must not eat all of it."""
        room = max_tokens - min(ANSWER_TOKENS, max_tokens // 2) - len(self.close_ids) - len(self.gap_ids)
        self.budget = max(0, room if self.budget is None else min(self.budget, room))

    def after(self, thought: ReasoningState, token: int) -> ReasoningState:
        """Where the thinking stands after a token."""
        if thought.forced:
            rest = thought.forced[1:]
            return replace(thought, forced=rest) if rest else self._entered(thought)
        data = self._bytes(token)
        match thought.phase:
            case "thinking":
                return self._thought(thought, data)
            case "start":
                return self._started(thought, token, data)
            case _:  # a model may open its thinking again; only a token that means nothing else counts as that
                return self._entered(replace(thought, then="thinking")) if self.open_ids == (token,) else thought

    def _thought(self, thought: ReasoningState, data: bytes) -> ReasoningState:
        seen = thought.tail + data
        if self.close_bytes in seen:
            left = seen.partition(self.close_bytes)[2]
            if self.before_grammar and left.strip():
                raise RowFailed(f"the answer began inside the token that closed the thinking ({left[:20]!r})")
            gap = self.gap_ids if self.before_grammar and not left else ()  # a grammar has no room for it
            return ReasoningState("answer", spent=thought.spent, forced=gap)
        tail = seen[-max(len(self.close_bytes) + 4, len(self.forbidden.data)) :]
        return self._checked(replace(thought, tail=tail, spent=thought.spent + 1))

    def _checked(self, thought: ReasoningState) -> ReasoningState:
        """Force the close marker once the budget is spent, at the end of a character."""
        if self.budget is None or thought.spent < self.budget:
            return thought
        if _is_whole(thought.tail) or thought.late >= 4:
            return replace(thought, forced=self.close_ids + self.gap_ids, then="answer")
        return replace(thought, late=thought.late + 1)

    def _started(self, thought: ReasoningState, token: int, data: bytes) -> ReasoningState:
        if token == self.open_ids[0]:
            opening = replace(thought, forced=self.open_ids[1:], then="thinking")
            return opening if opening.forced else self._entered(opening)
        seen = (thought.tail + data).lstrip()
        if seen.startswith(self.open_bytes):
            return self._checked(replace(thought, phase="thinking", tail=seen[len(self.open_bytes) :]))
        may = self.open_bytes.startswith(seen) and len(thought.tail) < 32
        return replace(thought, tail=thought.tail + data) if may else ReasoningState("answer", spent=thought.spent)

    def _entered(self, thought: ReasoningState) -> ReasoningState:
        """The phase that follows what was forced."""
        entered = ReasoningState(thought.then, spent=thought.spent)
        return self._checked(entered) if entered.phase == "thinking" else entered

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.decode_bytes([token])


class Constraint:
    """Grammar and thinking of one sequence, as one thing."""

    def __init__(self, matcher: Matcher | None, thinking: ReasoningBudget | None) -> None:
        self.matcher = matcher
        self.thinking = thinking
        self._history = [thinking.begin() if thinking is not None else ReasoningState("answer")]
        self._fed: list[bool] = []  # for each token taken, whether the grammar had it

    def limit_to(self, max_tokens: int) -> None:
        """Say how long the answer may be, before the first token."""
        if self.thinking is not None:
            self.thinking.limit_to(max_tokens)
            self._history = [self.thinking.begin()]

    def fork(self) -> Constraint:
        """A constraint of its own at the same place."""
        other = Constraint(None if self.matcher is None else self.matcher.fork(), self.thinking)
        other._history, other._fed = list(self._history), list(self._fed)
        return other

    def demand(self, ends: tuple[int, ...], *, is_endless: bool = False) -> TokenDemand | None:
        """What the next token must be; None when anything may come. `ends` are the tokens that end the sequence.

        An endless one goes on wherever its grammar lets it.
        """
        now = self._history[-1]
        if now.forced:
            return TokenDemand(only=now.forced[:1])
        if now.phase == "thinking" and self.thinking is not None:
            never = ends if self.matcher is not None else ()  # no end before the answer
            never += self.thinking.forbidden.after(now.tail)
            return TokenDemand(never=never) if never else None
        if self.matcher is None:
            return None
        opening = self.thinking.open_ids[:1] if self.thinking is not None and now.phase == "start" else ()
        return TokenDemand(matcher=self.matcher, also=opening, late=self.matcher.ends if is_endless else ())

    def accept(self, token: int) -> None:
        """Take the token that came. Raises RowFailed: this request ends, nobody else notices."""
        now = self._history[-1]
        feeds = self.matcher is not None and self._is_answer(now, token)
        if feeds and self.matcher is not None:
            self.matcher.accept(token)
            then = ReasoningState("answer", spent=now.spent)
        else:
            then = now if self.thinking is None else self.thinking.after(now, token)
        self._history.append(then)
        self._fed.append(feeds)

    def _is_answer(self, now: ReasoningState, token: int) -> bool:
        """Whether a token is the grammar's. Under a grammar thinking begins with the very first token or not at all."""
        if now.forced or now.phase == "thinking":
            return False
        if now.phase == "answer" or self.thinking is None or self.matcher is None:
            return True
        return token != self.thinking.open_ids[0] or self.matcher.allows(token)

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""
        if count:
            if self.matcher is not None:
                self.matcher.rollback(sum(self._fed[-count:]))
            del self._history[-count:]
            del self._fed[-count:]

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self.matcher is not None and self._history[-1].phase == "answer" and self.matcher.is_finished


def _is_whole(data: bytes) -> bool:
    """Whether these bytes end at the end of a character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character; its length stands in it
            return back >= (1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
