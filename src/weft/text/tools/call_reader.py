"""An answer's text → text and calls, as they come. Cut anywhere, the same comes out.

What can not be a call is text, to the letter: markup with an unknown name or a wrong shape. Once a call is open it stays
so: when its arguments break it is never closed, and the rest is text; when the answer ends within them they end there
too. White space before and after calls belongs to the markup. Knows families, no tokens; `Reader` has one per choice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from weft.text.stop_strings import overlap
from weft.text.tools.arguments import Arguments, JsonArguments, arguments_reader, decoded
from weft.text.tools.families import Family
from weft.text.tools.pieces import piece
from weft.text.tools.tool import Tool
from weft.text.types import CallArguments, CallClosed, CallOpened, ContentDelta, Text


def new_id() -> str:
    """An id for a call that the model gave none."""
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """The calls of an answer, opened one after the other."""

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.num_opened = 0
        self._make_id = make_id
        self._ids: set[str] = set()
        self._said: list[str] = []

    def open(self, name: str, given_id: str = "") -> ContentDelta:
        """The next call. An id that the model gave is kept, but not twice."""
        call_id = self._make_id() if not given_id or given_id in self._ids else given_id
        self._ids.add(call_id)
        self.num_opened += 1
        self._said = []
        return CallOpened(self.num_opened - 1, call_id, name)

    def say(self, text: str) -> list[ContentDelta]:
        """A piece of its arguments."""
        self._said.append(text)
        return [CallArguments(self.num_opened - 1, text)] if text else []

    def close(self) -> list[ContentDelta]:
        """Its end, if what was said is an object."""
        return [CallClosed(self.num_opened - 1)] if isinstance(decoded("".join(self._said)), dict) else []


class CallReader:
    """Reads the calls of one family."""

    thinking = False  # that is told apart before

    def __init__(self, family: Family, tools: Sequence[Tool], make_id: Callable[[], str] = new_id) -> None:
        self.held = ""  # what is not decided yet
        self._family = family
        self._calls = Calls(tools, make_id)
        self._found: list[ContentDelta] = []
        self._free = self._text if family.is_anchored else self._answer
        self._state: Callable[[], bool] = self._head if family.is_anchored else self._answer
        self._arguments: Arguments | None = None
        self._rest: JsonArguments | None = None  # of the object around the arguments
        self._follows_call = False

    def feed(self, text: str) -> list[ContentDelta]:
        """What became certain with this piece."""
        self.held += text
        while self.held and self._state():  # a state says whether it got anywhere
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[ContentDelta]:
        """What was held back. Markup behind complete arguments is dropped; markup before them was none."""
        if self._arguments is not None:
            self._found += self._calls.say(self._arguments.cut(self.held))
        elif self._state not in (self._tail, self._next):
            self._tell(self.held)
        self.held = ""
        found, self._found = self._found, []
        return found

    def _tell(self, text: str) -> bool:
        """Text; the first of what is held."""
        self.held = self.held[len(text) :]
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._found.append(Text(text))
        return True

    def _text(self) -> bool:
        """Where no call can come."""
        return self._tell(self.held)

    def _answer(self) -> bool:
        """Text, until a call is announced."""
        trigger = self._family.trigger
        found = self.held.find(trigger)
        certain = found if found >= 0 else len(self.held) - overlap(self.held, trigger)
        body = self.held[:certain].rstrip()
        if found >= 0:
            self._state = self._head
        return (bool(body) and self._tell(body)) or found >= 0

    def _head(self) -> bool:
        """A call up to its arguments, behind white space. In some families it is not announced, but comes first."""
        opening, blank = self._family.opening, len(self.held) - len(self.held.lstrip())
        if self._opens(opening, blank):
            return True
        if piece(opening).may_come(self.held, blank):
            return False
        self._state = self._free
        return self._family.is_anchored or self._tell(self.held[: blank + len(self._family.trigger)])

    def _opens(self, opening: str, start: int = 0) -> bool:
        """Open a call if this announces one that there is."""
        match = piece(opening).match(self.held, start)
        if match is None or match["name"] not in self._calls.tools:
            return False
        words = match.groupdict()
        self._found.append(self._calls.open(words["name"], self._family.id_form.format(**words)))
        self._arguments = arguments_reader(self._family.notation, self._calls.tools[words["name"]], self._family.tail)
        self.held = self.held[match.end() - len(self._family.brace) :]
        self._state = self._read
        return True

    def _read(self) -> bool:
        """Arguments."""
        arguments = self._arguments
        assert arguments is not None, "a call is open"
        told, used = arguments.read(self.held)
        self._found += self._calls.say(told)
        self.held = self.held[used:]
        if not arguments.is_done and not arguments.is_broken:
            return False
        closed = self._calls.close() if arguments.is_done else []
        self._found += closed
        self._state = self._tail if closed else self._free
        self._arguments, self._follows_call = None, True
        return True

    def _tail(self) -> bool:
        """What closes a call. In an object more may follow the arguments, which says nothing to us."""
        if self._rest is None and self._family.is_object:
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
        self._state = self._next if match and self._family.end else self._free
        return True

    def _next(self) -> bool:
        """The next call of several, or what closes them all."""
        end = piece(self._family.end)
        if match := end.match(self.held):
            self.held = self.held[match.end() :]
        elif self._opens(self._family.following):
            return True
        elif end.may_come(self.held) or piece(self._family.following).may_come(self.held):
            return False
        self._state = self._free
        return True
