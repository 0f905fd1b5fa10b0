"""Splits streamed answer text into text and tool calls; the result does not depend on where the stream is cut.

Markup that is no valid call (unknown name, wrong shape) is emitted unchanged as text. An open call is never taken back: if its
arguments are malformed, it is not closed and the rest is text; if the answer ends within them, they end there too. White space
before and after calls belongs to the markup. In an answer that was cut, what may be the beginning of a call is no text. Where a
call is required there is no text at all, and whatever comes after a call and begins no other ends the answer.
"""

import re
import secrets
from collections.abc import Callable, Sequence

from weft.text.stop_strings import split_at
from weft.text.tools.arguments import (
    Arguments,
    Elements,
    JsonArguments,
    PairArguments,
    Piece,
    TagArguments,
    Tags,
    decode_json,
    piece,
)
from weft.text.tools.bare_calls import FENCE, BareCall, BareCallFinder
from weft.text.tools.elements import ElementArguments
from weft.text.tools.families import Family
from weft.text.tools.tool import Tool
from weft.text.types import CallArguments, CallClosed, CallOpened, ContentDelta, Reasoning, Text

MESSAGE, END = "<|message|>", "<|end|>"
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


def new_id() -> str:
    """Return a random id for a call to which the model gave none."""
    return f"call_{secrets.token_hex(12)}"


class _Reader:
    """Base of the call readers: a state machine over streamed text, which opens tool calls one after the other."""

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str]) -> None:
        self.held = ""  # undecided
        self.is_reasoning = False
        self.is_over = False  # the calls that were required are made, and something else came
        self._tools = {tool.name: tool for tool in tools}
        self._make_id = make_id
        self._state: Callable[[], bool]  # reads the beginning of what is held, and returns whether it got anywhere
        self._found: list[ContentDelta] = []
        self._ids: list[str] = []  # of all calls
        self._arguments: Arguments | None = None  # of the open call
        self._made: list[str] = []  # their JSON so far

    def feed(self, text: str) -> list[ContentDelta]:
        self.held += text
        while self.held and not self.is_over and self._state():
            pass
        found, self._found = self._found, []
        return found

    def _open_call(self, name: str, arguments: Arguments, given_id: str = "") -> None:
        """Open a call and emit CallOpened; its id is the model's, or a new one if the model gave none or one already used."""
        self._ids.append(self._make_id() if not given_id or given_id in self._ids else given_id)
        self._arguments, self._made = arguments, []
        self._found.append(CallOpened(len(self._ids) - 1, self._ids[-1], name))

    def _emit_arguments(self, made: str) -> None:
        self._made.append(made)
        if made:
            self._found.append(CallArguments(len(self._ids) - 1, made))

    def _read_arguments(self) -> bool | None:
        """Read arguments. If they end as a JSON object, close the call and return True; False if invalid, None if incomplete."""
        arguments = self._arguments
        assert arguments is not None, "a call is open"
        made, used = arguments.read(self.held)
        self._emit_arguments(made)
        self.held = self.held[used:]
        if not arguments.is_done and not arguments.is_broken:
            return None
        is_object = arguments.is_done and isinstance(decode_json("".join(self._made)), dict)
        if is_object:
            self._found.append(CallClosed(len(self._ids) - 1))
        return is_object


