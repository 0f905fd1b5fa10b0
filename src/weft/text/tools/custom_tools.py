"""Custom tools, which take one text: converts the text's grammar for use in calls, and extracts the text from arguments.

A model sees a custom tool as a function with the parameter `input`. Within JSON the text is escaped, so every literal and
pattern of its grammar is escaped too; in other notations the text must not contain the mark that closes it.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec

INPUT = "input"
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PAIR = r"\\ud[89ab][0-9a-f]{2}(?:\\u[0-9a-f]{4}|(?=[^\\]|\\[^u]))"  # a character is complete only with its second half
_CERTAIN = re.compile(rf'(?:[^"\\]|\\[^u]|\\u(?!d[89ab])[0-9a-f]{{4}}|{_PAIR})*', re.IGNORECASE)

LarkToken = tuple[str, str]  # its kind and its text
Write = Callable[[str, str], str]  # kind and text of a token → its text in another grammar

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
    |(?P<letter>[^\\^$\[\]{}()])
    |(?P<unknown>.)""",
    re.VERBOSE | re.DOTALL,
)
TERMINAL = ("string", "pattern", "range")
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
# The terminals of Lark's library that have letters which JSON escapes.
COMMON = {"CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
COMMON |= {"SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"\/\/[^\n]*", "SQL_COMMENT": r"--[^\n]*"}
COMMON |= {"ESCAPED_STRING": r'"([^"\\]|\\.)*"'}
RARE = [chr(code) for code in range(32) if chr(code) not in "\b\t\n\f\r"]
SPECIAL = [*'"\\\b\t\n\f\r', *RARE]
ORDINARY = "".join(chr(code) for code in range(32, 0xD800) if chr(code) not in SPECIAL)
PLAIN = r'[^"\\\x00-\x1f]'
ESCAPES = "(?-i:"  # what a pattern has where a letter is escaped


class CustomInputReader:
    """Extracts a custom tool's input text from the JSON arguments of one call while they are streamed."""

    def __init__(self) -> None:
        self._held = ""  # undecided
        self._in_text = False

    def feed(self, arguments: str) -> str:
        """Take a piece of the arguments; return the input text that is now certain, "" if none or if they have another shape."""
        self._held += arguments
        if not self._in_text:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._in_text, self._held = True, self._held[begin.end() :]
        found = _CERTAIN.match(self._held)
        assert found is not None, "it matches nothing too"
        self._held = self._held[found.end() :]  # from a closing quote on nothing is certain any more
        try:
            text = json.loads(f'"{found[0]}"', strict=False)
        except ValueError:
            text = found[0]  # an escape that JSON does not have
        return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a pair is no character


def custom_input(arguments: str) -> str:
    """Return the input text in complete JSON arguments of a custom tool; "" if they have another shape."""
    return CustomInputReader().feed(arguments)


def wrap_custom_input(text: str) -> str:
    """Return the JSON arguments of a custom tool call whose input is `text`."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def string_grammar(spec: GrammarSpec, place: str) -> str:
    """Return a Lark expression for a custom tool's text as a JSON string. Raises InvalidRequest if a part can not be escaped."""
    lark, write = _Lark(spec, place), partial(_escape, place=place)
    if texts := [given for given in lark.attributes.values() if '"' in given or "/" in given]:
        raise _refusal(place, texts[0])
    if lark.is_regular:
        return f'"\\"" {_nest("start: RULE_START", *lark.as_terminals(write))} "\\""'
    parts = {name: [write(*token) for token in part] for name, part in lark.terminals().items()}
    begins = {name for name, part in parts.items() if any(ESCAPES in text or text.startswith('"\\\\') for text in part)}
    for name, part in parts.items():
        # A terminal that may go on with a backslash where another may begin with one: the lexer would not find the border.
        if begins - {name} and any(ESCAPES in text for text in part):
            raise _refusal(place, f"{name} beside {min(begins - {name})}, in rules that lead back to themselves,")
    return f'"\\"" {_nest(*lark.rewrite(write))} "\\""'


def plain_grammar(spec: GrammarSpec, close: str, end: str, place: str, *, is_lazy: bool) -> str | None:
    """Return Lark for a custom tool's raw text without `close`, then `end` (lazy: the first one); None for recursive rules."""
    lark = _Lark(spec, place)
    if not lark.is_regular:
        return None
    whole = f"WHOLE: (RULE_START & {_without(close)}) {quoted(end)}"
    return _nest(f"start{'[lazy]' * is_lazy}: WHOLE", whole, *lark.as_terminals(lambda _, text: text))


def recursive_grammar(spec: GrammarSpec, close: str, place: str) -> str:
    """Return Lark for recursive rules of a custom tool; no pattern matches text with `close`. Raises if a string has it."""
    patterns: dict[str, str] = {}

    def write(kind: str, text: str) -> str:
        if kind == "string" and close in _unquote(text.rstrip("i"), place):
            raise _refusal(place, text)
        return patterns.setdefault(text, f"HELD_{len(patterns)}") if kind == "pattern" else text

    rewritten = _Lark(spec, place).rewrite(write)
    return _nest(*rewritten, *(f"{name}: {text} & {_without(close)}" for text, name in patterns.items()))


def quoted(text: str) -> str:
    """Return the text as a double-quoted string literal that is valid in both JSON and Lark."""
    return json.dumps(text, ensure_ascii=False)


class _Lark:
    """A client's Lark grammar or regex, parsed into rule and terminal definitions, rule attributes and imports."""

    def __init__(self, spec: GrammarSpec, place: str) -> None:
        self.bodies: dict[str, list[LarkToken]] = {}  # of rules, terminals (in capitals) and what may be between (%ignore)
        self.attributes: dict[str, str] = {}
        self.imports: list[str] = []
        body: list[LarkToken] = []
        text = spec.text
        if spec.kind == "regex":
            pattern = re.sub(r"(\\.)|(/)|\n", lambda found: found[1] or ("\\/" if found[2] else "\\n"), text, flags=re.DOTALL)
            text = f"start: /{pattern}/"
        for found in TOKEN.finditer(text):
            match found.lastgroup:
                case "foreign":
                    raise _refusal(place, found[0])
                case "import":
                    names, _, alias = found[0].partition("->")
                    for word in re.findall(r"\w+", names)[2:]:
                        if word in COMMON:
                            self.bodies[alias.strip() or word] = [("pattern", f"/{COMMON[word]}/")]
                        else:
                            self.imports.append(f"%import common.{word} -> {alias.strip() or word}")
                case "ignore":
                    body = self.bodies[f"%ignore {len(self.bodies)}"] = []
                case "definition":
                    name, bracket, rest = found[0].rstrip(": \t").lstrip("!?").partition("[")
                    self.attributes[name.strip()] = bracket + rest
                    body = self.bodies[name.strip()] = []
                case str(kind) if kind != "nothing":
                    body.append((kind, found[0]))

    @cached_property
    def is_regular(self) -> bool:
        """Whether no rule is recursive or has attributes, so that the whole grammar can be one terminal."""
        return not any(self.attributes.values()) and not any(name in self._reachable(name) for name in self.bodies)

    def _reachable(self, name: str) -> set[str]:
        reached: set[str] = set()
        left = [name]
        for one in left:  # grows while it is walked
            new = {text for kind, text in self.bodies.get(one, ()) if kind == "name"} - reached
            reached |= new
            left += new
        return reached

    def terminals(self) -> dict[str, list[LarkToken]]:
        """Return the terminals that rules use, named or anonymous, each with all literals and patterns that it is made of."""
        used = {token for name, body in self.bodies.items() if not name.isupper() for token in body}
        parts = {text: [(kind, text)] for kind, text in used if kind in TERMINAL}
        for name in {text for kind, text in used if kind == "name" and text.isupper()}:
            reached = [name, *self._reachable(name)]
            parts[name] = [token for one in reached for token in self.bodies.get(one, ()) if token[0] in TERMINAL]
        return parts

    def rewrite(self, write: Write) -> Iterator[str]:
        yield from self.imports
        for name, body in self.bodies.items():
            head = "%ignore" if name.startswith("%") else f"{name}{self.attributes.get(name, '')}:"
            yield " ".join([head, *(write(*token) for token in body)])

    def as_terminals(self, write: Write) -> Iterator[str]:
        """Yield the grammar's lines, tokens rewritten by `write` and rules made terminals, so that the lexer sees one token."""
        ignored = []
        yield from self.imports
        for name, body in self.bodies.items():
            if name.startswith("%"):
                ignored.append(" ".join(write(*token) for token in body))
                continue
            words = []
            for kind, text in body:
                word = _capital(text) if kind == "name" else write(kind, text)
                ends_terminal = not name.isupper() and (kind in TERMINAL or (kind == "name" and text.isupper()))
                words.append(f"({word} IGNORED)" if ends_terminal else word)
            yield f"{_capital(name)}: {' '.join(words)}"
        yield f"IGNORED: ({' | '.join(ignored)})*" if ignored else 'IGNORED: ""'


def _escape(kind: str, text: str, place: str) -> str:
    match kind:
        case "string" if text.endswith("i"):
            return f"/(?i:{''.join(map(_letter, _unquote(text[:-1], place)))})/"
        case "string":
            return quoted(quoted(_unquote(text, place))[1:-1])
        case "range":
            first, last = (_literal(_unquote(one.strip(), place)) for one in text.split(".."))
            return f"/{_set(f'[{first}-{last}]', place)}/"
        case "pattern":
            return _escape_pattern(text, place)
        case "sign" if text == "~":
            raise _refusal(place, "~")
    return text


def _escape_pattern(text: str, place: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    dots = ["s" in flags]  # whether a dot is also a line break, for each group that is open

    def escape_atom(found: re.Match[str]) -> str:
        atom = found[0]
        own = re.match(r"\(\?([a-z]*)-?([a-z]*)[:)]", atom)
        is_dot_all = dots[-1] if own is None else "s" in own[1] or (dots[-1] and "s" not in own[2])
        match found.lastgroup:
            case "group":
                dots.append(is_dot_all)
            case "flags":
                dots[-1] = is_dot_all
            case "end":
                dots[:] = dots[:-1] or dots
            case "set":
                named = {".": r"[\s\S]" if dots[-1] else r"[^\n]", "\\": f"[{atom}]"}
                return _set(named.get(atom[0], atom), place)
            case "code":
                return _letter(chr(int(found["code"].strip("xu"), 16)))
            case "escape":
                return _letter(ESCAPED.get(found["escape"], found["escape"]))
            case "letter":
                return _letter(atom)
            case "unknown":
                raise _refusal(place, text)
        return atom

    if "x" in flags:
        raise _refusal(place, text)
    return f"/{ATOM.sub(escape_atom, pattern)}/{flags}"


def _set(text: str, place: str) -> str:
    """Return a regex for one character of a character set, in escaped form where JSON requires that."""
    if re.search(r"\[|&&|--|~~|\|\|", re.sub(r"\\.", "", text[1:])):  # sets of sets: Python does not read them
        raise _refusal(place, text)
    try:
        letters = re.compile(text, re.ASCII)
    except re.error:
        raise _refusal(place, text) from None
    specials = [one for one in SPECIAL if letters.fullmatch(one)]
    plain = [f"[{text}&&{PLAIN}]"] if letters.search(ORDINARY) else []
    if set(RARE) <= set(specials):
        plain.append(rf"{ESCAPES}\\u00(?:0[0-7bef]|1[0-9a-f]))")
        specials = [one for one in specials if one not in RARE]
    return f"(?:{'|'.join([*plain, *map(_letter, specials)])})"


def _letter(letter: str) -> str:
    return f"{ESCAPES}{_literal(quoted(letter)[1:-1])})" if letter in SPECIAL else _literal(letter)


def _literal(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _without(text: str) -> str:
    return f"~/(?s:.*){_literal(text)}(?s:.*)/"


def _capital(name: str) -> str:
    return name if name.isupper() else f"RULE_{name.upper()}"


def _nest(*lines: str) -> str:
    return "%lark {\n" + "\n".join(lines) + "\n}"


def _unquote(text: str, place: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise _refusal(place, text) from None


def _refusal(place: str, part: str) -> InvalidRequest:
    message = f"{place}: {part[:160]} can not be enforced in the way this model writes calls; write it otherwise"
    return InvalidRequest(message, place)
