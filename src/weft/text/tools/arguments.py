"""Incremental readers of a tool call's arguments: convert JSON, tags or keyword arguments to JSON text while streaming."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weft.text.stop_strings import overlap, split_at
from weft.text.tools.tool import Tool

MARKS = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)
WORD = re.compile(r"[^\s,:=\[\]{}()'\"<]+")
SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
SIGNS = {",": ", ", ":": ": ", "=": ": "}
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4}|[^xuU])", re.DOTALL)
CLOSED = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|'[^\W_]|\\.)*')""", re.DOTALL)
UNCLOSED = re.compile("[\"']")
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0", "\n": ""}
LONGEST_ESCAPE = 10
PLACES = re.compile("(⟨[a-z]+⟩)")
PLACE_LETTERS = {"⟨name⟩": "[A-Za-z0-9_.-]", "⟨id⟩": "[A-Za-z0-9_.:-]", "⟨key⟩": r"[^<>\"\n]", "⟨type⟩": "[a-z]"}


@dataclass(frozen=True)
class Tags:
    """A notation with each argument in a tag of its own: strings are written raw, other values as JSON."""

    open: str  # has ⟨key⟩, and ⟨type⟩ where the tag says what follows
    close: str
    types: tuple[str, str] = ("", "")  # the word at ⟨type⟩ for a text, and a regular expression for those of other values
    quotes: tuple[str, str] = ("", "")  # may be put around a text
    is_python: bool = False  # other values may be written as Python prints them


@dataclass(frozen=True)
class Pairs:
    """A notation with arguments as key-value pairs, like Python's keyword arguments: a='x', b=1."""

    assign: str
    quotes: tuple[str, ...] = ("'", '"')
    is_json: bool = True  # values written as JSON are understood too
    is_sorted: bool = False


@dataclass(frozen=True)
class Elements:
    """A notation with each argument, and each key and item within it, in a tag of its own behind a marker."""

    mark: str


Notation = Tags | Pairs | Elements | None  # None: arguments are JSON


class Piece:
    """Matches fixed text with placeholders like ⟨name⟩ against streamed text; a match found stays one when the text grows."""

    def __init__(self, text: str) -> None:
        whole = begun = ""
        for atom in reversed([atom for part in PLACES.split(text) for atom in ([part] if part in PLACE_LETTERS else part)]):
            pattern, begin = re.escape(atom), ""  # `begin`: the beginning of the atom at the end of a text
            if letters := PLACE_LETTERS.get(atom):
                pattern, begin = f"(?P<{atom[1:-1]}>{letters}+)(?!{letters})(?=[\\s\\S])", f"{letters}*"
            elif atom in " \n":  # templates differ in it
                pattern = f"(?:{atom}|(?=[^{atom}]))"  # known to be missing only when something else is there
            whole = pattern + whole
            begun = f"(?:{begin}\\Z|{pattern}{begun})"
        self.match, self._match_begun = re.compile(whole).match, re.compile(begun).match

    def may_come(self, text: str, start: int = 0) -> bool:
        """Whether the text from `start` on is only the beginning of a match, which more text could complete."""
        return self._match_begun(text, start) is not None and self.match(text, start) is None


piece = lru_cache(maxsize=256)(Piece)


class Arguments:
    """Base of readers that convert a call's streamed arguments to JSON; subclasses implement `_step` for one notation."""

    is_done = False  # the arguments ended; what follows them was not used
    is_broken = False  # the text can not belong to arguments

    def read(self, text: str) -> tuple[str, int]:
        """Return JSON text and the number of characters it was made from; the caller passes the rest again with more text."""
        made: list[str] = []
        at, used = 0, 1
        while used and at < len(text) and not self.is_done and not self.is_broken:
            used = self._step(text[at:], made)
            at += used
        return "".join(made), at

    def _step(self, text: str, made: list[str]) -> int:
        """Append JSON for the start of `text` to `made`; return the number of characters used, 0 to stop or wait for more."""
        raise NotImplementedError

    def finish(self, text: str) -> str:
        """Return the rest of the JSON when the answer ends within the arguments; here the unused text, unconverted."""
        return text


