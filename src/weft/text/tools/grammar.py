"""Builds the engine's Lark grammar from tools and tool choice, so that every call the model makes is valid.

If a call is required, the answer begins with one; anything may come after it, and the reader ends the answer at what is no
further call. Otherwise it is free text until the trigger, or bare calls at its start, where the call grammar begins. In
llguidance's Lark a marker's token is not matched by the marker's letters, so tokens are named by their ids.
"""

import json
import re
from contextlib import suppress
from typing import Any

import msgspec

from weft.errors import InvalidRequest
from weft.ipc.messages import JSON_OPTIONS, GrammarSpec
from weft.text.schema import json_schema_grammar
from weft.text.tools.arguments import PLACES, Elements, Pairs, Tags
from weft.text.tools.bare_calls import BARE_HEAD
from weft.text.tools.custom_tools import INPUT, plain_grammar, quoted, recursive_grammar, string_grammar
from weft.text.tools.families import Family
from weft.text.tools.python_values import NotWritable, PythonValues, in_order
from weft.text.tools.tool import Tool, ToolSelection, alternatives, types

ANY_TEXT = "(?s:.*)"
ID, GIVEN_ID = '"id"', r'/"[A-Za-z0-9_.:-]{1,64}"/'
ANY_KEY = "[A-Za-z_][A-Za-z0-9_]{0,30}"
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"u', "json_allow_general_unicode_escapes": True}
SHARED = ("$schema", "$defs", "definitions")
DESCRIBING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id", *SHARED}
# What can be enforced where arguments are written one by one, and where values have a notation of their own.
DIVIDED = {*DESCRIBING, "type", "properties", "required", "additionalProperties"}
SPELLED = {*DIVIDED, "items", "minItems", "maxItems", "anyOf", "oneOf", "enum", "const"}
NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OUTSIDE_REFERENCE = re.compile(r'"\$ref":"#(?!/(?:\$defs|definitions)/)')
KEYS = {
    Tags: re.compile(r'[^<>"\n]+'),
    Elements: re.compile(r"[^<>\n/\"][^<>\n\"]*"),
    Pairs: re.compile(r"[A-Za-z_][\w-]*"),
}  # that can be written

MarkerTokens = frozenset[tuple[str, int]]  # the markers of calls for which a vocabulary has a token


def tool_grammar(
    family: Family,
    selection: ToolSelection,
    tokens: MarkerTokens,
    answer: GrammarSpec | None,
    *,
    goes_on: bool = False,
    leads: tuple[str, ...] = (),
) -> GrammarSpec:
    """Build the grammar of answers that are calls or fit `answer`. Raises InvalidRequest for what the family can not enforce.

    An answer that `goes_on` by the client's wish has further calls where calls are required, and nothing else.
    """
    if selection.mode == "none" and answer is not None and not family.is_harmony:
        return answer
    if answer is not None and answer.kind != "json_schema":
        kind = "grammar" if answer.kind == "lark" else answer.kind  # as the fields of all dialects call it
        raise InvalidRequest(f"a {kind} can not be asked for together with tools; leave one of them out", "tools")
    return GrammarSpec("lark", _Grammar(family, selection, dict(tokens), leads, goes_on=goes_on).write(answer), is_ours=True)


