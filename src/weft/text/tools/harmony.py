"""Answers cut into channels, as gpt-oss writes them: its thinking, its words and its calls are messages of one stream.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}

The prompt ends with <|start|>assistant; <|call|> and <|return|> end the answer. Used instead of `CallReader`, with or
without tools, and instead of a splitter of thinking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from weft.text.stop_strings import overlap
from weft.text.tools.arguments import JsonArguments
from weft.text.tools.call_reader import Calls, new_id
from weft.text.tools.tool import Tool
from weft.text.types import ContentDelta, Reasoning, Text

MESSAGE = "<|message|>"
END = "<|end|>"
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
BEGINNINGS = ("<|channel|>", "<|start|>", "to=")


class HarmonyReader:
    """Reads one answer."""

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str] = new_id) -> None:
        self.held = ""  # what is not decided yet
        self.thinking = False  # the message that is open is thinking
        self._calls = Calls(tools, make_id)
        self._in_header = True
        self._arguments: JsonArguments | None = None  # of the call that is open
        self._is_over = False  # they are complete: what follows up to the end of the message says nothing

    def feed(self, text: str) -> list[ContentDelta]:
        """What became certain with this piece."""
        self.held += text
        found: list[ContentDelta] = []
        while self.held:
            before = len(self.held), self._in_header
            found += self._header() if self._in_header else self._body()
            if before == (len(self.held), self._in_header):
                break
        return found

    def finish(self) -> list[ContentDelta]:
        """What was held back. A header that was cut says nothing."""
        rest, self.held = self.held, ""
        is_header = self._in_header and rest.lstrip().startswith("<|")
        return [] if is_header else self._told(rest)[0]

    def _header(self) -> list[ContentDelta]:
        """Who is spoken to, and in which channel."""
        start = self.held.lstrip()
        if not any(start.startswith(one) or one.startswith(start) for one in BEGINNINGS):
            self._enter(None)
            return []
        header, found, rest = self.held.partition(MESSAGE)
        if not found:
            return []
        self.held = rest
        self._enter(header)
        recipient = RECIPIENT.search(header)
        if recipient is None:
            return []
        if recipient[1] not in self._calls.tools:
            return [Text(header + MESSAGE)]
        self._arguments = JsonArguments()
        return [self._calls.open(recipient[1])]

    def _enter(self, header: str | None) -> None:
        self._in_header = self._is_over = False
        self._arguments = None
        self.thinking = header is not None and "<|channel|>analysis" in header and "to=" not in header

    def _body(self) -> list[ContentDelta]:
        if self._arguments is not None and not self._is_over:  # in their strings a marker is a text like any other
            told, used = self._told(self.held)
            self.held = self.held[used:]
            return told
        text, end, rest = self.held.partition(END)
        certain = len(text) - (0 if end else overlap(text, END))
        told, _ = self._told(text[:certain])
        self.held = rest if end else text[certain:]
        if end:
            self._in_header, self.thinking, self._arguments = True, False, None
        return told

    def _told(self, text: str) -> tuple[list[ContentDelta], int]:
        """A part of a message, and how much of it was used."""
        if not text or self._is_over:
            return [], len(text)
        if self._arguments is None:
            return [Reasoning(text) if self.thinking else Text(text)], len(text)
        told, used = self._arguments.read(text)
        found = self._calls.say(told)
        if self._arguments.is_done:
            closed = self._calls.close()
            self._is_over = bool(closed)
            found += closed
        if self._arguments.is_broken or (self._arguments.is_done and not self._is_over):
            self._arguments = None
        return found, used
