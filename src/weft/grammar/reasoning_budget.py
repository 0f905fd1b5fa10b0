"""The reasoning budget of one sequence, enforced token by token: when it is spent, the close marker is forced.

Where reasoning begins and ends is read from the text alone, by the rules of `weft.text.reasoning`: both sides read one
`ReasoningSpec`, and tests compare them. Reasoning opens in the prompt or at the beginning of the output, and closes once.
"""

from dataclasses import dataclass, replace

from weft.errors import RowFailed
from weft.grammar.grammar_tokens import GrammarTokens
from weft.grammar.output_limits import ForbiddenTexts
from weft.ipc.limits import MAX_BLANKS
from weft.ipc.messages import ReasoningSpec

ANSWER_TOKENS = 256  # of a limited answer so many tokens, or half of it, are kept free from reasoning
MAX_MISSING = 3  # bytes: the most that the beginning of a character can lack


@dataclass(frozen=True)
class ReasoningState:
    """The state of a sequence's reasoning section after a token. Immutable: a rollback restores an earlier state."""

    phase: str  # "start": reasoning may begin; "reasoning"; "answer"
    tail: bytes = b""  # the last bytes, in which a marker may have begun
    spent: int = 0  # tokens of reasoning
    forced: tuple[int, ...] = ()  # tokens that must come next
    undecided: tuple[int, ...] = ()  # the first tokens of the output, which are either the open marker or answer


class CutCharacters:
    """Finds the tokens that begin a character which can not be finished in the tokens left. Built once per vocabulary."""

    def __init__(self, tokenizer: GrammarTokens) -> None:
        lacking = [(token, missing_bytes(tokenizer.decode_bytes([token]))) for token in range(tokenizer.vocab_size)]
        levels = range(1, MAX_MISSING + 1)
        self._lacking = {level: tuple(token for token, missing in lacking if missing >= level) for level in levels}

    def within(self, num_left: int) -> tuple[int, ...]:
        """Return the tokens that lack `num_left` bytes or more: a character may need a token for each of its bytes."""
        return self._lacking.get(num_left, ())


def missing_bytes(data: bytes) -> int:
    """Return how many bytes the character lacks that `data` ends in; 0 if it ends with a whole one, or with none at all."""
    for length, byte in enumerate(reversed(data[-MAX_MISSING:]), 1):
        if byte >= 0xC0:
            return max(0, (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) - length)
        if byte < 0x80:
            break
    return 0


class ReasoningBudget:
    """Tracks the reasoning section token by token and forces its close marker (one or more tokens) once the budget is spent."""

    def __init__(
        self,
        spec: ReasoningSpec,
        tokenizer: GrammarTokens,
        forbidden: ForbiddenTexts,
        cut: CutCharacters,
        *,
        before_grammar: bool,
    ) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.before_grammar = before_grammar
        self.open_bytes, self.close_bytes = spec.open.encode(), spec.close.encode()
        self.open_ids = tuple(tokenizer.tokenize_str(spec.open, parse_special=True))
        self.close_ids = tuple(tokenizer.tokenize_str(spec.close, parse_special=True))
        self.gap_ids = tuple(tokenizer.tokenize_str(spec.gap, parse_special=True)) if spec.gap else ()
        self.budget = spec.budget
        self._forbidden, self._cut = forbidden, cut
        begun = range(len(self.open_ids))
        self._next_of_opening = {tokenizer.decode_bytes(list(self.open_ids[:count])): self.open_ids[count] for count in begun}
        closing = ((tokenizer.decode_bytes(list(self.close_ids[:count])), count) for count in range(len(self.close_ids)))
        self._begun_closing = sorted(closing, reverse=True, key=lambda pair: pair[1])
        self._num_kept = max(len(self.close_bytes), forbidden.longest)  # bytes in which a text may have begun

    def begin(self) -> ReasoningState:
        return self._enter("reasoning" if self.spec.opened else "start" if self.spec.may_open else "answer")

    def limit_to(self, max_tokens: int) -> None:
        """Lower the reasoning budget so that of `max_tokens` in all up to 256, or half of them, are left for the answer."""
        room = max_tokens - min(ANSWER_TOKENS, max_tokens // 2) - len(self.close_ids) - len(self.gap_ids)
        self.budget = max(0, room if self.budget is None else min(self.budget, room))

    def never(self, state: ReasoningState) -> tuple[int, ...]:
        """Return the tokens that may not come next within the reasoning: of a call, or cut by the end of the budget."""
        cut = () if self.budget is None else self._cut.within(self.budget - state.spent)
        return self._forbidden.after(state.tail) + cut

    def opening(self, state: ReasoningState) -> tuple[int, ...]:
        """Return the token of the open marker that may come next, while the output has nothing but its beginning; else ()."""
        token = self._next_of_opening.get(state.tail.lstrip()) if state.phase == "start" else None
        return () if token is None else (token,)

    def after(self, state: ReasoningState, token: int) -> ReasoningState:
        if state.forced:
            if rest := state.forced[1:]:
                return replace(state, forced=rest)
            return ReasoningState("answer", spent=state.spent, forced=self.gap_ids if state.phase == "reasoning" else ())
        match state.phase:
            case "reasoning":
                return self._reasoned(replace(state, spent=state.spent + 1), self.tokenizer.decode_bytes([token]))
            case "start":
                return self._started(state, token, self.tokenizer.decode_bytes([token]))
            case _:
                reopens = self.spec.reopens and not self.before_grammar and self.open_ids == (token,)
                return self._enter("reasoning", state.spent) if reopens else state

    def _reasoned(self, state: ReasoningState, data: bytes) -> ReasoningState:
        """Return the state after more bytes of reasoning; `state` counts their token, which is not counted if it closes."""
        seen = state.tail + data
        if self.close_bytes in seen:
            left = seen.partition(self.close_bytes)[2]
            if self.before_grammar and left.strip():
                raise RowFailed(f"the answer began inside the token that closed the thinking ({left[:20]!r})")
            gap = self.gap_ids if self.before_grammar and not left else ()  # a grammar has no room for it
            return ReasoningState("answer", spent=max(0, state.spent - 1), forced=gap)
        return self._close_if_spent(replace(state, tail=seen[-self._num_kept :]))

    def _close_if_spent(self, state: ReasoningState) -> ReasoningState:
        """Force the close marker, or the rest of one that is begun, if the budget is spent."""
        if self.budget is None or state.spent < self.budget:
            return state
        num_there = next(count for data, count in self._begun_closing if state.tail.endswith(data))
        return replace(state, forced=self.close_ids[num_there:])

    def _started(self, state: ReasoningState, token: int, data: bytes) -> ReasoningState:
        seen = state.tail + data
        begun = seen.lstrip()
        can_open = len(seen) - len(begun) <= MAX_BLANKS
        if can_open and begun.startswith(self.open_bytes):
            return self._reasoned(ReasoningState("reasoning", spent=state.spent), begun[len(self.open_bytes) :])
        if can_open and self.open_bytes.startswith(begun):
            return replace(state, tail=seen, undecided=(*state.undecided, token))
        return ReasoningState("answer", spent=state.spent)

    def _enter(self, phase: str, spent: int = 0) -> ReasoningState:
        entered = ReasoningState(phase, spent=spent)
        return self._close_if_spent(entered) if phase == "reasoning" else entered
