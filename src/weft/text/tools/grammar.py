"""Tools and a choice among them → a grammar for the engine, in which every call that comes is valid.

Where a call must come the answer is calls and nothing else. Otherwise it is free text, and the grammar takes over at the
trigger. It is written in llguidance's Lark. There a token of the vocabulary's own for a marker never matches the marker's
letters, so it is named by its id. Knows families and schemas; the engine compiles.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import msgspec

from weft.errors import InvalidRequest
from weft.ipc.messages import JSON_OPTIONS, GrammarSpec
from weft.text.schema import json_schema_grammar
from weft.text.tools.arguments import Json, Pairs, Tags
from weft.text.tools.custom_grammar import embedded, escaped, unescaped
from weft.text.tools.custom_input import INPUT
from weft.text.tools.families import Family
from weft.text.tools.pieces import PLACES
from weft.text.tools.selection import ToolSelection
from weft.text.tools.tool import Tool, alternatives, types

BLANK = "[ \n]"
ANY_TEXT = "(?s:.*)"
ANY_KEY = "[A-Za-z_][A-Za-z0-9_]{0,30}"
SHARED = ("$schema", "$defs", "definitions")
SAID = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id", *SHARED}
DIVIDED = {*SAID, "type", "properties", "required", "additionalProperties"}  # held to where arguments are written one by one
SPELLED = {
    *DIVIDED,
    "items",
    "minItems",
    "maxItems",
    "anyOf",
    "oneOf",
    "enum",
    "const",
}  # and where values have a notation of their own
NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
ELSEWHERE = re.compile(r'"\$ref":"#(?!/(?:\$defs|definitions)/)')
KEYS = {Tags: re.compile(r'[^<>"\n]+'), Pairs: re.compile(r"[A-Za-z_][\w-]*")}  # that can be written


@lru_cache(maxsize=32)
def tool_grammar(
    family: Family, choice: ToolSelection, tokens: frozenset[tuple[str, int]], answer: GrammarSpec | None = None
) -> GrammarSpec:
    """What an answer may be; where it is no call it must be `answer`. `tokens` are those the vocabulary has for markers.

    Raises InvalidRequest naming what of a strict tool can not be enforced in this family's way of writing.
    """
    if choice.mode == "none" and answer is not None and not family.is_harmony:
        return answer
    if answer is not None and answer.kind != "json_schema":
        raise InvalidRequest(f"a {answer.kind} can not be asked for together with tools; leave one of them out", "tools")
    return GrammarSpec("lark", _Grammar(family, choice, dict(tokens)).text(answer))


class _Grammar:
    """The rules of one grammar, as they come together."""

    def __init__(self, family: Family, choice: ToolSelection, tokens: dict[str, int]) -> None:
        self.family, self.choice = family, choice
        self.is_parallel = choice.is_parallel and family.between is not None
        self.tokens = tokens
        self.rules = {"start": "", "TEXT": f"/{ANY_TEXT}/"}  # capitals: terminals
        self.given: dict[str, str] = {}  # rules for arguments by the tools' names
        self.values: dict[str, str] = {}  # and for values by their schemas

    def text(self, answer: GrammarSpec | None) -> str:
        """All of it."""
        free = "TEXT" if answer is None else _embedded(answer.text, answer.lenient)
        self.rules["start"] = self.channels(free) if self.family.is_harmony else self.start(free)
        return "%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in self.rules.items())

    def start(self, free: str) -> str:
        """Calls, or free text and calls."""
        family, mode = self.family, self.choice.mode
        if mode == "required":
            return f'("\\n" "\\n"?)? {self.calls()}'  # as some templates write it
        if free != "TEXT":
            return f"{free} | {self.calls()}"
        if family.is_anchored:
            return self.anchored()
        if mode == "none":
            return self.plain(ANY_TEXT + _pattern(family.trigger))
        section = f"{self.until(family.trigger)} {self.calls(len(family.trigger))}"
        return f"({section})* TEXT" if self.is_parallel else f"TEXT | {section}"

    def anchored(self) -> str:
        """Free text, unless it begins as a call does: up to its arguments, as one terminal, or free text would be the longer."""
        heads = [(self.family.begin + self.family.head).strip().replace("⟨name⟩", tool.name) for tool in self.choice.tools]
        plain = self.plain(rf"\s*({'|'.join(map(_pattern, heads))})")
        if self.choice.mode == "none":
            return plain
        blank, tail = self.literal(" " * self.family.head.endswith(" ")), self.literal(self.family.tail)
        firsts = []
        for index, (tool, head) in enumerate(zip(self.choice.tools, heads, strict=True)):
            self.rules[f"FIRST_{index}"] = rf"/\s*{_pattern(head)}/"
            firsts.append(f"FIRST_{index} {blank} {self.arguments(tool)} {tail}")
        return f"{plain} | ({' | '.join(firsts)}) {self.more()}"

    def plain(self, forbidden: str) -> str:
        """Free text that does not begin like this."""
        self.rules["PLAIN"] = f"/{ANY_TEXT}/ & ~/{forbidden}{ANY_TEXT}/"
        return "PLAIN"

    def channels(self, free: str) -> str:
        """Harmony: thinking and announcements, then words or a call."""
        start = f"({self.literal('<|start|>assistant')})?"
        channels = '"analysis"' if self.choice.mode == "required" else '("analysis" | "commentary")'
        aside = f"{start} {self.literal('<|channel|>')} {channels} {self.literal('<|message|>')}"
        said = f"{start} {self.literal('<|channel|>final<|message|>')} {free}"
        called = f"{start} {self.calls()}" if self.choice.mode != "none" else said
        last = called if self.choice.mode == "required" else f"{said} | {called}"
        return f"({aside} {self.until('<|end|>')})* ({last})"

    def calls(self, skipped: int = 0) -> str:
        """A call, or several; so many letters of the first were read before."""
        head = self.family.head.partition("⟨name⟩")[0]
        begun = self.literal((self.family.begin + head).lstrip()[skipped:])
        # Behind free text a further call is announced like the first, unless the calls are in a frame.
        return f"{begun} {self.call()} {self.more(is_framed=bool(self.family.end) or not skipped)}"

    def call(self) -> str:
        """A call from its name on."""
        after, tail = self.literal(self.family.head.partition("⟨name⟩")[2]), self.literal(self.family.tail)
        calls = (f"{_quoted(tool.name)} {after} {self.arguments(tool)} {tail}" for tool in self.choice.tools)
        self.rules["call"] = " | ".join(calls)
        return "call"

    def more(self, is_framed: bool = True) -> str:
        """Further calls and what closes them all."""
        head = (self.family.between or "") + self.family.head.partition("⟨name⟩")[0]
        more = f"({self.literal(head)} {self.call()})*" if self.is_parallel and is_framed else ""
        return f"{more} {self.literal(self.family.end)}"

    def arguments(self, tool: Tool) -> str:
        """What a tool takes, as a rule of its own."""
        if tool.name in self.given:
            return self.given[tool.name]
        match self.family.notation:
            case Tags() as tags:
                body = self.tagged(tool, tags)
            case Pairs() as pairs:
                body = self.paired(tool, tool, pairs, tool.place)
            case Json() if tool.grammar is not None:
                body = f'"{{" " "? {_quoted(_quoted(INPUT))} ":" " "? {_text_in_json(tool.grammar, tool.place)} " "? "}}"'
            case Json():
                body = _enforced(tool, tool.parameters, tool.place)
        self.given[tool.name] = self.rule("arguments", body)
        return self.given[tool.name]

    def tagged(self, tool: Tool, tags: Tags) -> str:
        """Arguments in their order, each in its tags."""
        bodies = []
        for key, schema, is_required, place in self.divided(tool, tool, tool.place):
            kind = tool.kind_of(schema)
            if kind == "nullable" and tags.types[0]:
                kind = "json"  # the tag would call null a text
            places = {"⟨key⟩": key, "⟨type⟩": f"/{tags.types[1]}/" if kind == "json" else _quoted(tags.types[0])}
            opened = " ".join(places.get(part) or self.literal(part) for part in PLACES.split(tags.open))
            if tool.grammar is not None:
                opened, value = opened.removesuffix("?"), self.plain_text(tool.grammar, tags.close, tool.place)
            elif kind == "json":
                value = f"{self.loose(tool, schema, place)} {self.literal(tags.close)}"
            elif choices := tool.choices(schema):
                value = f"{_any_of(['null' if one is None else one for one in choices])} {self.literal(tags.close)}"
            else:
                value = self.until(tags.close.lstrip())
            bodies.append(f"({opened} {value}){is_required}")
        return " ".join(bodies)

    def paired(self, tool: Tool, node: Tool, pairs: Pairs, place: str) -> str:
        """Arguments, or what an object has, in their order with commas between."""
        comma = self.literal(", ")
        parts = self.divided(tool, node, place)
        if pairs.is_sorted:
            parts.sort(key=lambda part: (part[2] == "*", part[0]))
        values = (f"{key} {_quoted(pairs.assign)} {self.value(tool, schema, pairs, where)}" for key, schema, _, where in parts)
        bodies = [self.rule("pair", value) for value in values]
        marks = [mark for _, _, mark, _ in parts]
        first = marks.index("") if "" in marks else len(marks)  # the first that must come; one of those up to it begins
        starts = []
        for index, body in enumerate(bodies[: first + 1]):
            more = f"({comma} {body})*" if marks[index] == "*" else ""
            rest = (f"({comma} {other}){mark}" for other, mark in zip(bodies[index + 1 :], marks[index + 1 :], strict=True))
            starts.append(" ".join([body, more, *rest]))
        return f"({' | '.join(starts)}){'' if '' in marks else '?'}" if starts else ""

    def divided(self, tool: Tool, node: Tool, place: str) -> list[tuple[str, Any, str, str]]:
        """Arguments one by one: the key, its schema, how often it comes ("": once), and its place."""
        _check(tool, node.parameters, DIVIDED, place)
        allowed = KEYS[type(self.family.notation)]
        parts = []
        for key, schema in node.properties.items():
            if schema is False:  # it must not come
                continue
            where = f"{place}.properties.{key}"
            if not allowed.fullmatch(key):
                raise InvalidRequest(f"{where}: this model's calls can not have an argument of that name", where)
            parts.append((_quoted(key), schema, "" if key in node.required else "?", where))
        if node.is_open:
            known = "|".join(map(_pattern, node.properties))
            name = self.rule("KEY", f"/{ANY_KEY}/" + (f" & ~/{known}/" if known else ""))
            parts.append((name, node.schema_of(""), "*", f"{place}.additionalProperties"))
        return parts

    def value(self, tool: Tool, schema: Any, pairs: Pairs, place: str) -> str:
        """A value: JSON where that is understood, else in the notation's own way."""
        if tool.grammar is not None:
            raw = f"{self.literal(pairs.quotes[0])} {self.plain_text(tool.grammar, pairs.quotes[0], tool.place)}"
            return _text_in_json(tool.grammar, tool.place) if pairs.is_json else raw
        if pairs.is_json:
            return self.loose(tool, schema, place)
        asked = tool.name + msgspec.json.encode(schema).decode()
        if asked in self.values:
            return self.values[asked]
        node = tool.resolved(schema)
        name = self.values[asked] = self.rule("value", "")  # before its body: it may refer to itself
        _check(tool, node, SPELLED | (NUMERIC if {"integer", "number"} & {*types(node)} else set()), place)
        quote = self.literal(pairs.quotes[0])
        if choices := tool.choices(node):
            texts = [f"{quote} {_quoted(one)} {quote}" if isinstance(one, str) else _quoted(json.dumps(one)) for one in choices]
        elif branches := alternatives(node):
            texts = [self.value(tool, branch, pairs, place) for branch in branches]
        else:
            kinds = types(node) or ["string", "number", "boolean", "null", "array", "object"]
            texts = [self.typed(kind, tool, node, pairs, place) for kind in kinds]
        self.rules[name] = " | ".join(texts)
        return name

    def loose(self, tool: Tool, schema: Any, place: str) -> str:
        """JSON, or what Python has instead."""
        texts = [_enforced(tool, schema, place)]
        if types(tool.resolved(schema)) == ["boolean"]:
            texts += ['"True"', '"False"']
        if choices := tool.choices(schema):
            texts += [
                _quoted(f"'{one}'") for one in choices if isinstance(one, str) and one.isprintable() and not {*one} & {*"'\\"}
            ]
        elif tool.kind_of(schema) == "text":
            texts.append("QUOTED")
            self.rules["QUOTED"] = r"/'([^'\\\n]|\\['\\nt])*'/"
        return f"({' | '.join(texts)})"

    def typed(self, kind: str, tool: Tool, node: dict[str, Any], pairs: Pairs, place: str) -> str:
        """A value of one type."""
        match kind:
            case "string":
                return f"{self.literal(pairs.quotes[0])} {self.until(pairs.quotes[0])}"
            case "array":
                item = self.value(tool, node.get("items", {}), pairs, f"{place}.items")
                low, high = (int(count) if isinstance(count := node.get(word), int) else 0 for word in ("minItems", "maxItems"))
                more = f'("," {item}){{{max(0, low - 1)},{high - 1 if high else ""}}}'
                return f'"[" ({item} {more}){"" if low else "?"} "]"'
            case "object":
                inner = Tool(tool.name, msgspec.json.encode(node).decode())
                return f'"{{" {self.paired(tool, inner, pairs, place)} "}}"'
            case _:
                return _enforced(tool, {"type": kind, **{word: node[word] for word in NUMERIC & node.keys()}}, place)

    def plain_text(self, grammar: GrammarSpec, close: str, place: str) -> str:
        """A custom tool's text as it is, and what closes it. Line breaks that the reader takes away must be there."""
        mark = max((mark for mark in self.tokens if close.strip().startswith(mark)), key=len, default="")
        before = close.partition(mark)[0] if mark else close
        text = unescaped(grammar, close.strip(), before, place, is_lazy=not mark)
        if text is None:
            return f"{embedded(grammar, close.strip(), place)} {self.literal(close).replace('?', '')}"
        return f"{text} {self.literal(close[len(before) :])}"

    def literal(self, text: str) -> str:
        """A text as it must come, but for line breaks, and blanks beside signs; an id may be any."""
        marks = [re.escape(mark) for mark in sorted(self.tokens, key=len, reverse=True) if mark in text]
        parts = [part for part in re.split(f"({'|'.join([*marks, BLANK, '⟨id⟩'])})", text) if part]
        return " ".join(self._atom(part, before) for part, before in zip(parts, ["", *parts], strict=False))

    def _atom(self, part: str, before: str) -> str:
        if part in self.tokens:
            return f"<[{self.tokens[part]}]>"
        if part == "⟨id⟩":
            return f"/{self.family.id_pattern}/"
        may_miss = part == "\n" or (part == " " and before[-1:] in ("", *",:[]> \n"))
        return _quoted(part) + "?" * may_miss

    def until(self, text: str) -> str:
        """Free text up to this, and this: by its tokens, or letter by letter."""
        spelled = f"until_{len(self.rules)}"
        self.rules[f"{spelled}[lazy]"] = f"/{ANY_TEXT}{_pattern(text)}/"
        mark = max((mark for mark in self.tokens if text.startswith(mark)), key=len, default=None)
        if mark is None:
            return spelled
        return f"(TEXT <[{self.tokens[mark]}]> {self.literal(text[len(mark) :])} | {spelled})"

    def rule(self, kind: str, body: str) -> str:
        """The name of a new rule."""
        name = f"{kind}_{len(self.rules)}"
        self.rules[name] = body
        return name


