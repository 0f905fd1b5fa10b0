"""The text of an answer is read as text and tool calls, as it comes; the result does not depend on where it is cut.

What can not be a call is text, to the letter: markup with an unknown name or a wrong shape. An open call stays open: when its
arguments break it is never closed, and the rest is text; when the answer ends within them they end there too. White space before
and after calls belongs to the markup. Knows families, no tokens; `StreamReader` has one reader per choice.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

from weft.text.stop_strings import split_at
from weft.text.tools.arguments import Arguments, Json, JsonArguments, PairArguments, Pairs, TagArguments, Tags, decode_json
from weft.text.tools.families import Family
from weft.text.tools.pieces import piece
from weft.text.tools.tool import Tool
from weft.text.types import CallArguments, CallClosed, CallOpened, ContentDelta, Reasoning, Text

MESSAGE, END = "<|message|>", "<|end|>"
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
HEADER_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")


def new_id() -> str:
    """An id for a call to which the model gave none."""
    return f"call_{secrets.token_hex(12)}"


class OpenCalls:
    """The calls of an answer, opened one after the other."""

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._make_id = make_id
        self._ids: list[str] = []  # of all calls
        self._arguments: list[str] = []  # pieces of the last one's

    def open(self, name: str, given_id: str = "") -> ContentDelta:
        """The beginning of the next call. An id that the model gave is kept, but not twice."""
        self._ids.append(self._make_id() if not given_id or given_id in self._ids else given_id)
        self._arguments = []
        return CallOpened(len(self._ids) - 1, self._ids[-1], name)

    def extend(self, arguments: str) -> list[ContentDelta]:
        self._arguments.append(arguments)
        return [CallArguments(len(self._ids) - 1, arguments)] if arguments else []

    def close(self) -> list[ContentDelta]:
        """The end of the call, if its arguments are an object; else nothing."""
        return [CallClosed(len(self._ids) - 1)] if isinstance(decode_json("".join(self._arguments)), dict) else []


class CallReader:
    """Reads answers with the calls of one family."""

    is_reasoning = False  # the reasoning was split off before

    def __init__(self, family: Family, tools: Sequence[Tool], make_id: Callable[[], str] = new_id) -> None:
        self.held = ""  # undecided
        self._family = family
        self._calls = OpenCalls(tools, make_id)
        self._found: list[ContentDelta] = []
        self._free = self._read_rest if family.is_anchored else self._read_text
        self._state: Callable[[], bool] = self._read_head if family.is_anchored else self._read_text
        self._arguments: Arguments | None = None
        self._rest: JsonArguments | None = None  # of the object around the arguments
        self._follows_call = False

    def feed(self, text: str) -> list[ContentDelta]:
        """The deltas that became certain with this piece."""
        self.held += text
        while self.held and self._state():  # a state returns whether it got anywhere
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[ContentDelta]:
        """The deltas of what was held back. Markup behind complete arguments is dropped; markup before them is text."""
        if self._arguments is not None:
            self._found += self._calls.extend(self._arguments.finish(self.held))
        elif self._state not in (self._read_tail, self._read_next):
            self._emit_text(self.held)
        self.held = ""
        return self.feed("")

    def _emit_text(self, text: str) -> bool:
        """Emit the first part of what is held as text."""
        self.held = self.held[len(text) :]
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._found.append(Text(text))
        return True

    def _read_rest(self) -> bool:
        return self._emit_text(self.held)  # no call can come

    def _read_text(self) -> bool:
        text, trigger, _ = split_at(self.held, self._family.trigger)
        if trigger:
            self._state = self._read_head
        return (bool(text.rstrip()) and self._emit_text(text.rstrip())) or bool(trigger)

    def _read_head(self) -> bool:
        """Read a call up to its arguments, behind white space. In some families it is not announced, but comes first."""
        opening, blank = self._family.opening, len(self.held) - len(self.held.lstrip())
        if self._open_call(opening, blank):
            return True
        if piece(opening).may_come(self.held, blank):
            return False
        self._state = self._free
        return self._family.is_anchored or self._emit_text(self.held[: blank + len(self._family.trigger)])

    def _open_call(self, opening: str, start: int = 0) -> bool:
        """Open a call if this is the opening of one, with the name of a tool that exists."""
        match = piece(opening).match(self.held, start)
        if match is None or match["name"] not in self._calls.tools:
            return False
        words = match.groupdict()
        self._found.append(self._calls.open(words["name"], self._family.id_form.format(**words)))
        match self._family.notation:
            case Tags() as tags:
                self._arguments = TagArguments(tags, self._calls.tools[words["name"]], self._family.tail)
            case Pairs() as pairs:
                self._arguments = PairArguments(pairs.quotes, self._family.tail[0])
            case Json():
                self._arguments = JsonArguments()
        self.held = self.held[match.end() - len(self._family.brace) :]
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        arguments = self._arguments
        assert arguments is not None, "a call is open"
        made, used = arguments.read(self.held)
        self._found += self._calls.extend(made)
        self.held = self.held[used:]
        if not arguments.is_done and not arguments.is_broken:
            return False
        closed = self._calls.close() if arguments.is_done else []
        self._found += closed
        self._state = self._read_tail if closed else self._free
        self._arguments, self._follows_call = None, True
        return True

    def _read_tail(self) -> bool:
        """Read what closes a call. In an object more fields may follow the arguments; they are dropped."""
        if self._rest is None and self._family.brace and self._family.tail.startswith("}"):
            self.held = self.held.lstrip()
            self._rest = JsonArguments(depth=1) if self.held.startswith(",") else None
        if self._rest is not None:
            self.held = self.held[self._rest.read(self.held)[1] :]
            if not self._rest.is_done:
                return False
            self._rest, self.held = None, "}" + self.held
        tail = piece(self._family.tail)
        if match := tail.match(self.held):
            self.held = self.held[match.end() :]
        elif tail.may_come(self.held):
            return False
        self._state = self._read_next if match and self._family.end else self._free
        return True

    def _read_next(self) -> bool:
        """Read the opening of the next of several calls, or what closes them all."""
        end = piece(self._family.end)
        if match := end.match(self.held):
            self.held = self.held[match.end() :]
        elif self._open_call(self._family.following):
            return True
        elif end.may_come(self.held) or piece(self._family.following).may_come(self.held):
            return False
        self._state = self._free
        return True


class HarmonyReader:
    """Reads answers of gpt-oss, whose reasoning, text and calls are messages of one stream, with or without tools.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
        <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}

    The prompt ends with <|start|>assistant; <|call|> and <|return|> end the answer. No ReasoningSplitter is needed.
    """

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str] = new_id) -> None:
        self.held = ""  # undecided
        self.is_reasoning = False  # of the message that is open
        self._calls = OpenCalls(tools, make_id)
        self._in_header = True
        self._arguments: JsonArguments | None = None  # when they are done, what follows in the message is dropped

    def feed(self, text: str) -> list[ContentDelta]:
        """The deltas that became certain with this piece."""
        self.held += text
        found: list[ContentDelta] = []
        while self.held:
            before = len(self.held), self._in_header
            found += self._read_header() if self._in_header else self._read_body()
            if before == (len(self.held), self._in_header):
                break
        return found

    def finish(self) -> list[ContentDelta]:
        """The deltas of what was held back. A header that was cut off is dropped."""
        rest, self.held = self.held, ""
        is_header = self._in_header and rest.lstrip().startswith("<|")
        return [] if is_header else self._read_message(rest)[0]

    def _read_header(self) -> list[ContentDelta]:
        """Read a message's recipient and channel; a text without header is an answer."""
        start = self.held.lstrip()
        if not any(start.startswith(one) or one.startswith(start) for one in HEADER_BEGINNINGS):
            self._in_header = False
            return []
        header, found, rest = self.held.partition(MESSAGE)
        if not found:
            return []
        self.held, self._in_header = rest, False
        self.is_reasoning = "<|channel|>analysis" in header and "to=" not in header
        recipient = RECIPIENT.search(header)
        if recipient is None:
            return []
        if recipient[1] not in self._calls.tools:
            return [Text(header + MESSAGE)]
        self._arguments = JsonArguments()
        return [self._calls.open(recipient[1])]

    def _read_body(self) -> list[ContentDelta]:
        if self._arguments is not None and not self._arguments.is_done:  # in their strings a marker is a text like any other
            deltas, used = self._read_message(self.held)
            self.held = self.held[used:]
            return deltas
        text, end, self.held = split_at(self.held, END)
        deltas, _ = self._read_message(text)
        if end:
            self._in_header, self.is_reasoning, self._arguments = True, False, None
        return deltas

    def _read_message(self, text: str) -> tuple[list[ContentDelta], int]:
        """The deltas of a part of a message, and how many of its characters were used."""
        arguments = self._arguments
        if not text or (arguments is not None and arguments.is_done):
            return [], len(text)
        if arguments is None:
            return [Reasoning(text) if self.is_reasoning else Text(text)], len(text)
        made, used = arguments.read(text)
        found, closed = self._calls.extend(made), self._calls.close() if arguments.is_done else []
        if arguments.is_broken or (arguments.is_done and not closed):
            self._arguments = None
        return found + closed, used
