"""The arguments of one call, read piece by piece: whatever the notation, JSON comes out as it is generated.

Each reader takes text from where the arguments begin, and says what JSON it makes and how much text that used. Where the
text could still become something else it waits. Knows notations, not families; `CallReader` has one per call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from weft.text.stop_strings import overlap
from weft.text.tools.pieces import piece
from weft.text.tools.tool import Tool

MARKS = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)
WORD = re.compile(r"[^\s,:=\[\]{}()'\"<]+")
SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
PYTHON = {"True": "true", "False": "false", "None": "null"}
SIGNS = {",": ", ", ":": ": ", "=": ": "}
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4}|[^xuU])", re.DOTALL)
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0", "\n": ""}
LONGEST_ESCAPE = 10


@dataclass(frozen=True)
class Json:
    """Arguments as JSON: {"a": "x", "b": 1}."""


@dataclass(frozen=True)
class Tags:
    """Each argument in tags of its own, texts as they are, other values as JSON."""

    open: str  # has ⟨key⟩, and ⟨type⟩ where the tag says what follows
    close: str
    types: tuple[str, str] = ("", "")  # the word at ⟨type⟩ for a text, and a regular expression for those of other values


@dataclass(frozen=True)
class Pairs:
    """Names and values as a language writes them: a='x', b=1."""

    assign: str
    quotes: tuple[str, ...] = ("'", '"')
    is_json: bool = True  # JSON's way to write values is understood too
    is_sorted: bool = False


Notation = Json | Tags | Pairs


class Arguments:
    """How readers of arguments are used."""

    is_done = False  # they ended, and what follows them was not used
    is_broken = False  # what comes can not belong to arguments

    def read(self, text: str) -> tuple[str, int]:
        """A piece of JSON, and how much of the text it was made of."""
        raise NotImplementedError

    def cut(self, text: str) -> str:
        """What is told of text that was not used, when no more comes."""
        return text


def arguments_reader(notation: Notation, tool: Tool, closing: str) -> Arguments:
    """A reader for one call; `closing` is what follows its arguments."""
    match notation:
        case Tags():
            return TagArguments(notation, tool, closing)
        case Pairs():
            return PairArguments(notation.quotes, closing[0])
        case Json():
            return JsonArguments()


class JsonArguments(Arguments):
    """JSON goes through as it is, to the end of an object. May begin within one."""

    def __init__(self, depth: int = 0) -> None:
        self.in_string = False
        self._depth = depth
        self._begun = depth > 0

    def read(self, text: str) -> tuple[str, int]:
        """All of the text up to the end, but for a backslash whose letter is still to come."""
        self.is_broken = not self._begun and not text.startswith("{")
        self._begun = True
        used = 0 if self.is_broken else self._end(text)
        return text[:used], used

    def _end(self, text: str) -> int:
        for mark in MARKS.finditer(text):
            if mark[0] == "\\":
                return mark.start()
            if mark[0] == '"':
                self.in_string = not self.in_string
            elif len(mark[0]) == 1 and not self.in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                self.is_done = self._depth <= 0
                if self.is_done:
                    return mark.end()
        return len(text)


class TagArguments(Arguments):
    """Tags and what stands between them become an object."""

    def __init__(self, tags: Tags, tool: Tool, closing: str) -> None:
        self._open, self._closing = piece(tags.open), piece(closing)
        self._close, self._text_type = tags.close, tags.types[0]
        self._tool = tool
        self._kind = ""  # of the value that is open
        self._quote = ""  # what is still to be told before a text
        self._glue = "{"

    def read(self, text: str) -> tuple[str, int]:
        """JSON of the arguments that are complete, and of the text that is open."""
        told: list[str] = []
        at, used = 0, 0
        while used >= 0 and not self.is_done and not self.is_broken:
            at += used
            used = self._value(text[at:], told) if self._kind else self._between(text[at:], told)
        return "".join(told), at

    def cut(self, text: str) -> str:
        """Of a value what there is; of a tag nothing."""
        return text.strip() if self._kind == "json" else self._quote + inner(text) if self._kind else ""

    def _between(self, text: str, told: list[str]) -> int:
        """The length of the tag that opens an argument; -1: none comes, or it is not known yet."""
        if self._closing.match(text):
            self.is_done = True
            told.append("{}" if self._glue == "{" else "}")
        elif found := self._open.match(text):
            told.append(f'{self._glue}"{inner(found["key"])}": ')
            self._glue, self._quote = ", ", '"'
            self._kind = self._tool.kind_of(self._tool.schema_of(found["key"]))
            if self._text_type:
                self._kind = "text" if found["type"] == self._text_type else "json"
            return found.end()
        else:
            self.is_broken = not self._open.may_come(text) and not self._closing.may_come(text)
        return -1

    def _value(self, text: str, told: list[str]) -> int:
        """The length of the value and its closing tag, or of the part of a text that is sure; -1: not known yet."""
        close = self._close.lstrip("\n")
        end = text.find(close)
        while self._kind == "json" and end >= 0 and _is_in_string(text[:end]):
            end = text.find(close, end + 1)
        value = text[:end] if end >= 0 else text[: len(text) - overlap(text, close)]
        if self._close != close:
            value = value.removesuffix("\n")
        may_be_null = self._kind == "nullable" and self._quote == '"'
        if end < 0:
            if not value or self._kind == "json" or (may_be_null and "null".startswith(value)):
                return -1
            told.append(self._quote + inner(value))
            self._quote = ""
            return len(value)
        is_json = self._kind == "json" or (may_be_null and value == "null")
        told.append(converted(value) if is_json else f'{self._quote}{inner(value)}"')
        self._kind = ""
        return end + len(close)


class PairArguments(Arguments):
    """Python's keyword arguments, or what looks like them, become an object; values may be nested."""

    def __init__(self, quotes: tuple[str, ...], closer: str) -> None:
        self._quotes, self._closer = quotes, closer
        self._quote = ""  # of the text that is open
        self._open: list[str] = []  # brackets
        self._wants_key = True
        self._begin = "{"

    def read(self, text: str) -> tuple[str, int]:
        """JSON of all words and brackets that are complete, and of the text that is open."""
        told: list[str] = []
        at, used = 0, 1
        while at < len(text) and used:
            used = self._within(text[at:], told) if self._quote else self._next(text[at:], told)
            at += used
        return "".join(told), at

    def _next(self, text: str, told: list[str]) -> int:
        """The length of what comes; 0: none of it belongs here, or it is not known yet."""
        if text[0].isspace():
            return 1
        if not self._open and text[0] == self._closer:
            self.is_done = True
            told.append(self._begin + "}")
            return 0
        told.append(self._begin)
        self._begin = ""
        for quote in self._quotes:
            if text.startswith(quote):
                self._quote = quote
                told.append('"')
                return len(quote)
            if quote.startswith(text):
                return 0
        if word := WORD.match(text):
            return self._word(word[0], told) if word.end() < len(text) else 0
        return self._sign(text[0], told)

    def _word(self, word: str, told: list[str]) -> int:
        value = f'"{word}"' if self._wants_key else PYTHON.get(word, word)
        self.is_broken = "\\" in word or not (self._wants_key or SCALAR.fullmatch(value))
        told.append("" if self.is_broken else value)
        return 0 if self.is_broken else len(word)

    def _sign(self, sign: str, told: list[str]) -> int:
        if sign in "[{":
            self._open.append(sign)
            self._wants_key = sign == "{"
        elif self._open and self._open[-1] + sign in ("[]", "{}"):
            self._open.pop()
            self._wants_key = False
        elif sign == ",":
            self._wants_key = self._open[-1:] != ["["]
        elif sign in ":=" and self._wants_key:
            self._wants_key = False
        else:
            self.is_broken = True
        told.append("" if self.is_broken else SIGNS.get(sign, sign))
        return 0 if self.is_broken else 1

    def _within(self, text: str, told: list[str]) -> int:
        """The length of what is sure of a text; 0: nothing yet."""
        quote = self._quote
        if text.startswith(quote):
            self._quote = ""
            told.append('"')
            return len(quote)
        if len(quote) == 1 and text[0] == "\\":
            escape = ESCAPE.match(text)
            self.is_broken = escape is None and len(text) >= LONGEST_ESCAPE
            told.append(_unescaped(escape[0][1:]) if escape else "")
            return escape.end() if escape else 0
        ends = [quote, "\\"] if len(quote) == 1 else [quote]  # in quotes of several letters nothing is escaped
        end = min(text.find(one) if one in text else len(text) - overlap(text, one) for one in ends)
        told.append(inner(text[:end]))
        return end


def inner(text: str) -> str:
    """A text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> Any:
    """The value of a JSON text; None for what is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def converted(value: str) -> str:
    """A value as JSON: it is, or Python would write it so, or it is a text."""
    text = value.strip()
    if text == "null" or decoded(text) is not None:
        return text
    reader = PairArguments(("'", '"'), ")")
    found = decoded(reader.read(f"a={text})")[0])
    if reader.is_done and isinstance(found, dict) and len(found) == 1:
        return json.dumps(found["a"], ensure_ascii=False)
    return f'"{inner(value)}"'


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is Python, not JSON")


def _is_in_string(text: str) -> bool:
    """Whether JSON that begins like this has a string open at its end."""
    scan = JsonArguments(depth=1)
    scan.read(text)
    return text.lstrip()[:1] in ("{", "[", '"') and scan.in_string


def _unescaped(escape: str) -> str:
    """What follows a backslash in Python, as it stands in JSON."""
    if escape[0] in "xuU":
        code = int(escape[1:], 16)
        return f"\\u{code:04x}" if code < 0x10000 else chr(code)
    return inner(ESCAPED.get(escape, escape if escape in "'\"\\/" else f"\\{escape}"))
