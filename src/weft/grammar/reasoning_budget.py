"""The reasoning budget of one sequence, enforced token by token: when it is spent, the close marker is forced."""

import codecs
from dataclasses import dataclass, replace

from weft.errors import RowFailed
from weft.grammar.grammar_tokens import GrammarTokens
from weft.ipc.messages import ReasoningSpec

ANSWER_TOKENS = 256  # of a limited answer so many tokens, or half of it, are kept free from reasoning
MAX_LATE_TOKENS = 4  # beyond the budget, to finish a character


@dataclass(frozen=True)
class ReasoningState:
    """The state of a sequence's reasoning section after a token. Immutable: a rollback restores an earlier state."""

    phase: str  # "start": reasoning may begin; "reasoning"; "answer"
    tail: bytes = b""  # the last bytes, in which a marker may have begun
    spent: int = 0  # tokens of reasoning
    late: int = 0  # tokens beyond the budget, while a character is finished
    forced: tuple[int, ...] = ()  # tokens that must come next
    then: str = "answer"  # the phase after the forced tokens


class ForbiddenText:
    """Finds the tokens that would complete a forbidden text, given the bytes before. Built once per vocabulary and text."""

    def __init__(self, text: str, tokenizer: GrammarTokens) -> None:
        self.data = text.encode()
        self._whole: list[int] = []  # tokens that contain the text
        self._rest: list[list[int]] = [[] for _ in self.data]  # by bytes already there: tokens that begin with the rest
        self._after: dict[tuple[int, ...], tuple[int, ...]] = {}
        for token in range(tokenizer.vocab_size) if text else ():
            data = tokenizer.decode_bytes([token])
            if self.data in data:
                self._whole.append(token)
            for begun in range(1, len(self.data)) if data[:1] in self.data else ():
                if data.startswith(self.data[begun:]):
                    self._rest[begun].append(token)

    def after(self, tail: bytes) -> tuple[int, ...]:
        """Return the tokens that would complete the forbidden text right after the bytes `tail`."""
        begun = tuple(length for length in range(1, len(self.data)) if tail.endswith(self.data[:length]))
        if begun not in self._after:
            self._after[begun] = tuple({*self._whole, *(token for length in begun for token in self._rest[length])})
        return self._after[begun]


class ReasoningBudget:
    """Tracks the reasoning section token by token and forces its close marker (one or more tokens) once the budget is spent."""

    def __init__(self, spec: ReasoningSpec, tokenizer: GrammarTokens, forbidden: ForbiddenText, *, before_grammar: bool) -> None:
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
        return self._enter("reasoning" if self.spec.opened else "start" if self.spec.may_open else "answer")

    def limit_to(self, max_tokens: int) -> None:
        """Lower the reasoning budget so that of `max_tokens` in all up to 256, or half of them, are left for the answer."""
        room = max_tokens - min(ANSWER_TOKENS, max_tokens // 2) - len(self.close_ids) - len(self.gap_ids)
        self.budget = max(0, room if self.budget is None else min(self.budget, room))

    def after(self, state: ReasoningState, token: int) -> ReasoningState:
        if state.forced:
            rest = state.forced[1:]
            return replace(state, forced=rest) if rest else self._enter(state.then, state.spent)
        data = self.tokenizer.decode_bytes([token])
        match state.phase:
            case "reasoning":
                return self._reasoned(state, data)
            case "start":
                return self._started(state, token, data)
            case _:  # a model may open its reasoning again, but only by a token that means nothing else
                return self._enter("reasoning", state.spent) if self.open_ids == (token,) else state

    def _reasoned(self, state: ReasoningState, data: bytes) -> ReasoningState:
        seen = state.tail + data
        if self.close_bytes in seen:
            left = seen.partition(self.close_bytes)[2]
            if self.before_grammar and left.strip():
                raise RowFailed(f"the answer began inside the token that closed the thinking ({left[:20]!r})")
            gap = self.gap_ids if self.before_grammar and not left else ()  # a grammar has no room for it
            return ReasoningState("answer", spent=state.spent, forced=gap)
        tail = seen[-max(len(self.close_bytes) + 4, len(self.forbidden.data)) :]
        return self._close_if_spent(replace(state, tail=tail, spent=state.spent + 1))

    def _close_if_spent(self, state: ReasoningState) -> ReasoningState:
        """Force the close marker if the budget is spent, once a cut UTF-8 character is whole or MAX_LATE_TOKENS have passed."""
        if self.budget is None or state.spent < self.budget:
            return state
        is_whole = codecs.utf_8_decode(state.tail, "ignore")[1] == len(state.tail)  # does not take a character that is cut
        if is_whole or state.late >= MAX_LATE_TOKENS:
            return replace(state, forced=self.close_ids + self.gap_ids, then="answer")
        return replace(state, late=state.late + 1)

    def _started(self, state: ReasoningState, token: int, data: bytes) -> ReasoningState:
        if token == self.open_ids[0]:
            rest = self.open_ids[1:]
            return replace(state, forced=rest, then="reasoning") if rest else self._enter("reasoning", state.spent)
        seen = (state.tail + data).lstrip()
        if seen.startswith(self.open_bytes):
            return self._close_if_spent(replace(state, phase="reasoning", tail=seen[len(self.open_bytes) :]))
        may_open = self.open_bytes.startswith(seen) and len(state.tail) < 32
        return replace(state, tail=state.tail + data) if may_open else ReasoningState("answer", spent=state.spent)

    def _enter(self, phase: str, spent: int = 0) -> ReasoningState:
        entered = ReasoningState(phase, spent=spent)
        return self._close_if_spent(entered) if phase == "reasoning" else entered