class CallReader(_Reader):
    """Splits an answer in one family's call format into text and tool calls."""

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool],
        make_id: Callable[[], str] = new_id,
        *,
        is_required: bool = False,
        reads_bare: bool = False,
        leads: Sequence[str] = (),
    ) -> None:
        super().__init__(tools, make_id)
        self._family = family
        self._is_required = is_required
        self._brace = "{" if family.notation is None else ""  # the first letter of arguments, where that is known
        self._opening = piece((family.begin + family.head).lstrip() + self._brace)
        self._following = piece(((family.between or "") + family.head).lstrip() + self._brace)
        self._leads = [(piece(lead), lead[0]) for lead in leads]  # what may come between a text and a call
        self._num_lead = 0  # characters of it at the beginning of what is held, behind white space
        self._at_start = True  # of the answer: no text was given
        self._tail, self._end = piece(family.tail), piece(family.end.lstrip())
        self._is_list = bool(family.end) or (family.is_anchored and family.between is not None)  # what follows is known
        self._free = (lambda: self._emit_text(self.held)) if family.is_anchored else self._read_text  # anchored: no call can come
        self._state = self._read_head if family.is_anchored else self._read_text
        self._undecided = (self._read_text, self._read_head, self._read_bare, self._read_fence)  # what is held may be no text
        self._bare = BareCallFinder(frozenset(self._tools))
        self._in_fence = False
        if reads_bare and family.has_bare_calls:
            self._state = self._read_bare
        self._rest: JsonArguments | None = None  # of the object around the arguments
        self._follows_call = False

    def finish(self, *, is_cut: bool = False) -> list[ContentDelta]:
        """Return deltas for the text held back; markup after complete arguments is dropped, markup before them becomes text.

        Where the answer `is_cut`, the beginning of a call stays held: it is no text.
        """
        if self._arguments is not None:
            self._emit_arguments(self._arguments.finish(self.held))
        elif is_cut and self._state == self._read_bare and (call := self._bare.find(self.held)) is not None:
            self._open_bare(call)
        elif is_cut and self.held.strip() and self._state in self._undecided:
            found, self._found = self._found, []
            return found
        elif self._state not in (self._read_tail, self._read_next):
            self._emit_text(self.held)
        self.held = ""
        return self.feed("")

    def _emit_text(self, text: str) -> bool:
        self.held = self.held[len(text) :]
        if self._follows_call:
            text = text.lstrip()
        if text and self._is_required:
            self.is_over = bool(self._ids)
        elif text:
            self._follows_call = self._at_start = False
            self._found.append(Text(text))
        return True

    def _read_bare(self) -> bool:
        """Read a call without marks; if none begins here, go on with free text."""
        call = self._bare.find(self.held)
        if call is not None and call.end is not None:
            self._open_bare(call)
            self._found.append(CallClosed(len(self._ids) - 1))
            self.held, self._bare = self.held[call.end :], BareCallFinder(frozenset(self._tools))
            self._in_fence |= call.has_fence
            self._state = self._read_fence if self._in_fence else self._read_bare
            return True
        if self._bare.may_come:
            return False
        self._state = self._read_text
        return True

    def _open_bare(self, call: BareCall) -> None:
        self._open_call(call.name, JsonArguments())
        self._emit_arguments(call.arguments)
        self._arguments, self._follows_call = None, True

    def _read_fence(self) -> bool:
        """Read the end of a fence after a call, or another call within it."""
        text = self.held.lstrip()
        if FENCE.startswith(text) and text != FENCE:
            return False
        self._in_fence = not text.startswith(FENCE)
        self.held = text.removeprefix(FENCE)
        self._state = self._read_bare
        return True

    def _read_text(self) -> bool:
        text, trigger, rest = split_at(self.held, self._family.trigger)
        start = self._lead_start(text, is_whole=bool(trigger or rest)) if self._leads else len(text)
        if trigger:
            self._state, self._num_lead = self._read_head, len(text) - start
        text = text[:start].rstrip()
        return (bool(text) and self._emit_text(text)) or bool(trigger)

    def _lead_start(self, text: str, *, is_whole: bool) -> int:
        """Return where a lead begins that the text ends with; unless it `is_whole`, more text may complete it."""
        first = len(text) - len(text.lstrip())
        for place in range(first, len(text)):
            for lead, letter in self._leads:
                if text[place] != letter or (letter != "<" and not (self._at_start and place == first)):
                    continue
                match = lead.match(text, place)
                if (match is not None and not text[match.end() :].strip()) or (not is_whole and lead.may_come(text, place)):
                    return place
        return len(text)

    def _read_head(self) -> bool:
        """Read a call's markup up to its arguments, after white space; if no call can come here, go on with free text."""
        blank = len(self.held) - len(self.held.lstrip()) + self._num_lead
        if self._enter_call(self._opening, blank):
            self._num_lead = 0
            return True
        if self._opening.may_come(self.held, blank):
            return False
        self._state, self._num_lead = self._free, 0
        return self._family.is_anchored or self._emit_text(self.held[: blank + len(self._family.trigger)])

    def _enter_call(self, opening: Piece, start: int = 0) -> bool:
        match = opening.match(self.held, start)
        if match is None or match["name"] not in self._tools:
            return False
        words, family = match.groupdict(), self._family
        arguments: Arguments = JsonArguments()
        if isinstance(family.notation, Tags):
            arguments = TagArguments(family.notation, self._tools[words["name"]], family.tail)
        elif isinstance(family.notation, Elements):
            arguments = ElementArguments(family.notation, self._tools[words["name"]], family.tail)
        elif family.notation is not None:
            arguments = PairArguments(family.notation.quotes, family.tail[0])
        self._open_call(words["name"], arguments, family.id_form.format(**words))
        self.held = self.held[match.end() - len(self._brace) :]
        self._state = self._read_call
        return True

    def _read_call(self) -> bool:
        is_closed = self._read_arguments()
        if is_closed is None:
            return False
        self._state = self._read_tail if is_closed else self._free
        self._arguments, self._follows_call = None, True
        return True

    def _read_tail(self) -> bool:
        """Read the text that closes a call; further fields after the arguments in the call's JSON object are dropped."""
        if self._rest is None and self._brace and self._family.tail.lstrip().startswith("}"):
            self.held = self.held.lstrip()
            self._rest = JsonArguments(depth=1) if self.held.startswith(",") else None
        if self._rest is not None:
            self.held = self.held[self._rest.read(self.held)[1] :]
            if not self._rest.is_done:
                return False
            self._rest, self.held = None, "}" + self.held
        if match := self._tail.match(self.held):
            self.held = self.held[match.end() :]
        elif self._tail.may_come(self.held):
            return False
        self._state = self._read_next if match and self._is_list else self._free
        return True

    def _read_next(self) -> bool:
        """Read the text between two calls or after the last one, after white space, in which templates differ."""
        blank = len(self.held) - len(self.held.lstrip())
        if self._family.end and (match := self._end.match(self.held, blank)):
            self.held = self.held[match.end() :]
        elif self._enter_call(self._following, blank):
            return True
        elif self._end.may_come(self.held, blank) or self._following.may_come(self.held, blank):
            return False
        self._state = self._free
        return True