class _Grammar:
    """Builder of one Lark grammar; its methods return expressions, and add the rules that these expressions use."""

    def __init__(
        self, family: Family, selection: ToolSelection, tokens: dict[str, int], leads: tuple[str, ...], *, goes_on: bool
    ) -> None:
        self.leads = leads
        self.family, self.mode, self.tools = family, selection.mode, selection.tools
        self.is_parallel = selection.is_parallel and family.between is not None
        self.tokens = tokens
        self.goes_on = goes_on
        self.rules = {"start": "", "TEXT": f"/{ANY_TEXT}/"}  # capitals: terminals
        self.known: dict[str, str] = {}  # rules for arguments by a tool's name, for values by that and their schema

    def write(self, answer: GrammarSpec | None) -> str:
        free = "TEXT" if answer is None else _json(answer.text, answer.lenient)
        self.rules["start"] = self.channels(free) if self.family.is_harmony else self.start(free)
        return "%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in self.rules.items())

    def start(self, free: str) -> str:
        if self.mode == "required":
            return f'("\\n" "\\n"?)? {self.led_calls()} {self.ending()}'  # as some templates write it
        if free != "TEXT":
            return f"{free} | {self.calls()}"
        if self.family.is_anchored:
            return self.anchored()
        trigger = self.family.trigger
        if self.mode == "none":
            self.rules["PLAIN"] = f"/{ANY_TEXT}/ & ~/{ANY_TEXT}{_pattern(trigger)}{ANY_TEXT}/"
            return "PLAIN"
        section = f"{self.until(trigger)} {self.calls(len(trigger))}"
        if self.family.has_bare_calls:
            return self.bare_or(section)
        return f"({section})* TEXT" if self.is_parallel else f"TEXT | {section}"

    def led_calls(self) -> str:
        """Return an expression for calls, each frame of them behind what the template writes in front of one."""
        calls = self.calls()
        if not self.leads:
            return calls
        names = f"({' | '.join(quoted(tool.name) for tool in self.tools)})"
        written = (f" {names} ".join(map(self.literal, lead.split("⟨name⟩"))) for lead in self.leads)
        lead = f'" "? ({" | ".join(written)})'
        more = f"({lead} {calls})*" if self.is_parallel and self.family.end else ""
        return f"({lead})? {calls} {more}"

    def bare_or(self, section: str) -> str:
        """Return an expression for free text with sections of calls, or bare calls at the start of the answer."""
        names = [re.escape(tool.name) for tool in self.tools]
        begins = f"/{BARE_HEAD.format(names='|'.join(names))}{ANY_TEXT}/"
        self.rules["OTHER"] = f"{self.rules['TEXT']} & ~{begins}"
        first = f"{self.until(self.family.trigger, but=begins)} {self.calls(len(self.family.trigger))}"
        calls = []
        for index, (tool, name) in enumerate(zip(self.tools, names, strict=True)):
            self.rules[f"BARE_{index}"] = f"/{BARE_HEAD.format(names=name)}/"
            calls.append(f"BARE_{index} {self.arguments(tool)} CLOSED")
        self.rules["CLOSED"] = r"/\s*\}/"
        bare = f"({' | '.join(calls)})"
        if self.is_parallel:
            return f"{bare}* (OTHER | {first} ({section})* TEXT)"
        self.rules["FENCE"] = r"/\s*```\s*/"
        return f"{bare} FENCE? | OTHER | {first}"

    def ending(self) -> str:
        """Return an expression for what may come after required calls that no frame ends: calls, or other text, which is dropped.

        Without it a model that wants to end, but by a line break or a word, would have to make another call.
        """
        if not self.is_parallel or self.family.end:
            return ""
        trigger = self.family.trigger
        self.rules["GAP"] = r"/[ \t\r\n]+/"
        first = "" if self.longest_mark(trigger) else _pattern(trigger[:1])
        self.rules["OTHER"] = rf"/[^ \t\r\n{first}]{ANY_TEXT}/"
        head = self.literal(self.family.head.partition("⟨name⟩")[0])
        return f"(GAP? {head} call)*" + " (GAP? OTHER | GAP)?" * (not self.goes_on)

    def anchored(self) -> str:
        """Return an expression for free text that does not begin like a call, or for calls at the beginning of the answer."""
        heads = [(self.family.begin + self.family.head).strip().replace("⟨name⟩", tool.name) for tool in self.tools]
        self.rules["PLAIN"] = rf"/{ANY_TEXT}/ & ~/\s*({'|'.join(map(_pattern, heads))}){ANY_TEXT}/"
        if self.mode == "none":
            return "PLAIN"
        blank, tail = self.literal(" " * self.family.head.endswith(" ")), self.tail()
        firsts = []  # each call's head is one terminal, or free text would match more of it
        for index, (tool, head) in enumerate(zip(self.tools, heads, strict=True)):
            self.rules[f"FIRST_{index}"] = rf"/\s*{_pattern(head)}/"
            firsts.append(f"FIRST_{index} {blank} {self.arguments(tool)} {tail}")
        return f"PLAIN | ({' | '.join(firsts)}) {self.more_calls()}"

    def channels(self, free: str) -> str:
        start = f"({self.literal('<|start|>assistant')})?"
        channels = '"analysis"' if self.mode == "required" else '("analysis" | "commentary")'
        aside = f"{start} {self.literal('<|channel|>')} {channels} {self.literal('<|message|>')}"
        final = f"{start} {self.literal('<|channel|>final<|message|>')} {free}"
        call = f"{start} {self.calls()}" if self.mode != "none" else final
        last = call if self.mode == "required" else f"{final} | {call}"
        return f"({aside} {self.until('<|end|>')})* ({last})"

    def calls(self, num_read: int = 0) -> str:
        """Return an expression for one call, or several if allowed, without the first `num_read` characters (already matched)."""
        begun = self.literal((self.family.begin + self.family.head.partition("⟨name⟩")[0]).lstrip()[num_read:])
        # Behind free text a further call is announced like the first, unless the calls are in a frame.
        return f"{begun} {self.call()} {self.more_calls(is_framed=bool(self.family.end) or not num_read)}"

    def call(self) -> str:
        after, tail = self.literal(self.family.head.partition("⟨name⟩")[2]), self.tail()
        self.rules["call"] = " | ".join(f"{quoted(tool.name)} {after} {self.arguments(tool)} {tail}" for tool in self.tools)
        return "call"

    def tail(self) -> str:
        tail = self.literal(self.family.tail)
        return f"({self.literal(', ')} {quoted(ID)} {self.literal(': ')} {GIVEN_ID})? {tail}" if self.family.may_add_id else tail

    def more_calls(self, is_framed: bool = True) -> str:
        head = (self.family.between or "") + self.family.head.partition("⟨name⟩")[0]
        is_more = self.is_parallel and is_framed and (bool(self.family.end) or self.mode != "required")
        more = f"({self.literal(head)} {self.call()})*" if is_more else ""
        end = self.literal(self.family.end)
        return f"{more} ({end})?" if self.family.is_closing else f"{more} {end}"

    def arguments(self, tool: Tool) -> str:
        if name := self.known.get(tool.name):
            return name
        match self.family.notation:
            case Tags() as tags:
                body = self.tagged(tool, tags)
            case Pairs() as pairs:
                body = self.paired(tool, tool, pairs, tool.place)
            case Elements(mark):
                body = self.elements(tool, tool, mark, tool.place)
            case None if tool.grammar is not None:
                body = f'"{{" " "? {quoted(quoted(INPUT))} ":" " "? {string_grammar(tool.grammar, tool.place)} " "? "}}"'
            case None:
                body = self.json_value(tool, tool.parameters, tool.place)
        name = self.known[tool.name] = self.rule("arguments", body)
        return name

    def tagged(self, tool: Tool, tags: Tags) -> str:
        bodies = []
        for key, schema, repeat, place in self.divided(tool, tool, tool.place):
            kind = tool.kind_of(schema)
            if kind == "nullable" and tags.types[0]:
                kind = "json"  # the tag would call null a text
            places = {"⟨key⟩": key, "⟨type⟩": f"/{tags.types[1]}/" if kind == "json" else quoted(tags.types[0])}
            opened = " ".join(places.get(part) or self.literal(part) for part in PLACES.split(tags.open))
            if tool.grammar is not None:
                opened, value = opened.removesuffix("?"), self.custom_text(tool.grammar, tags.close, tool.place)
            elif kind == "json":
                value = f"{self.loose_json(tool, schema, place)} {self.literal(tags.close)}"
            elif choices := tool.choices(schema):
                nulls = ["null", "None"] if tags.is_python else ["null"]
                values = [text for one in choices for text in (nulls if one is None else [one])]
                texts = _writable(tool, values, tags.close.lstrip("\n"), place)
                listed = f"({' | '.join(quoted(text) for text in texts if text)}){'?' * ('' in texts)}"
                # The reader cuts a line break of the tags: one of a text's own stays if theirs is there.
                opened = opened.removesuffix("?") if any(text[:1] == "\n" for text in texts) else opened
                must_close = any(text[-1:] == "\n" for text in texts)
                value = f"{listed} {self.literal(tags.close).replace('?', '', 1 if must_close else 0)}"
            elif tags.quotes[0]:
                value = self.quoted_text(tags)
            else:
                value = self.until(tags.close.lstrip())
            bodies.append(f"({opened} {value}){repeat}")
        return " ".join(bodies)

    def quoted_text(self, tags: Tags) -> str:
        """Return an expression for a text in quotes or one that does not begin like these, through its closing tag."""
        opening, closing = tags.quotes
        self.rules["BARE"] = f"/{ANY_TEXT}/ & ~/{_pattern(opening)}{ANY_TEXT}/"
        plain = f"until_{len(self.rules)}"
        self.rules[f"{plain}[lazy]"] = f"/{ANY_TEXT}{_pattern(tags.close)}/ & ~/{_pattern(opening)}{ANY_TEXT}/"
        mark = self.longest_mark(tags.close)
        bare = f"BARE <[{self.tokens[mark]}]> {self.literal(tags.close[len(mark) :])} | {plain}" if mark else plain
        return f"({bare} | {self.literal(opening)} {self.until(closing + tags.close)})"

    def paired(self, tool: Tool, node: Tool, pairs: Pairs, place: str) -> str:
        """Return an expression for comma-separated pairs in a fixed order: a call's arguments, or properties of an object."""
        written = []
        for key, schema, repeat, where in self.divided(tool, node, place):
            pair = f"{key} {quoted(pairs.assign)} {self.value(tool, schema, pairs, where)}"
            written.append((self.rule("pair", pair), repeat))
        return in_order(written, self.literal(", "))

    def elements(self, tool: Tool, node: Tool, mark: str, place: str) -> str:
        """Return an expression for elements in a fixed order: a call's arguments, or the fields of an object."""
        written = []
        for key, schema, repeat, where in self.divided(tool, node, place):
            written.append(f'({self.literal(mark + "<")} {key} ">" {self.element(tool, schema, mark, key, where)}){repeat}')
        return " ".join(written)

    def element(self, tool: Tool, schema: Any, mark: str, key: str, place: str) -> str:
        """Return an expression for a value through its closing tag; `key` is the expression for the tag's name."""
        close = f'{self.literal(mark + "</")} {key} ">"'
        if tool.grammar is not None:
            return self.custom_text(tool.grammar, f"{mark}</{INPUT}>", tool.place)
        known_as = "\0".join((tool.name, key, msgspec.json.encode(schema).decode()))
        if known_as in self.known:
            return self.known[known_as]
        node = tool.resolve(schema)
        name = self.named_value(tool, node, known_as, place)
        if choices := tool.choices(node):
            choices = _writable(tool, choices, mark, place)  # the reader looks for the mark within a text
            words = [quoted(text) for one in choices if (text := one if isinstance(one, str) else json.dumps(one))]
            texts = [f"({' | '.join(words)}){'?' * ('' in choices)} {close}"]
        elif branches := alternatives(node):
            texts = [self.element(tool, branch, mark, key, place) for branch in branches]
        else:
            kinds = types(node) or ["string", "array", "object"]
            texts = [self.content(kind, tool, node, mark, key, place) for kind in kinds]
        self.rules[name] = " | ".join(texts)
        return name

    def content(self, kind: str, tool: Tool, node: dict[str, Any], mark: str, key: str, place: str) -> str:
        close = f'{self.literal(mark + "</")} {key} ">"'
        match kind:
            case "string":
                return f'{self.until(mark)} "</" {key} ">"'
            case "array":
                item = f"{self.literal(mark + '<item>')} {self.element(tool, node.get('items', {}), mark, quoted('item'), place)}"
                low, high = (int(count) if isinstance(count := node.get(word), int) else 0 for word in ("minItems", "maxItems"))
                return f"({item}){{{low},{high or ''}}} {close}"
            case "object":
                return f"{self.elements(tool, Tool(tool.name, msgspec.json.encode(node).decode()), mark, place)} {close}"
            case _:
                bounds = {word: node[word] for word in NUMERIC & node.keys()}
                return f"{_json_value(tool, {'type': kind, **bounds}, place)} {close}"

    def divided(self, tool: Tool, node: Tool, place: str) -> list[tuple[str, Any, str, str]]:
        """List arguments as (key expression, schema, repetition, path); repetition is "" if required, else "?" or "*"."""
        _check_keywords(tool, node.parameters, DIVIDED, place)
        parts = []
        for key, schema in node.properties.items():
            if schema is False:  # it must not come
                continue
            where = f"{place}.properties.{key}"
            if not KEYS[type(self.family.notation)].fullmatch(key):
                raise InvalidRequest(f"{where}: this model's calls can not have an argument of that name", where)
            parts.append((quoted(key), schema, "" if key in node.required else "?", where))
        if node.is_open:
            known = "|".join(map(_pattern, node.properties))
            pattern = f"/{ANY_KEY}/" + (f" & ~/{known}/" if known else "")
            name = self.known[pattern] = self.known.get(pattern) or self.rule("KEY", pattern)
            parts.append((name, node.schema_of(""), "*", f"{place}.additionalProperties"))
        if isinstance(self.family.notation, Pairs) and self.family.notation.is_sorted:
            parts.sort(key=lambda part: (part[2] == "*", part[0]))
        return parts

    def named_value(self, tool: Tool, node: dict[str, Any], known_as: str, place: str) -> str:
        """Return the name of a new rule for a value, which is known before it has a body: it may refer to itself."""
        name = self.known[known_as] = self.rule("value", "")
        _check_keywords(tool, node, SPELLED | (NUMERIC if {"integer", "number"} & {*types(node)} else set()), place)
        return name

    def value(self, tool: Tool, schema: Any, pairs: Pairs, place: str) -> str:
        """Return an expression for a value: as JSON if the family's reader understands it, else in the family's notation."""
        if tool.grammar is not None:
            if pairs.is_json:
                return string_grammar(tool.grammar, tool.place)
            return f"{self.literal(pairs.quotes[0])} {self.custom_text(tool.grammar, pairs.quotes[0], tool.place)}"
        if pairs.is_json:
            return self.loose_json(tool, schema, place)
        known_as = tool.name + msgspec.json.encode(schema).decode()
        if known_as in self.known:
            return self.known[known_as]
        node = tool.resolve(schema)
        name = self.named_value(tool, node, known_as, place)
        if choices := tool.choices(node):
            quote = self.literal(pairs.quotes[0])
            choices = _writable(tool, choices, pairs.quotes[0], place)
            texts = [f"{quote} {quoted(one)} {quote}" if isinstance(one, str) else quoted(json.dumps(one)) for one in choices]
        elif branches := alternatives(node):
            texts = [self.value(tool, branch, pairs, place) for branch in branches]
        else:
            kinds = types(node) or ["string", "number", "boolean", "null", "array", "object"]
            texts = [self.typed(kind, tool, node, pairs, place) for kind in kinds]
        self.rules[name] = " | ".join(texts)
        return name

    def loose_json(self, tool: Tool, schema: Any, place: str) -> str:
        texts = [self.json_value(tool, schema, place)]
        if python := self.python_value(tool, schema, place):
            return f"({texts[0]} | {python})"
        if types(tool.resolve(schema)) == ["boolean"]:
            texts += ['"True"', '"False"']
        if choices := tool.choices(schema):
            plain = [one for one in choices if isinstance(one, str) and one.isprintable() and not {*one} & {*"'\\"}]
            texts += [quoted(f"'{one}'") for one in plain]
        elif tool.kind_of(schema) == "text":
            texts.append("QUOTED")
            self.rules["QUOTED"] = r"/'([^'\\\n]|\\['\\nt])*'/"
        return f"({' | '.join(texts)})"

    def json_value(self, tool: Tool, schema: Any, place: str) -> str:
        return _json_value(tool, schema, place, may_escape=self.family.is_ascii)

    def python_value(self, tool: Tool, schema: Any, place: str) -> str:
        """Return an expression for a value as Python prints it; "" where the model's template writes none, or it can not be."""
        match self.family.notation:
            case Tags(is_python=True) | Pairs(is_json=True):
                rules = dict(self.rules)
                values = PythonValues(tool, rules, lambda number: _json_value(tool, number, place))
                with suppress(NotWritable):
                    value = values.value(schema)
                    self.rules = rules
                    return value
        return ""

    def typed(self, kind: str, tool: Tool, node: dict[str, Any], pairs: Pairs, place: str) -> str:
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
                return _json_value(tool, {"type": kind, **{word: node[word] for word in NUMERIC & node.keys()}}, place)

    def custom_text(self, grammar: GrammarSpec, close: str, place: str) -> str:
        """Return Lark for a custom tool's raw text and the closing text; newlines before the closing marker are required."""
        mark = self.longest_mark(close.strip())
        before = close.partition(mark)[0] if mark else close
        text = plain_grammar(grammar, close.strip(), before, place, is_lazy=not mark)
        if text is None:
            return f"{recursive_grammar(grammar, close.strip(), place)} {self.literal(close).replace('?', '')}"
        return f"{text} {self.literal(close[len(before) :])}"

    def longest_mark(self, text: str) -> str:
        """Return the longest marker with a token of its own that `text` begins with; "" if there is none."""
        return max((mark for mark in self.tokens if text.startswith(mark)), key=len, default="")

    def literal(self, text: str) -> str:
        """Return an expression for fixed text: newlines and spaces after signs are optional, markers are tokens, ⟨id⟩ any id."""
        marks = [re.escape(mark) for mark in sorted(self.tokens, key=len, reverse=True) if mark in text]
        seams = "|".join([*marks, "[ \n]{2,}|[ \n]", "⟨id⟩"])
        parts = [part for part in re.split(f"({seams})", text) if part]
        atoms = []
        for part, before in zip(parts, ["", *parts], strict=False):
            may_miss = part == "\n" or (part == " " and before[-1:] in ("", *",:[]> \n"))
            fixed = f"<[{self.tokens[part]}]>" if part in self.tokens else _indent(part) or quoted(part) + "?" * may_miss
            atoms.append(f"/{self.family.id_pattern}/" if part == "⟨id⟩" else fixed)
        return " ".join(atoms)

    def until(self, text: str, but: str = "") -> str:
        """Return an expression for free text through the first `text`, which comes as marker tokens or spelled out.

        The free text does not match the regex `but`, which must be that of OTHER.
        """
        other = f" & ~{but}" if but else ""
        spelled, free = f"until_{len(self.rules)}", "OTHER" if but else "TEXT"
        self.rules[f"UNTIL_{len(self.rules)}"] = f"/{ANY_TEXT}{_pattern(text)}/{other}"
        self.rules[f"{spelled}[lazy]"] = f"UNTIL_{len(self.rules) - 1}"
        before, mark, after = self.cut_at_mark(text)
        if before:
            free = self.rule("TEXT", f"/{ANY_TEXT}{_pattern(before)}/{other}")
        return f"({free} <[{self.tokens[mark]}]> {self.literal(after)} | {spelled})" if mark else spelled

    def cut_at_mark(self, text: str) -> tuple[str, str, str]:
        """Like str.partition, at the first marker with a token of its own, the longest if several begin there."""
        marks = "|".join(re.escape(mark) for mark in sorted(self.tokens, key=len, reverse=True))
        found = re.search(marks, text) if marks else None
        return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")

    def rule(self, kind: str, body: str) -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules[name] = body
        return name


