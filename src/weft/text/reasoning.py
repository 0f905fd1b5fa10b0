"""Thinking told apart from the answer, by the markers a model family writes around it.

Works on text pieces, cut anywhere. Knows no token ids but for `marker_tokens`, which says which ones `Reader` should hand
over as markers because decoding might swallow them.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.text.stop_strings import overlap
from weft.text.tokenizer import Tokenizer
from weft.text.types import Delta, Reasoning, Text

MAX_BLANKS = 32  # more white space than this before an open marker, and it is an answer


@dataclass(frozen=True)
class Markers:
    """What stands before and after the thinking."""

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
    """The markers the chat template mentions, else those the vocabulary has a token for; None for a model that has none."""
    for markers in KNOWN:
        if markers.open in template_source or markers.close in template_source:
            return markers
    return next((markers for markers in KNOWN if tokenizer.id_of(markers.close) is not None), None)


def marker_tokens(markers: Markers, tokenizer: Tokenizer) -> dict[int, str]:
    """Tokens that are a marker, and special ones that are a part of one, with their text."""
    ids = [token for marker in (markers.open, markers.close) for token in tokenizer.encode(marker, add_special_tokens=False)]
    texts = {token: tokenizer.token_text(token) for token in ids}
    whole = (markers.open, markers.close)
    return {token: text for token, text in texts.items() if text in whole or token in tokenizer.special_ids}


def opens_in(prompt_text: str, markers: Markers) -> bool:
    """Whether the prompt ends with an open marker, so that the answer begins inside the thinking."""
    return prompt_text.rstrip().endswith(markers.open)


class Splitter:
    """Text pieces in, reasoning and answer out, without the markers and the line breaks that hang on them.

    The open marker counts where the answer begins, after white space at most. Later it is text, unless it comes through
    `mark`. Thinking that is never closed is all reasoning.
    """

    def __init__(self, markers: Markers, opened: bool) -> None:
        self.thinking = opened
        self.held = ""  # may become a marker
        self._open, self._close = markers.open, markers.close
        self._begins = True  # an open marker may come
        self._fresh = opened  # line breaks are dropped until something else came
        self._newlines = 0  # of the thinking: told when more follows, dropped before the close marker

    def feed(self, text: str) -> list[Delta]:
        """What became certain with this piece. A text is always the last of it."""
        if self._begins:
            text = self._begin(text)
            if self._begins:
                return []
        return self._think(text) if self.thinking else self._answer(text)

    def mark(self, text: str) -> list[Delta]:
        """A token that is a marker or part of one: the model means it, so thinking may open again. A stray one is dropped."""
        pieces = [] if self._open.startswith((self.held + text).lstrip()) else self._decide()
        if self._begins or (self.thinking and text in self._close):
            return pieces + self.feed(text)
        if not self.thinking and self._open.startswith(text):
            self._begins = True
            return pieces + self.feed(text)
        return pieces

    def finish(self) -> list[Delta]:
        """What was held back."""
        pieces = self._decide()
        rest = "\n" * self._newlines + self.held
        self._newlines, self.held = 0, ""
        return [*pieces, Reasoning(rest)] if rest else pieces  # only thinking still holds anything

    def _begin(self, text: str) -> str:
        """What follows the open marker, or all of it where none can come any more; nothing while that is open."""
        text = self.held + text
        start = text.lstrip()
        can_open = len(text) - len(start) <= MAX_BLANKS
        if can_open and self._open.startswith(start) and start != self._open:
            self.held = text
            return ""
        self._begins, self.held = False, ""
        if can_open and start.startswith(self._open):
            self.thinking = self._fresh = True
            return start[len(self._open) :]
        return text

    def _decide(self) -> list[Delta]:
        """What was held at the beginning, now that no open marker comes of it."""
        if not self._begins:
            return []
        text, self.held, self._begins = self.held, "", False
        return self.feed(text)

    def _think(self, text: str) -> list[Delta]:
        thought, closed, after = (self.held + text).partition(self._close)
        certain = len(thought) - (0 if closed else overlap(thought, self._close))
        thought, self.held = thought[:certain], thought[certain:]
        if self._fresh:
            thought = thought.lstrip("\n")
        body = thought.rstrip("\n")
        pieces: list[Delta] = []
        if body:
            pieces.append(Reasoning("\n" * self._newlines + body))
            self._newlines, self._fresh = 0, False
        self._newlines += len(thought) - len(body)
        if closed:
            self.thinking, self._fresh, self._newlines = False, True, 0
            pieces += self._answer(after)
        return pieces

    def _answer(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return [Text(text)] if text else []
