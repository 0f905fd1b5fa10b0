"""Converts llama.cpp's GBNF grammars to Lark: llguidance's converter, with letters, repetitions and names read as there.

A terminal in Lark is one lexeme, and a lexer takes the longest match and never goes back. GBNF knows no lexer: each way to read
a text counts. So every rule stays a rule here, and a literal is written letter by letter.
"""

import json
import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    Position,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    resolve,
)

from weft.ipc.messages import START_RULE

LARK = re.compile(rf"^\s*%llguidance\b|{START_RULE.pattern}", re.MULTILINE)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{letter: letter for letter in '"\\[]'}}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # of an escape
REPEATED = {"*": (0, None), "+": (1, None), "?": (0, 1)}
COUNTS = re.compile(r"\{\s*([0-9]*)\s*(,?)\s*([0-9]*)\s*\}")


def to_lark(grammar: str) -> str:
    """Return a grammar in Lark's notation, given in Lark's or in GBNF. Raises an error that says what can not be read."""
    if LARK.search(grammar):
        return grammar
    rules = _named(_Parser().parse(grammar))
    for rule in rules.values():
        _repeat_tails(rule)
    resolve(rules)
    for rule in rules.values():
        rule.name = rule.name.lower()  # names in capitals are terminals
    return "%llguidance {}\n" + "\n".join(str(rule) for rule in rules.values()) + "\n"


def _repeat_tails(rule: RuleNode) -> None:
    """Make repetitions of alternatives that end in their own rule, which cost the parser an item for each time."""
    assert isinstance(rule.alternatives, AlternativeNode)
    again, last = list[ASTNode](), list[ASTNode]()
    for way in rule.alternatives.alternatives:
        *head, tail = way.children() or [way]
        is_optional = isinstance(tail, _Repetition) and (tail.min_times, tail.max_times) == (0, 1)
        if not head or not _is_named(tail.node if is_optional else tail, rule.name):  # type: ignore[attr-defined]
            last.append(way)
            continue
        again.append(SequenceNode(head))
        last += [SequenceNode([*head])] if is_optional else []
    if again and last:
        repeated = _Repetition(AlternativeNode(again), 0, None)
        rule.alternatives = AlternativeNode([SequenceNode([repeated, AlternativeNode(last)])])


def _is_named(node: ASTNode, name: str) -> bool:
    return isinstance(node, RuleRefNode) and node.name == name


class _Repetition(RepetitionNode):
    def is_atomic(self) -> bool:
        return False  # to be repeated itself, it needs brackets


class _Parser(GrammarParser):
    """llguidance's parser of GBNF, with llama.cpp's letters, classes and repetitions."""

    def _parse_literal(self, pos: Position) -> tuple[ASTNode, Position]:
        pos, letters = pos.advance(), list[ASTNode]()
        while pos.current() != '"':
            letter, pos = _read_letter(pos)
            letters.append(LiteralNode(_in_quotes(letter)))
        return SequenceNode(letters), pos.advance()

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        pos, written = pos.advance(), "["
        if pos.current() == "^":
            pos, written = pos.advance(), "[^"
        while pos.current() != "]":
            letter, pos = _read_letter(pos)
            written += _in_class(letter)
            if pos.current() == "-" and pos.peek(2)[1:] != "]":
                letter, pos = _read_letter(pos.advance())
                written += "-" + _in_class(letter)
        return RegexNode(written + "]"), pos.advance()

    def _parse_sequence(self, pos: Position, is_nested: bool) -> tuple[ASTNode, Position]:  # type: ignore[override]
        sequence, pos = super()._parse_sequence(pos, is_nested)
        for node in _all_nodes(sequence):
            if isinstance(node, RegexNode) and node.rx == ".":
                node.rx = "(?s:.)"  # a line break too
        return sequence, pos

    def _parse_repetition(self, pos: Position, nodes: list[ASTNode]) -> Position:
        while nodes and pos.current() and pos.current() in "*+?{":
            (low, high), pos = _read_counts(pos)
            nodes[-1] = SequenceNode([]) if high == 0 else _Repetition(nodes[-1], low, high)
        return pos


def _read_letter(pos: Position) -> tuple[str, Position]:
    """Read one letter of a literal or class, escaped or not."""
    if not pos.current():
        raise GbnfToLarkError(pos, "Unexpected end of input")
    if pos.current() != "\\":
        return pos.current(), pos.advance()
    kind = pos.peek(2)[1:]
    if kind in HEX_DIGITS:
        digits = pos.peek(2 + HEX_DIGITS[kind])[2:]
        if not re.fullmatch(f"[0-9a-fA-F]{{{HEX_DIGITS[kind]}}}", digits) or int(digits, 16) > 0x10FFFF:
            raise GbnfToLarkError(pos, f"Invalid escape sequence \\{kind}{digits}")
        return chr(int(digits, 16)), pos.advance(2 + HEX_DIGITS[kind])
    if kind not in ESCAPES:
        raise GbnfToLarkError(pos, f"Invalid escape sequence \\{kind}")
    return ESCAPES[kind], pos.advance(2)


def _in_quotes(text: str) -> str:
    """Return the text as Lark has it in quotes; JSON leaves DEL as it is, and llguidance reads no raw control character."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def _in_class(letter: str) -> str:
    return letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}"


def _read_counts(pos: Position) -> tuple[tuple[int, int | None], Position]:
    """Read a repetition: one of * + ? {m} {m,} {,n} {m,n}."""
    if pos.current() != "{":
        return REPEATED[pos.current()], pos.advance()
    found = COUNTS.match(pos.text, pos.pos)
    if found is None or not (found[1] or found[3]) or (found[3] and not found[2]):
        raise GbnfToLarkError(pos, "Expected {m}, {m,}, {,n} or {m,n}")
    low = int(found[1] or 0)
    high = int(found[3]) if found[3] else None if found[2] else low
    return (low, high), pos.advance(found.end() - found.start())


def _named(rules: dict[str, RuleNode]) -> dict[str, RuleNode]:
    """Give each rule but root a name that stays unlike the others when the converter writes it in Lark's letters."""
    names = {name: f"g{index}_{re.sub('[^a-z0-9]', '_', name.lower())}" for index, name in enumerate(rules) if name != "root"}
    for rule in rules.values():
        for node in _all_nodes(rule):
            if isinstance(node, RuleRefNode):
                node.name = names.get(node.name, node.name)
        rule.name = names.get(rule.name, rule.name)
    return {rule.name: rule for rule in rules.values()}


def _all_nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for child in node.children():
        yield from _all_nodes(child)