class JsonArguments(Arguments):
    """Passes JSON arguments through unchanged, up to the end of their object; `depth` above 0 begins inside an object."""

    def __init__(self, depth: int = 0) -> None:
        self.in_string = False
        self._depth = depth

    def _step(self, text: str, made: list[str]) -> int:
        used = len(text)
        if not self._depth and not text.startswith("{"):
            self.is_broken, used = True, 0
        for mark in MARKS.finditer(text, 0, used):
            if mark[0] == "\\":  # its letter is still to come
                used = mark.start()
            elif mark[0] == '"':
                self.in_string = not self.in_string
            elif len(mark[0]) == 1 and not self.in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                self.is_done = self._depth <= 0
                if self.is_done:
                    used = mark.end()
                    break
        made.append(text[:used])
        return used


class TagArguments(Arguments):
    """Reads arguments in the `Tags` notation and converts them to one JSON object."""

    def __init__(self, tags: Tags, tool: Tool, closing: str) -> None:
        self._open, self._closing = piece(tags.open), piece(closing)
        self._close, self._text_type = tags.close, tags.types[0]
        self._quotes, self._is_python = tags.quotes, tags.is_python
        self._nulls = ("null", "None") if tags.is_python else ("null",)
        self._tool = tool
        self._kind = ""  # of the value that is open
        self._quote = ""  # still to be written before a text
        self._is_quoted = False  # the text that is open
        self._glue = "{"

    def _step(self, text: str, made: list[str]) -> int:
        return self._read_value(text, made) if self._kind else self._read_tag(text, made)

    def finish(self, text: str) -> str:
        """Return the unread rest of the open value as JSON, without end quote; "" if none is open: partial tags are withheld."""
        return text.strip() if self._kind == "json" else self._quote + escape(text) if self._kind else ""

    def _read_tag(self, text: str, made: list[str]) -> int:
        if self._closing.match(text):
            self.is_done = True
            made.append("{}" if self._glue == "{" else "}")
        elif found := self._open.match(text):
            made.append(f'{self._glue}"{escape(found["key"])}": ')
            self._glue, self._quote = ", ", '"'
            self._kind = self._tool.kind_of(self._tool.schema_of(found["key"]))
            if self._text_type:
                self._kind = "text" if found["type"] == self._text_type else "json"
            return found.end()
        else:
            self.is_broken = not self._open.may_come(text) and not self._closing.may_come(text)
        return 0

    def _read_value(self, text: str, made: list[str]) -> int:
        opening = self._quotes[0] if self._quote == '"' and self._kind != "json" and not self._is_quoted else ""
        if opening and (text.startswith(opening) or opening.startswith(text)):
            self._is_quoted = text.startswith(opening)
            return len(opening) * self._is_quoted
        close = self._quotes[1] * self._is_quoted + self._close.lstrip("\n")
        end = text.find(close)
        while self._kind == "json" and end >= 0 and _ends_in_string(text[:end], self._is_python):
            end = text.find(close, end + 1)
        value = text[:end] if end >= 0 else text[: len(text) - overlap(text, close)]
        if self._close != close:
            value = value.removesuffix("\n")
        may_be_null = self._kind == "nullable" and self._quote == '"' and not self._is_quoted
        if end < 0:
            if not value or self._kind == "json" or (may_be_null and any(null.startswith(value) for null in self._nulls)):
                return 0
            made.append(self._quote + escape(value))
            self._quote = ""
            return len(value)
        is_json = self._kind == "json" or (may_be_null and value in self._nulls)
        made.append(as_json(value) if is_json else f'{self._quote}{escape(value)}"')
        self._kind, self._is_quoted = "", False
        return end + len(close)


