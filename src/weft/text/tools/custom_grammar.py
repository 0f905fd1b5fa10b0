"""What a custom tool's text must be: its own grammar, made to stand where a model's calls have the text.

Within JSON the text is escaped, so every literal and pattern of the grammar is too. Where the text stands as it is, it must
not have the mark that closes it. Knows Lark as llguidance reads it, and no families; `grammar` uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec

Token = tuple[str, str]  # its kind and its text
Write = Callable[[str, str], str]  # a token → its text in another grammar

TOKEN = re.compile(
    r"""(?P<nothing>(?://|\#)[^\n]*|\s+|->\s*\w+)
    |(?P<range>"(?:[^"\\]|\\.)*"\s*\.\.\s*"(?:[^"\\]|\\.)*")
    |(?P<string>"(?:[^"\\]|\\.)*"i?)
    |(?P<pattern>/(?:[^/\\]|\\.)+/[a-z]*)
    |(?P<import>%import\s+\w+(?:\.\w+|\s*\([^)]*\))(?:\s*->\s*\w+)?)
    |(?P<definition>[!?]*[A-Za-z_][\w-]*\s*(?:\[[^\]\n]*\])?\s*:)
    |(?P<ignore>%ignore)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<foreign>%\w+|@\w+|<[^<>\s]+>)
    |(?P<sign>~\s*\d+(?:\s*\.\.\s*\d+)?|.)""",
    re.VERBOSE | re.DOTALL,
)
ATOM = re.compile(
    r"""(?P<flags>\(\?[a-wyz-]+\))
    |(?P<group>\((?:\?(?:P?<\w+>|[a-wyz-]*:)|(?!\?)))
    |(?P<end>\))
    |(?P<sign>[*+?|]|\{\d*,?\d*\})
    |(?P<set>\.|\\[dDsSwW]|\[\^?\]?(?:\\.|[^\]\\])*\])
    |\\(?:(?P<code>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|(?P<escape>[^a-zA-Z0-9]|[nrtfva]))
    |(?P<letter>[^\\^$\[\]{}()])""",
    re.VERBOSE | re.DOTALL,
)
TERMINAL = ("string", "pattern", "range")
LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
# Of what Lark has ready these have letters that JSON escapes.
COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
RARE = [chr(code) for code in range(32) if chr(code) not in "\b\t\n\f\r"]
SPECIAL = [*'"\\\b\t\n\f\r', *RARE]
ORDINARY = "".join(chr(code) for code in range(32, 0xD800) if chr(code) not in SPECIAL)
PLAIN = r'[^"\\\x00-\x1f]'
ESCAPES = "(?-i:"  # what a pattern has where a letter is escaped
ANY = "(?s:.*)"


def escaped(spec: GrammarSpec, place: str) -> str:
    """The texts of a grammar as JSON writes them between quotes. Raises InvalidRequest for a part that has no such form."""
    lark, write = _Lark(spec, place), partial(_escaped, place=place)
    if texts := [given for given in lark.attributes.values() if '"' in given or "/" in given]:
        raise _refused(place, texts[0])
    if lark.is_regular:
        return _nested("start: RULE_START", *lark.as_terminals(write))
    _check_apart({name: [(kind, write(kind, text)) for kind, text in part] for name, part in lark.terminals().items()}, place)
    return _nested(*lark.written(write))


def unescaped(spec: GrammarSpec, close: str, end: str, place: str, *, is_lazy: bool) -> str | None:
    """The texts of a grammar as they are, but for those with `close` in them, each followed by `end`; lazy: the first `end`.

    None for rules that lead back to themselves.
    """
    lark = _Lark(spec, place)
    if not lark.is_regular:
        return None
    whole = f"WHOLE: (RULE_START & {_without(close)}) {_quoted(end)}"
    return _nested(f"start{'[lazy]' * is_lazy}: WHOLE", whole, *lark.as_terminals(lambda _, text: text))


def embedded(spec: GrammarSpec, close: str, place: str) -> str:
    """The same for any rules: each pattern by itself is held to be without `close`, and must end before it."""
    held: dict[str, str] = {}

    def write(kind: str, text: str) -> str:
        if kind == "string" and close in _said(text.rstrip("i"), place):
            raise _refused(place, text)
        return held.setdefault(text, f"HELD_{len(held)}") if kind == "pattern" else text

    written = _Lark(spec, place).written(write)
    return _nested(*written, *(f"{name}: {text} & {_without(close)}" for text, name in held.items()))


class _Lark:
    """A grammar, taken apart into its definitions."""

    def __init__(self, spec: GrammarSpec, place: str) -> None:
        self.bodies: dict[str, list[Token]] = {}  # of rules, terminals (in capitals) and what may stand between (%ignore)
        self.attributes: dict[str, str] = {}
        self.imports: list[str] = []
        body: list[Token] = []
        for kind, text in _tokens(spec, place):
            match kind:
                case "import":
                    self._take_import(text)
                case "ignore":
                    body = self.bodies[f"%ignore {len(self.bodies)}"] = []
                case "definition":
                    name, bracket, rest = text.rstrip(": \t").lstrip("!?").partition("[")
                    self.attributes[name.strip()] = bracket + rest
                    body = self.bodies[name.strip()] = []
                case _:
                    body.append((kind, text))

    def _take_import(self, text: str) -> None:
        names, _, alias = text.partition("->")
        for word in re.findall(r"\w+", names)[2:]:
            if word in COMMON:
                self.bodies[alias.strip() or word] = [("pattern", f"/{COMMON[word]}/")]
            else:
                self.imports.append(f"%import common.{word} -> {alias.strip() or word}")

    @cached_property
    def is_regular(self) -> bool:
        """Whether no rule leads back to itself, so that all of them can be one terminal."""
        return not any(self.attributes.values()) and not any(name in self._reached(name) for name in self.bodies)

    def _reached(self, name: str) -> set[str]:
        """All that a name is made of."""
        reached: set[str] = set()
        left = [name]
        while left:
            new = {text for kind, text in self.bodies.get(left.pop(), ()) if kind == "name"} - reached
            reached |= new
            left += new
        return reached

    def terminals(self) -> dict[str, list[Token]]:
        """What the lexer tells apart: terminals that rules use, by name or as they are, with all that they are made of."""
        used = {token for name, body in self.bodies.items() if not name.isupper() for token in body}
        parts = {text: [(kind, text)] for kind, text in used if kind in TERMINAL}
        for name in {text for kind, text in used if kind == "name" and text.isupper()}:
            reached = [name, *self._reached(name)]
            parts[name] = [token for one in reached for token in self.bodies.get(one, ()) if token[0] in TERMINAL]
        return parts

    def written(self, write: Write) -> Iterator[str]:
        """The lines of this grammar, with other texts."""
        yield from self.imports
        for name, body in self.bodies.items():
            head = "%ignore" if name.startswith("%") else f"{name}{self.attributes.get(name, '')}:"
            yield " ".join([head, *(write(*token) for token in body)])

    def as_terminals(self, write: Write) -> Iterator[str]:
        """The same with all rules made terminals, so that the lexer has no borders to find."""
        ignored = []
        yield from self.imports
        for name, body in self.bodies.items():
            if name.startswith("%"):
                ignored.append(" ".join(write(*token) for token in body))
            else:
                yield f"{_capital(name)}: {' '.join(self._spaced(write, name, token) for token in body)}"
        yield f"IGNORED: ({' | '.join(ignored)})*" if ignored else 'IGNORED: ""'

    def _spaced(self, write: Write, name: str, token: Token) -> str:
        """A part of a rule or terminal; behind a terminal's end comes what may stand between."""
        kind, text = token
        word = _capital(text) if kind == "name" else write(kind, text)
        is_end = not name.isupper() and (kind in TERMINAL or (kind == "name" and text.isupper()))
        return f"({word} IGNORED)" if is_end else word


def _tokens(spec: GrammarSpec, place: str) -> Iterator[Token]:
    text = spec.text
    if spec.kind == "regex":
        pattern = re.sub(r"(\\.)|(/)|\n", lambda found: found[1] or ("\\/" if found[2] else "\\n"), text, flags=re.DOTALL)
        text = f"start: /{pattern}/"
    for found in TOKEN.finditer(text):
        kind = found.lastgroup or ""
        if kind == "foreign":
            raise _refused(place, found[0])
        if kind != "nothing":
            yield kind, found[0]


def _check_apart(terminals: dict[str, list[Token]], place: str) -> None:
    """Refuse a terminal that may go on with a backslash where another may begin with one: the lexer would not find the border."""
    begins = {name for name, part in terminals.items() if any(ESCAPES in text or text.startswith('"\\\\') for _, text in part)}
    for name, part in terminals.items():
        if begins - {name} and any(ESCAPES in text for _, text in part):
            raise _refused(place, f"{name} beside {min(begins - {name})}, in rules that lead back to themselves,")


def _escaped(kind: str, text: str, place: str) -> str:
    """A part of a grammar, as it is for escaped texts."""
    match kind:
        case "string" if text.endswith("i"):
            return f"/(?i:{''.join(map(_letter, _said(text[:-1], place)))})/"
        case "string":
            return _quoted(_quoted(_said(text, place))[1:-1])
        case "range":
            first, last = (_bare(_said(one.strip(), place)) for one in text.split(".."))
            return f"/{_set(f'[{first}-{last}]', place)}/"
        case "pattern":
            return _pattern(text, place)
        case "sign" if text == "~":
            raise _refused(place, "~")
    return text


def _pattern(text: str, place: str) -> str:
    """A pattern, slashes and flags included, for escaped texts."""
    pattern, _, flags = text[1:].rpartition("/")
    written: list[str] = []
    dots = ["s" in flags]  # whether a dot is also a line break, for each group that is open
    at = 0
    while at < len(pattern):
        found = ATOM.match(pattern, at)
        if found is None or "x" in flags:
            raise _refused(place, text)
        written.append(_atom(found, dots, place))
        at = found.end()
    return f"/{''.join(written)}/{flags}"


def _atom(found: re.Match[str], dots: list[bool], place: str) -> str:
    """A piece of a pattern."""
    atom = found[0]
    match found.lastgroup:
        case "group":
            dots.append(_takes_breaks(atom, dots[-1]))
        case "flags":
            dots[-1] = _takes_breaks(atom, dots[-1])
        case "end":
            dots[:] = dots[:-1] or dots
        case "set":
            named = {".": r"[\s\S]" if dots[-1] else r"[^\n]", "\\": f"[{atom}]"}
            return _set(named.get(atom[0], atom), place)
        case "code":
            return _letter(chr(int(found["code"].strip("xu"), 16)))
        case "escape":
            return _letter(LETTERS.get(found["escape"], found["escape"]))
        case "letter":
            return _letter(atom)
    return atom


def _takes_breaks(atom: str, before: bool) -> bool:
    """Whether a dot is a line break under the flags of a group."""
    flags = re.match(r"\(\?([a-z]*)-?([a-z]*)[:)]", atom)
    return before if flags is None else "s" in flags[1] or (before and "s" not in flags[2])


def _set(text: str, place: str) -> str:
    """One letter of a set, escaped where JSON wants it."""
    if re.search(r"\[|&&|--|~~|\|\|", re.sub(r"\\.", "", text[1:])):  # sets of sets: Python does not read them
        raise _refused(place, text)
    try:
        letters = re.compile(text, re.ASCII)
    except re.error:
        raise _refused(place, text) from None
    specials = [one for one in SPECIAL if letters.fullmatch(one)]
    plain = [f"[{text}&&{PLAIN}]"] if letters.search(ORDINARY) else []
    if set(RARE) <= set(specials):
        plain.append(rf"{ESCAPES}\\u00(?:0[0-7bef]|1[0-9a-f]))")
        specials = [one for one in specials if one not in RARE]
    return f"(?:{'|'.join([*plain, *map(_letter, specials)])})"


def _letter(letter: str) -> str:
    """A pattern for one letter, escaped where JSON wants it."""
    return f"{ESCAPES}{_bare(_quoted(letter)[1:-1])})" if letter in SPECIAL else _bare(letter)


def _bare(text: str) -> str:
    """A pattern for a text."""
    return re.escape(text).replace("/", r"\/")


def _without(text: str) -> str:
    return f"~/{ANY}{_bare(text)}{ANY}/"


def _capital(name: str) -> str:
    return name if name.isupper() else f"RULE_{name.upper()}"


def _nested(*lines: str) -> str:
    return "%lark {\n" + "\n".join(lines) + "\n}"


def _said(text: str, place: str) -> str:
    """What a quoted text says."""
    try:
        return str(json.loads(text))
    except ValueError:
        raise _refused(place, text) from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refused(place: str, part: str) -> InvalidRequest:
    message = f"{place}: {part[:160]} can not be enforced in the way this model writes calls; write it otherwise"
    return InvalidRequest(message, place)