class HarmonyReader(_Reader):
    """Splits gpt-oss answers into reasoning, text and calls, which are messages of one stream (harmony), also without tools.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
        <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}

    The prompt ends with <|start|>assistant; <|call|> and <|return|> end the answer. No ReasoningSplitter is needed.
    """

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str] = new_id) -> None:
        super().__init__(tools, make_id)
        self._state = self._read_header

    def finish(self, *, is_cut: bool = False) -> list[ContentDelta]:
        """Return deltas for the text held back; an incomplete header and text held within a call are dropped."""
        rest, self.held = self.held, ""
        is_header = self._state == self._read_header and (is_cut or rest.lstrip().startswith("<|"))
        if rest and self._arguments is None and not is_header:
            self._found.append(Reasoning(rest) if self.is_reasoning else Text(rest))
        return self.feed("")

    def _read_header(self) -> bool:
        start = self.held.lstrip()
        if not any(start.startswith(one) or one.startswith(start) for one in ("<|channel|>", "<|start|>", "to=")):
            self._state = self._read_body
            return True
        header, found, rest = self.held.partition(MESSAGE)
        if not found:
            return False
        self.held, self._state = rest, self._read_body
        self.is_reasoning = "<|channel|>analysis" in header and "to=" not in header
        recipient = RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._tools:
            self._open_call(recipient[1], JsonArguments())
        elif recipient is not None:
            self._found.append(Text(header + MESSAGE))
        return True

    def _read_body(self) -> bool:
        if self._arguments is not None and not self._arguments.is_done:  # in their strings a marker is a text like any other
            num_held = len(self.held)
            if self._read_arguments() is False:
                self._arguments = None
            return len(self.held) < num_held
        text, end, self.held = split_at(self.held, END)
        if text and self._arguments is None:  # behind complete arguments it is dropped
            self._found.append(Reasoning(text) if self.is_reasoning else Text(text))
        if end:
            self.is_reasoning, self._arguments, self._state = False, None, self._read_header
        return bool(end)