class PairArguments(Arguments):
    """Reads arguments as key=value or key:value pairs, whose values may be nested, and converts them to one JSON object."""

    def __init__(self, quotes: tuple[str, ...], closer: str) -> None:
        self._quotes, self._closer = quotes, closer
        self._quote = ""  # of the text that is open
        self._open: list[str] = []  # brackets
        self._wants_key = True
        self._begin = "{"

    def _step(self, text: str, made: list[str]) -> int:
        if self._quote:
            return self._read_text(text, made)
        if text[0].isspace():
            return 1
        if not self._open and text[0] == self._closer:
            self.is_done = True
            made.append(self._begin + "}")
            return 0
        made.append(self._begin)
        self._begin = ""
        for quote in self._quotes:
            if text.startswith(quote):
                self._quote = quote
                made.append('"')
                return len(quote)
            if quote.startswith(text):
                return 0
        word = WORD.match(text)
        if word and word.end() == len(text):
            return 0
        value = self._word(word[0]) if word else self._sign(text[0])
        self.is_broken = value is None
        made.append(value or "")
        return 0 if value is None else len(word[0] if word else text[0])

    def _word(self, word: str) -> str | None:
        value = f'"{word}"' if self._wants_key else PYTHON_WORDS.get(word, word)
        return value if "\\" not in word and (self._wants_key or SCALAR.fullmatch(value)) else None

    def _sign(self, sign: str) -> str | None:
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
            return None
        return SIGNS.get(sign, sign)

    def finish(self, text: str) -> str:
        """Return the rest of the JSON when the answer ends within the arguments; a quote at its end ends its text."""
        return '"' if text and text == self._quote else text

    def _read_text(self, text: str, made: list[str]) -> int:
        quote = self._quote
        if len(quote) == 1 and text == quote:
            return 0
        if text.startswith(quote) and not (len(quote) == 1 and text[1].isalnum()):  # there it is an apostrophe
            self._quote = ""
            made.append('"')
            return len(quote)
        if len(quote) == 1 and text[0] == "\\":
            found = ESCAPE.match(text)
            self.is_broken = found is None and len(text) >= LONGEST_ESCAPE
            made.append(_translate_escape(found[0][1:]) if found else "")
            return found.end() if found else 0
        if text.startswith(quote):
            made.append(escape(quote))
            return len(quote)
        ends = [quote, "\\"] if len(quote) == 1 else [quote]  # in quotes of several letters nothing is escaped
        certain = min((split_at(text, end)[0] for end in ends), key=len)
        made.append(escape(certain))
        return len(certain)


def escape(text: str) -> str:
    """Return the text escaped for use between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decode_json(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not valid JSON."""
    try:
        return json.loads(text, parse_constant=int)  # which refuses NaN and Infinity: they are Python, not JSON
    except (ValueError, RecursionError):
        return None


def as_json(value: str) -> str:
    """Return a value as JSON: unchanged if it is JSON, converted if it is a Python literal, else as a JSON string."""
    text = value.strip()
    if text == "null" or decode_json(text) is not None:
        return text
    reader = PairArguments(("'", '"'), ")")
    made = reader.read(f"a={text})")[0]
    found = decode_json(made) if reader.is_done else None
    if isinstance(found, dict) and len(found) == 1:
        return made.removeprefix('{"a": ').removesuffix("}")
    return f'"{escape(value)}"'


def _ends_in_string(text: str, is_python: bool) -> bool:
    if is_python:
        return text.lstrip()[:1] in ("{", "[", '"', "'") and UNCLOSED.search(CLOSED.sub("", text)) is not None
    scan = JsonArguments(depth=1)
    scan.read(text)
    return text.lstrip()[:1] in ("{", "[", '"') and scan.in_string


def _translate_escape(escaped: str) -> str:
    """Translate a Python string escape, given without its backslash, to the text of a JSON string."""
    if escaped[0] in "xuU":
        code = int(escaped[1:], 16)
        return f"\\u{code:04x}" if code < 0x10000 else chr(code)
    return escape(ESCAPED.get(escaped, escaped if escaped in "'\"\\/" else f"\\{escaped}"))
