"""Turns the token ids of one choice into deltas: detokenised, reasoning and tool calls split off, ended at a stop string."""

from collections import deque
from collections.abc import Sequence

from weft.ipc.messages import TokenLogprob
from weft.text.answer_frame import AnswerEnd
from weft.text.marker_stops import Stops
from weft.text.reasoning import ReasoningSplitter
from weft.text.stop_strings import StopFinder
from weft.text.tokenizer import Detokenizer, Tokenizer
from weft.text.tools import CallReader, HarmonyReader
from weft.text.types import CallOpened, Delta, Text, Token


class StreamReader:
    r"""Converts one choice's tokens to deltas; text that may still become a marker, tool call or stop string is held back.

    Stop strings are searched in the answer only: in the reasoning a stop like "\n\n" would end every request, and a call would
    be cut by it. A stop string that is a marker ends the answer at that marker (`MarkerStops`). None acts within the first
    `min_tokens` tokens. With `logprobs` each Text carries its tokens: no tokens of the reasoning, of a marker that was one or of
    the stop string, no tokens without text, and none after a call began.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Stops = Stops(),  # noqa: B008 - it is frozen
        splitter: ReasoningSplitter | None = None,
        calls: CallReader | HarmonyReader | None = None,
        *,
        logprobs: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        self.stopped: str | None = None  # the stop string that ended the answer; later tokens give nothing
        self.num_reasoning_tokens = 0  # tokens of reasoning; those of its markers, and with a part of its close marker, are not
        self._undecided: deque[int] = deque()  # lengths of the last tokens of reasoning, which may be its close marker
        self._detokenizer = detokenizer
        self._splitter = splitter
        self._calls = calls
        self._end = AnswerEnd(ends) if ends else None
        self._reopening = None if splitter is None else splitter.reopening
        self._stops = StopFinder(() if stops.min_tokens else stops.texts)
        self._later_stops = stops.texts  # searched from the token behind the first `min_tokens`
        self._marker_stops = stops.markers
        self._num_unstoppable = stops.min_tokens
        self._tokens = AnswerTokens(detokenizer.tokenizer, detokenizer.skipped) if logprobs else None
        self._is_plain = not stops.texts and not logprobs  # feed returns early: the front's hot path

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        if self.stopped is not None:
            return []
        splitter, calls, mark = self._splitter, self._calls, ""
        pieces: list[Delta] = []
        was_reasoning = splitter is not None and splitter.is_reasoning
        if splitter is not None and token == self._reopening and not was_reasoning:
            text = mark = splitter.spec.open
            self._detokenizer.unfinished = b""  # the marker ends a character as the end of the answer does
            pieces = splitter.reopen()
        elif text := self._detokenizer.feed(token):
            pieces = [Text(text)] if splitter is None else splitter.feed(text)
        elif splitter is not None and token in self._detokenizer.skipped:
            pieces = splitter.interrupt()
        if was_reasoning and splitter is not None:
            if splitter.is_reasoning and not splitter.held and not self._undecided:
                self.num_reasoning_tokens += 1
            else:
                self._count(text, splitter)
        if self._end is not None:
            pieces = self._end.feed(pieces)
        if calls is not None:
            was_channel = calls.is_reasoning
            pieces = self._read_calls(calls, pieces)
            self.num_reasoning_tokens += was_channel and calls.is_reasoning
        if self._is_plain:
            return pieces
        if self._tokens is not None:
            self._tokens.read(token, logprob, text, is_unfinished=bool(self._detokenizer.unfinished))
            # A text that a marker brought to light ends before the marker.
            self._settle(pieces, max(len(splitter.held), len(mark)) if splitter else 0)
        if self._num_unstoppable:
            return self._unstopped(pieces)
        if self._marker_stops is not None:
            is_reasoning = splitter is not None and splitter.is_reasoning
            return self._until_marker(*self._marker_stops.cut(pieces, was_reasoning, is_reasoning))
        return self._until_stop(pieces)

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended before the model ended it."""
        return self.stopped is not None or (self._calls is not None and self._calls.is_over)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the deltas of what was held back; `is_cut` means that the answer would have gone on."""
        if self.stopped is not None:
            return []
        pieces = self._splitter.finish() if self._splitter else []
        num_dropped = 0
        if self._end is not None:
            pieces = self._end.feed(pieces)
            rest_of_text, num_dropped = self._end.finish()
            pieces += rest_of_text
        if self._calls is not None:
            pieces = [*self._read_calls(self._calls, pieces), *self._calls.finish(is_cut=is_cut)]
        self._settle(pieces, num_dropped)
        deltas = self._until_stop(pieces)
        if self.stopped is None:
            rest = self._stops.finish()
            is_reasoning = any(one is not None and one.is_reasoning for one in (self._splitter, self._calls))
            is_text = not is_reasoning and not (self._calls is not None and self._calls.held)
            tokens = self._tokens.take_rest(num_dropped) if self._tokens is not None and is_text else ()
            if rest or tokens:
                deltas.append(Text(rest, tokens))
        return deltas

    def _read_calls(self, calls: CallReader | HarmonyReader, pieces: list[Delta]) -> list[Delta]:
        return [one for piece in pieces for one in (calls.feed(piece.text) if isinstance(piece, Text) else [piece])]

    def _count(self, text: str, splitter: ReasoningSplitter) -> None:
        """Count the tokens of reasoning that end before the close marker, or what may become it; `text` is the newest one's."""
        undecided = self._undecided
        undecided.append(len(text))
        num_after = sum(undecided) - undecided[0]
        num_marker = len(splitter.held) if splitter.is_reasoning else splitter.num_closing
        while undecided and num_after >= num_marker:
            undecided.popleft()
            self.num_reasoning_tokens += 1
            num_after -= undecided[0] if undecided else 0
        if not splitter.is_reasoning:
            undecided.clear()

    def _unstopped(self, pieces: list[Delta]) -> list[Delta]:
        """Give the pieces of one of the first `min_tokens` tokens, in which no stop string is searched."""
        deltas = self._until_stop(pieces)
        self._num_unstoppable -= 1
        if not self._num_unstoppable:
            self._stops = StopFinder(self._later_stops)
        return deltas

    def _until_marker(self, pieces: list[Delta], stop: str | None) -> list[Delta]:
        deltas = self._until_stop(pieces)
        if stop is not None and self.stopped is None:
            rest, self.stopped = self._stops.finish(), stop
            deltas += [Text(rest, self._tokens.take(len(rest)) if self._tokens is not None else ())] if rest else []
        return deltas

    def _settle(self, pieces: list[Delta], num_held: int) -> None:
        """Assign pending tokens to the answer text in `pieces`; `num_held` characters stay undecided. No-op if a call opens."""
        if self._tokens is not None and not any(isinstance(piece, CallOpened) for piece in pieces):
            num_held += 0 if self._end is None else len(self._end.held)
            self._tokens.settle(pieces, num_held + (len(self._calls.held) if self._calls is not None else 0))

    def _until_stop(self, pieces: list[Delta]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            text = self._stops.finish() if isinstance(piece, CallOpened) else ""
            if isinstance(piece, Text):
                text, self.stopped = self._stops.feed(piece.text)
            if text:
                deltas.append(Text(text, self._tokens.take(len(text)) if self._tokens is not None else ()))
            if isinstance(piece, CallOpened):
                self._tokens = None
            if not isinstance(piece, Text):
                deltas.append(piece)
            if self.stopped is not None:
                break  # what a call reader found behind it comes too late
        return deltas


class AnswerTokens:
    """Assigns each token, for log-probabilities, to the piece of answer text that contains the token's last character.

    read      ……………|……………|……………   characters of all that was read; tokens wait here until theirs are decided
    answered        |……………|            the part that is answer; tokens are ready when theirs are given out
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._num_read = self._num_answered = self._num_given = 0
        self._waiting: deque[tuple[int, Token]] = deque()  # with the position in all that was read where its text ends
        self._ready: list[tuple[int, Token]] = []  # with that position in the answer

    def read(self, token: int, logprob: TokenLogprob | None, text: str, *, is_unfinished: bool) -> None:
        """Record a token and the text it produced; `is_unfinished` means that a later token completes its last character."""
        self._num_read += len(text)
        if self._tokenizer.token_bytes(token) and token not in self._skipped:
            self._waiting.append((self._num_read + is_unfinished, token_of(self._tokenizer, token, logprob)))

    def settle(self, pieces: list[Delta], num_held: int) -> None:
        """Make the tokens of the answer text in `pieces` ready and drop earlier ones; `num_held` characters stay undecided."""
        num_answer = sum(len(piece.text) for piece in pieces if isinstance(piece, Text))
        begin = self._num_read - num_held - num_answer
        while self._waiting and self._waiting[0][0] <= begin + num_answer:
            end, token = self._waiting.popleft()
            if end > begin:
                self._ready.append((self._num_answered + end - begin, token))
        self._num_answered += num_answer

    def take(self, num_characters: int) -> tuple[Token, ...]:
        self._num_given += num_characters
        taken = tuple(token for end, token in self._ready if end <= self._num_given)
        del self._ready[: len(taken)]
        return taken

    def take_rest(self, num_dropped: int = 0) -> tuple[Token, ...]:
        """Return all tokens not yet taken when the answer ends, including those of an incomplete character.

        Those of the last `num_dropped` characters are no part of the answer.
        """
        waiting = [] if num_dropped else [token for _, token in self._waiting]
        return (*(token for _, token in self._ready), *waiting)


def token_of(tokenizer: Tokenizer, token: int, logprob: TokenLogprob | None) -> Token:
    """Build the `Token` that replies show: its text, bytes, log-probability and the likeliest tokens at its position."""
    tops = () if logprob is None else logprob.top
    top = tuple(token_of(tokenizer, other, TokenLogprob(other, value)) for other, value in tops)
    return Token(token, tokenizer.token_text(token), tokenizer.token_bytes(token), logprob, top)
