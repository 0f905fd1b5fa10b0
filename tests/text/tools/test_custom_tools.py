"""Custom tools: a text that follows the client's own grammar, whichever way a model writes calls, and only that text is told."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import accepts, form, vocabulary, walks
from written import FAMILY, calls, function, read, texts, write

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.tools import (
    CustomInputReader,
    ToolSelection,
    custom_input,
    read_tool_selection,
    read_tools,
    template_tools,
    wrap_custom_input,
)

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | delete | update  // one file each
add: "*** Add File: " filename LF add_line+
delete: "*** Delete File: " filename LF
update: "*** Update File: " filename LF move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
move: "*** Move to: " filename LF
change: (context | line)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF
%import common.LF
"""
WORDS = 'start: w ("," w)*\nw: WORD | STR\nSTR: "\\"" /[^"]*/ "\\""\n%import common (WORD, WS)\n%ignore WS'
SUM = 'start: sum\nsum: value (("+" | "-") value)*\nvalue: NUMBER | "(" sum ")"\n%import common.NUMBER\n%ignore " "'
NEST = 'start: e\n?e: "(" e* ")" | WORD | STR\nSTR: "\\"" /[^"]*/ "\\""\n%import common.WORD\n%ignore " "'
ODD = r"""
!start: [A] b~2..3 (c | d)?  # odd
b: "\n"
?c: "C\t"i -> k
d: "\u0001".."\u0003" /\x22\u005c[\d\S]{1,2}/
A: "a".."z"
"""
# The syntax, the definition, texts that follow it and texts that do not.
GRAMMARS: dict[str, tuple[str, str, list[str], list[str]]] = {
    "patch": (
        "lark",
        PATCH,
        [
            '*** Begin Patch\n*** Add File: a "b".txt\n+x\\y\n+\n*** End Patch',
            "*** Begin Patch\n*** Update File: é🙂\n@@ x\n-a\n+b\t<c>\n*** Delete File: d\n*** End Patch\n",
        ],
        ["hello", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: x\n*** End Patch"],
    ),
    "free": ("lark", r"start: /(.|\n)+/", ["abc", '\na\n\n"b"\\n\x01\n</p\n'], [""]),
    "words": (
        "lark",
        WORDS,
        ["a", 'a , b,\n"x\n\\"', "a,b \n"],
        ["a b", '"a'],
    ),
    "sum": ("lark", SUM, ["1", "1+(2.5-3)", "1 + ( 2)"], ["1+", "a", "(1"]),
    "nest": ("lark", NEST, ['(a (b "c\n\\" d))'], ["(a", '("a)']),
    "odd": ("lark", ODD, ["a\n\n", "\n\n\nc\t", '\n\n\x02"\\7é'], ["a\n", "\n\nC\\T", '\n\n\x02"\\ ']),
    "pattern": ("regex", r'[a-z"\\]+(/\d{2})?(?s:.)?', ['ab"\\', "ab/12\n"], ["AB", "", "ab\n\n"]),
    "signs": ("regex", r"a b-c&d~#e<f>,;:!%@`'=_" + "\n\x7f/", ["a b-c&d~#e<f>,;:!%@`'=_\n\x7f/"], ["a"]),
    "anything": ("regex", "(?s).*", ["", 'x\n"\\', "it's"], []),
}


def custom(name: str, syntax: str = "", definition: str = "", **more: Any) -> dict[str, Any]:
    form = {"format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}} if syntax else {}
    return {"type": "custom", "custom": {"name": name, **form, **more}}


@cache
def tools(grammar: str) -> Any:
    return read_tools([custom("p", *GRAMMARS[grammar][:2])])


def called(name: str, text: str) -> str:
    """A call with this text, as the family writes it."""
    whole = write(FAMILY[name], [("p", {"input": text})])
    return whole.replace(repr(text), json.dumps(text, ensure_ascii=False)) if name in ("lfm2", "llama4", "pythonic") else whole


NOTATIONS = ["hermes", "qwen-xml", "glm", "kimi-k3", "lfm2", "gemma4"]  # every way to write a text
CASES = [
    *((name, "patch", kind) for name in FAMILY for kind in ("spelt", "tokens")),
    *((name, grammar, kind) for name in NOTATIONS for grammar in GRAMMARS for kind in ("spelt", "tokens")),
]


@pytest.mark.parametrize(("name", "grammar", "kind"), sorted(set(CASES)))
def test_a_call_has_a_text_of_its_grammar_and_no_other(name: str, grammar: str, kind: str) -> None:
    compiler = vocabulary(kind)
    _, _, right, wrong = GRAMMARS[grammar]
    spec = form(name, compiler).grammar(ToolSelection("required", tools(grammar), is_parallel=False))

    for text in right:
        assert accepts(compiler, spec, called(name, text)), text
        assert calls(read(FAMILY[name], list(called(name, text)), tools(grammar))) == [("p", {"input": text})]
    for text in wrong:
        assert not accepts(compiler, spec, called(name, text)), text


def is_of(grammar: str, text: str) -> bool:
    """Whether a text follows a grammar that stands alone."""
    return accepts(vocabulary("spelt"), GrammarSpec("lark", "%llguidance {}\n" + GRAMMARS[grammar][1]), text)


@pytest.mark.parametrize("grammar", ["words", "nest", "odd"])
@pytest.mark.parametrize("name", NOTATIONS)
def test_whatever_the_mask_lets_through_follows_the_grammar(name: str, grammar: str) -> None:
    for text in walks(vocabulary("tokens"), name, ToolSelection("required", tools(grammar), is_parallel=False), 4):
        [(_, arguments)] = calls(read(FAMILY[name], [text], tools(grammar)))
        assert is_of(grammar, arguments["input"]), arguments
        assert texts(read(FAMILY[name], [text], tools(grammar))) == ""


def test_under_auto_the_grammar_takes_over_at_the_trigger() -> None:
    compiler = vocabulary("tokens")
    for name in ("hermes", "qwen-xml"):
        spec = form(name, compiler).grammar(ToolSelection("auto", tools("sum")))
        assert accepts(compiler, spec, "1+ is no sum. " + called(name, "1+2"))
        assert not accepts(compiler, spec, "1+ is no sum. " + called(name, "1+"))


def test_a_text_can_not_have_what_closes_it() -> None:
    compiler = vocabulary("spelt")
    offered = read_tools([custom("p", "regex", "(x</arg_value>)?y*")])
    glm, hermes = (
        form(name, compiler).grammar(ToolSelection("required", offered, is_parallel=False)) for name in ("glm", "hermes")
    )

    assert accepts(compiler, glm, called("glm", "yy"))
    assert not accepts(compiler, glm, called("glm", "x</arg_value>y"))
    assert accepts(compiler, hermes, called("hermes", "x</arg_value>y"))


@pytest.mark.parametrize(
    ("definition", "part"),
    [
        (r"start: /[[:alpha:]]+/", "[[:alpha:]"),
        (r"start: /\p{L}+/", r"/\p{L}+/"),
        (r"start: /a b/x", "/a b/x"),
        (r"start: /a(?=b)/", "/a(?=b)/"),
        ('start[suffix="\\n"]: /a/', '[suffix="\\n"]'),
        (r"start: A" "\n" r"A: ~/a/", "~"),
        ("start: <think>", "<think>"),
        ('start: %regex { "substring_words": "a b" }', "%regex"),
        ('start: e\ne: "(" e ")" | "\\"" /[^"]*/ "\\""', '/[^"]*/ beside'),
    ],
)
def test_what_can_not_be_written_as_json_demands_is_refused_by_name(definition: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        form("hermes", vocabulary("spelt")).grammar(ToolSelection("auto", read_tools([custom("p", "lark", definition)])))

    assert str(refusal.value).startswith(f"tools[0].custom.format: {part}")
    assert refusal.value.param == "tools[0].custom.format"


def test_a_literal_with_what_closes_it_is_refused_where_texts_stand_as_they_are() -> None:
    definition = 'start: e\ne: "(" e ")" | "</arg_value>"'

    assert form("hermes", vocabulary("spelt")).grammar(ToolSelection("auto", read_tools([custom("p", "lark", definition)])))
    with pytest.raises(InvalidRequest, match="</arg_value>"):
        form("glm", vocabulary("spelt")).grammar(ToolSelection("auto", read_tools([custom("p", "lark", definition)])))


def test_a_custom_tool_is_shown_as_a_function_that_takes_a_text() -> None:
    patch, note, plain = custom("patch", "lark", SUM, description="Adds."), custom("note"), function("f")
    free = custom("free", format={"type": "text"})
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }

    shown = template_tools([patch, note, plain, free])
    assert [tool["type"] for tool in shown] == ["function"] * 4
    assert shown[0]["function"]["description"] == "Adds."
    assert shown[0]["function"]["parameters"]["properties"]["input"]["description"] == f"Lark it must follow:\n{SUM}"
    assert shown[1]["function"] == {"name": "note", "parameters": parameters}
    assert shown[2] is plain
    read_in = read_tools([patch, note, plain, free])
    assert [tool.is_custom for tool in read_in] == [True, True, False, True]
    assert [tool.grammar and tool.grammar.kind for tool in read_in] == ["lark", None, None, None]
    assert read_in[1].parameters == parameters


def test_the_flat_shape_of_a_format_is_taken_too() -> None:
    flat = custom("p", format={"type": "grammar", "syntax": "regex", "definition": "a+"})

    assert read_tools([flat]) == read_tools([custom("p", "regex", "a+")])


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (custom(""), "tools[0].custom.name"),
        (custom("p", description=3), "tools[0].custom.description"),
        (custom("p", format="text"), "tools[0].custom.format"),
        (custom("p", "gbnf", "root ::= a"), "tools[0].custom.format"),
        (custom("p", "lark", "begin: /a/"), "tools[0].custom.format"),
        (custom("p", "lark", 'start: %json {"type": "object"}'), "tools[0].custom.format"),
        ({"type": "custom", "name": "p"}, "tools[0]"),
    ],
)
def test_what_is_no_custom_tool_is_refused_by_its_place(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_tools([tool])

    assert refusal.value.param == param


def test_a_custom_tool_is_chosen_by_its_name() -> None:
    offered = read_tools([custom("p"), function("f")])
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [custom("p")]}}

    for given_choice in (custom("p"), {"type": "custom", "name": "p"}):
        assert read_tool_selection(given_choice, offered) == ToolSelection("required", offered[:1], is_parallel=False)
    assert read_tool_selection(allowed, offered) == ToolSelection("auto", offered[:1])


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(st.text(), CUTS, st.booleans(), st.sampled_from(["", " ", "\n  "]))
@settings(max_examples=200)
def test_a_text_comes_out_of_its_json_however_that_is_cut(text: str, places: list[int], is_ascii: bool, blank: str) -> None:
    arguments = f'{blank}{{{blank}"input"{blank}:{blank}{json.dumps(text, ensure_ascii=is_ascii)}{blank}}}'
    bounds = [0, *sorted(place % (len(arguments) + 1) for place in places), len(arguments)]
    reader = CustomInputReader()
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    assert "".join(reader.feed(arguments[start:end]) for start, end in pairwise(bounds)) == clean
    assert custom_input(wrap_custom_input(clean)) == clean


def test_a_text_is_told_as_it_comes_and_never_half_a_letter() -> None:
    reader = CustomInputReader()
    pieces = ['{"in', 'put": "', "a", "b\\", "n", "\\u00", "e9", "\\ud83d", "\\ude", "42", '"', "}"]

    assert [reader.feed(piece) for piece in pieces] == ["", "", "a", "b", "\n", "", "é", "", "", "🙂", "", ""]


def test_arguments_of_another_shape_have_no_text() -> None:
    assert [custom_input(arguments) for arguments in ('{"output": "x"}', "[1]", "", '{"input": 3}')] == [""] * 4
    assert custom_input('{"input": "a\\q') == "a\\q"
    assert custom_input('{"input": "\\ud83d!"') == "\ufffd!"
