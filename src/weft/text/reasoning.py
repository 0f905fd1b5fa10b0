"""Reasoning before the answer: detects a model's markers, such as <think>, and splits reasoning from streamed text."""

from itertools import chain
from typing import NamedTuple

from weft.ipc.limits import MAX_BLANKS
from weft.ipc.messages import ReasoningSpec
from weft.text.stop_strings import split_at
from weft.text.tokenizer import Tokenizer
from weft.text.types import Delta, Effort, Reasoning, Text

BLANKS = " \t\n\r\v\f"  # white space as the engine has it, which reads bytes

# Reasoning tokens by effort, where the template has no words for it; the engine enforces them. None: no limit.
BUDGETS: dict[Effort, int | None] = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": 16384}
BUDGETS |= {"xhigh": None, "max": None}


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


def opens_in(prompt_text: str, markers: Markers, begun: str = "") -> bool:
    """Whether the output begins inside the reasoning: the prompt ends with the open marker, or `begun` is not closed yet.

    `begun` is the text that the output goes on with, if it is not blank: an open marker opens it at its beginning alone.
    """
    if not begun.strip():
        return prompt_text.rstrip().endswith(markers.open)
    before = prompt_text.rpartition(begun.strip())[0] if begun.strip() in prompt_text else ""
    is_open = begun.lstrip().startswith(markers.open) or before.rstrip().endswith(markers.open)
    return is_open and markers.close not in begun


class ReasoningSplitter:
    """Splits streamed text into reasoning and answer, dropping the markers and the line breaks next to them.

    The open marker is recognised at the start of the output, behind at most MAX_BLANKS of white space. Reasoning closes once:
    all later markers are text, unless the model reopens its reasoning. If the close marker never comes, all text is reasoning.
    Before a grammar's answer no line break is dropped but those that the engine put there.
    """

    def __init__(self, spec: ReasoningSpec, *, before_grammar: bool = False, reopening: int | None = None) -> None:
        self.spec = spec
        self.reopening = reopening if spec.reopens and not before_grammar else None  # the token that reopens the reasoning
        self.is_reasoning = spec.opened
        self.held = ""  # may become a marker
        self.num_closing = 0  # characters of the text so far from the beginning of the last close marker on
        self._may_open = spec.opened or spec.may_open  # an open marker may come
        self._before_grammar = before_grammar
        self._lead: str | None = None  # a text that may still come in front of the answer and is no part of it
        self._is_fresh = spec.opened  # the reasoning's first line breaks are dropped until something else came
        self._newlines = 0  # at the end of the reasoning so far: given when more follows, dropped before the close marker

    def feed(self, text: str) -> list[Delta]:
        """Take more text and return the deltas that are now certain; a Text, if there is one, is the last."""
        if self._may_open:
            text = self._after_opening(text)
            if self._may_open:
                return []
        return self._reason(text) if self.is_reasoning else self._answer(text)

    def interrupt(self) -> list[Delta]:
        """Take a token that has no text: no marker reaches over it."""
        pieces = self._without_opening()
        if self.is_reasoning:
            text, self.held = self.held, ""
            pieces += self._tell(text)
        return pieces

    def reopen(self) -> list[Delta]:
        """Take the open marker's own token within the answer."""
        rest = self._lead_so_far()
        self.is_reasoning = self._is_fresh = True
        return rest

    def finish(self) -> list[Delta]:
        pieces = self._without_opening()
        if not self.is_reasoning:
            return pieces + self._lead_so_far()
        rest = "\n" * self._newlines + self.held
        self._newlines, self.held = 0, ""
        return [*pieces, Reasoning(rest)] if rest else pieces

    def _after_opening(self, text: str) -> str:
        """Return the text after the open marker, or all text if no open marker can come; "" (text is held) while undecided."""
        text = self.held + text
        start = text.lstrip(BLANKS)
        can_open, opening = len(text) - len(start) <= MAX_BLANKS, self.spec.open
        if can_open and opening.startswith(start) and start != opening:
            self.held = text
            return ""
        self._may_open, self.held = False, ""
        if can_open and start.startswith(opening):
            self.is_reasoning = self._is_fresh = True
            return start[len(opening) :]
        if not self.is_reasoning:
            self._lead = self.spec.begin or None
        return text

    def _without_opening(self) -> list[Delta]:
        """Stop waiting for an open marker; return its held text as reasoning or answer deltas, [] if none was awaited."""
        if not self._may_open:
            return []
        text, self.held, self._may_open = self.held, "", False
        return self.feed(text)

    def _reason(self, text: str) -> list[Delta]:
        reasoning, closed, rest = split_at(self.held + text, self.spec.close)
        self.held = "" if closed else rest
        pieces = self._tell(reasoning)
        if closed:
            self.is_reasoning, self._newlines, self.num_closing = False, 0, len(closed) + len(rest)
            pieces += self._begin_answer(rest)
        return pieces

    def _tell(self, reasoning: str) -> list[Delta]:
        """Return reasoning without line breaks at its beginning and at its end so far."""
        reasoning = reasoning.lstrip("\n") if self._is_fresh else reasoning
        body = reasoning.rstrip("\n")
        pieces: list[Delta] = []
        if body:
            pieces.append(Reasoning("\n" * self._newlines + body))
            self._newlines, self._is_fresh = 0, False
        self._newlines += len(reasoning) - len(body)
        return pieces

    def _begin_answer(self, text: str) -> list[Delta]:
        """Begin the answer with what came in one token with the close marker."""
        if not self._before_grammar:
            self._lead = self.spec.gap.strip("\n")
            return self._answer(text)
        self._lead = None if text else self.spec.gap or None  # as the engine: its gap follows nothing but the bare marker
        return [Text(text)] if text.strip() else []

    def _answer(self, text: str) -> list[Delta]:
        if self._lead is not None:
            text = self._after_lead(self._lead, text)
        return [Text(text)] if text else []

    def _after_lead(self, lead: str, text: str) -> str:
        """Return the text behind what comes in front of the answer; "" while it is undecided."""
        text = self.held + text
        start = text if self._before_grammar else text.lstrip("\n")
        is_undecided = not start or (lead.startswith(start) and start != lead)
        self.held, self._lead = (start, lead) if is_undecided else ("", None)
        return "" if is_undecided else start.removeprefix(lead)

    def _lead_so_far(self) -> list[Delta]:
        """Stop waiting for what comes in front of the answer, and return what was held of it."""
        text, self.held, self._lead = self.held, "", None
        return [Text(text)] if text and not self._before_grammar else []