def _json_value(tool: Tool, schema: Any, place: str, *, may_escape: bool = False) -> str:
    """Return a %json expression for a schema; if the tool is not strict, constraints that can not be enforced are relaxed."""
    is_whole = schema is tool.parameters
    document = {word: tool.parameters[word] for word in SHARED if word in tool.parameters}
    document |= schema if isinstance(schema, dict) else {}
    for strict in (True, False):
        try:
            if not is_whole and OUTSIDE_REFERENCE.search(msgspec.json.encode(document).decode()):
                raise InvalidRequest(f"{place}: in this model's calls a $ref must lead to $defs; put what it names there", place)
            text = json_schema_grammar(document, strict, place, closes=not tool.strict).text
            return _json(text, lenient=not strict, may_escape=may_escape and _is_closed(msgspec.json.decode(text)))
        except InvalidRequest:
            if tool.strict:
                raise
    return _json('{"type":"object"}' if is_whole else "{}", lenient=True)


def _json(schema: str, lenient: bool, *, may_escape: bool = False) -> str:
    options = json.dumps({"x-guidance": {**JSON_OPTIONS, **(ESCAPES if may_escape else {}), "lenient": lenient}})
    return f"%json {options[:-1]}{',' * (schema != '{}')}{schema[1:]}"


def _is_closed(node: Any) -> bool:
    """Whether no object of the schema that names properties may have others: escaped, they could be a named one once more."""
    match node:
        case list():
            return all(map(_is_closed, node))
        case dict():
            is_open = "properties" in node and node.get("additionalProperties") is not False
            return not is_open and all(map(_is_closed, node.values()))
    return True