def _enforced(tool: Tool, schema: Any, place: str) -> str:
    """A value as JSON, held to its schema; without strict as far as that can be done."""
    is_whole = schema is tool.parameters
    document = {word: tool.parameters[word] for word in SHARED if word in tool.parameters}
    document |= schema if isinstance(schema, dict) else {}
    for strict in (True, False):
        try:
            if not is_whole and ELSEWHERE.search(msgspec.json.encode(document).decode()):
                raise InvalidRequest(f"{place}: in this model's calls a $ref must lead to $defs; put what it names there", place)
            return _embedded(json_schema_grammar(document, strict, place).text, lenient=not strict)
        except InvalidRequest:
            if tool.strict:
                raise
    return _embedded('{"type":"object"}' if is_whole else "{}", lenient=True)


def _text_in_json(grammar: GrammarSpec, place: str) -> str:
    """A custom tool's text in quotes."""
    return f'"\\"" {escaped(grammar, place)} "\\""'


def _embedded(schema: str, lenient: bool) -> str:
    options = json.dumps({"x-guidance": {**JSON_OPTIONS, "lenient": lenient}})
    return f"%json {options[:-1]}{',' * (schema != '{}')}{schema[1:]}"


def _check(tool: Tool, node: dict[str, Any], known: set[str], place: str) -> None:
    """Refuse what a strict tool is not held to."""
    if tool.strict and (unknown := sorted(node.keys() - known)):
        message = (
            f"{place}: {unknown[0]} can not be enforced in the way this model writes calls; leave it out or set strict to false"
        )
        raise InvalidRequest(message, place)


def _any_of(texts: list[str]) -> str:
    return f"({' | '.join(_quoted(text) for text in texts if text)}){'?' * ('' in texts)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression for a text in which blanks may be missing."""
    return "".join(r"\n?" if one == "\n" else " ?" if one == " " else r"\/" if one == "/" else re.escape(one) for one in text)
