"""Reasoning before the answer: detects a model's markers, such as <think>, and splits reasoning from streamed text."""

from itertools import chain
from typing import NamedTuple

from weft.text.stop_strings import split_at
from weft.text.tokenizer import Tokenizer
from weft.text.types import Delta, Effort, Reasoning, Text

MAX_BLANKS = 32  # more white space than this before an open marker, and it is an answer

# Reasoning tokens by effort, where the template has no words for it; the engine enforces them. None: no limit.
BUDGETS: dict[Effort, int | None] = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": 16384}
BUDGETS |= {"xhigh": None, "max": None}
# gpt-oss and its kin read `reasoning_effort` and know three words.
TEMPLATE_WORDS: dict[Effort, str] = {"minimal": "low", "xhigh": "high", "max": "high"}


class Markers(NamedTuple):
    """The texts that a model writes before and after its reasoning, such as <think> and </think>."""

    open: str
    close: str


KNOWN = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<seed:think>", "</seed:think>"),
    Markers("<longcat_think>", "</longcat_think>"),
    Markers("<|think:start|>", "<|think:end|>"),
    Markers("<|channel>thought", "<channel|>"),
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),
    Markers("<|inner_prefix|>", "<|inner_suffix|>"),
    Markers("<thinking>", "</thinking>"),
    Markers("<reasoning>", "</reasoning>"),
)


def find_markers(template_source: str, tokenizer: Tokenizer) -> Markers | None:
    """Return the known markers that the chat template mentions, else those whose close marker is one token, else None."""
    mentioned = (markers for markers in KNOWN if any(mark in template_source for mark in markers))
    return next(chain(mentioned, (markers for markers in KNOWN if tokenizer.id_of(markers.close) is not None)), None)


def opens_in(prompt_text: str, markers: Markers) -> bool:
    """Whether the prompt ends with the open marker (and white space), so that the output begins inside the reasoning."""
    return prompt_text.rstrip().endswith(markers.open)


class ReasoningSplitter:
    """Splits streamed text into reasoning and answer, dropping the markers and the line breaks next to them.

    The open marker is recognised at the start of the output, after at most white space; later it is text, unless it comes
    through `mark`. If the close marker never comes, all text is reasoning.
    """

    def __init__(self, markers: Markers, opened: bool, tokenizer: Tokenizer | None = None) -> None:
        self.is_reasoning = opened
        self.held = ""  # may become a marker
        self.marker_tokens = {} if tokenizer is None else _marker_tokens(markers, tokenizer)  # with their texts
        self._open, self._close = markers.open, markers.close
        self._may_open = True  # an open marker may come
        self._is_fresh = opened  # line breaks are dropped until something else came
        self._newlines = 0  # at the end of the reasoning so far: given when more follows, dropped before the close marker

    def feed(self, text: str) -> list[Delta]:
        """Take more text and return the deltas that are now certain; a Text, if there is one, is the last."""
        if self._may_open:
            text = self._after_opening(text)
            if self._may_open:
                return []
        return self._reason(text) if self.is_reasoning else self._answer(text)

    def mark(self, text: str) -> list[Delta]:
        """Like `feed`, for a marker token's text: an open marker may also reopen reasoning; a misplaced marker is dropped."""
        pieces = [] if self._open.startswith((self.held + text).lstrip()) else self._without_opening()
        self._may_open |= not self.is_reasoning and self._open.startswith(text)
        is_read = self._may_open or (self.is_reasoning and text in self._close)
        return pieces + self.feed(text) if is_read else pieces

    def finish(self) -> list[Delta]:
        pieces = self._without_opening()
        rest = "\n" * self._newlines + self.held
        self._newlines, self.held = 0, ""
        return [*pieces, Reasoning(rest)] if rest else pieces  # only reasoning still holds anything

    def _after_opening(self, text: str) -> str:
        """Return the text after the open marker, or all text if no open marker can come; "" (text is held) while undecided."""
        text = self.held + text
        start = text.lstrip()
        can_open = len(text) - len(start) <= MAX_BLANKS
        if can_open and self._open.startswith(start) and start != self._open:
            self.held = text
            return ""
        self._may_open, self.held = False, ""
        if can_open and start.startswith(self._open):
            self.is_reasoning = self._is_fresh = True
            return start[len(self._open) :]
        return text

    def _without_opening(self) -> list[Delta]:
        """Stop waiting for an open marker; return its held text as reasoning or answer deltas, [] if none was awaited."""
        if not self._may_open:
            return []
        text, self.held, self._may_open = self.held, "", False
        return self.feed(text)

    def _reason(self, text: str) -> list[Delta]:
        reasoning, closed, rest = split_at(self.held + text, self._close)
        self.held = "" if closed else rest
        reasoning = reasoning.lstrip("\n") if self._is_fresh else reasoning
        body = reasoning.rstrip("\n")
        pieces: list[Delta] = []
        if body:
            pieces.append(Reasoning("\n" * self._newlines + body))
            self._newlines, self._is_fresh = 0, False
        self._newlines += len(reasoning) - len(body)
        if closed:
            self.is_reasoning, self._is_fresh, self._newlines = False, True, 0
            pieces += self._answer(rest)
        return pieces

    def _answer(self, text: str) -> list[Delta]:
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return [Text(text)] if text else []


def _marker_tokens(markers: Markers, tokenizer: Tokenizer) -> dict[int, str]:
    """Map token ids to texts: tokens that are a whole marker, and special tokens in a marker, which detokenizers might skip."""
    ids = [token for marker in markers for token in tokenizer.encode(marker, add_special_tokens=False)]
    texts = {token: tokenizer.token_text(token) for token in ids}
    return {token: text for token, text in texts.items() if text in markers or token in tokenizer.special_ids}