def _check_keywords(tool: Tool, node: dict[str, Any], enforced: set[str], place: str) -> None:
    if tool.strict and (unknown := sorted(node.keys() - enforced)):
        advice = "can not be enforced in the way this model writes calls; leave it out or set strict to false"
        raise InvalidRequest(f"{place}: {unknown[0]} {advice}", place)


def _writable(tool: Tool, values: list[Any], close: str, place: str) -> list[Any]:
    """Return the values whose end the reader finds at `close`. Raises InvalidRequest for others of a strict tool."""
    wrong = [value for value in values if isinstance(value, str) and (value + close).find(close) < len(value)]
    if wrong and (tool.strict or len(wrong) == len(values)):
        shown = json.dumps(wrong[0], ensure_ascii=False)
        raise InvalidRequest(
            f"{place}: this model's calls can not have the value {shown}, because {close} ends a value in them", place
        )
    return [value for value in values if value not in wrong]


def _indent(text: str) -> str:
    """Return an expression for two or more spaces and newlines, of which any may be missing; "" for another text."""
    if len(text) < 2 or text.strip():
        return ""
    runs = [("\\n", "\\n?") if run == "\n" else (f" {{1,{len(run)}}}", f" {{0,{len(run)}}}") for run in re.findall("\n| +", text)]
    forms = (some + "".join(maybe for _, maybe in runs[index + 1 :]) for index, (some, _) in enumerate(runs))
    return f"/{'|'.join(forms)}/?"


def _pattern(text: str) -> str:
    """Build a regex that matches `text` literally, except that each of its spaces and newlines is optional."""
    return "".join(r"\n?" if one == "\n" else " ?" if one == " " else r"\/" if one == "/" else re.escape(one) for one in text)
