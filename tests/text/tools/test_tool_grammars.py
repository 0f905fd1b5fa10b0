"""Whatever the mask lets through is a call that parses and fits its schema, for every family and however it writes its markers.

Walks take any token the mask has, so that only the grammar can make them right; now and then they hurry to an end.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import accepts, form, ids, vocabulary, walks
from written import EXAMPLES, FAMILY, OPTIONAL, PARIS, TOOLS, WEATHER, calls, function, read, texts, write

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.tools import Tool, ToolSelection, read_tools
from weft.text.types import CallOpened

FITS = {tool.name: jsonschema_rs.validator_for(tool.parameters) for tool in TOOLS}


def check(name: str, text: str, tools: tuple[Tool, ...] = TOOLS) -> list[tuple[str, Any]]:
    """All calls of an answer: each is closed and fits."""
    deltas = read(FAMILY[name], [text], tools)
    called = calls(deltas)
    assert len(called) == sum(isinstance(delta, CallOpened) for delta in deltas), text
    for function_name, arguments in called:
        assert FITS[function_name].is_valid(arguments), (text, arguments)
    return called


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", FAMILY)
def test_a_forced_answer_is_calls_and_nothing_else(name: str, kind: str) -> None:
    compiler = vocabulary(kind)
    for text in walks(compiler, name, ToolSelection("required", TOOLS), 12):
        assert check(name, text)
        assert texts(read(FAMILY[name], [text], is_required=True)) == ""


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", FAMILY)
def test_in_free_text_the_grammar_takes_over_at_the_trigger(name: str, kind: str) -> None:
    compiler, family = vocabulary(kind), FAMILY[name]
    said = "" if family.is_anchored or family.is_harmony else "Let me see. "
    begin = write(family, [PARIS]).partition("get_weather")[0] if family.is_anchored or family.is_harmony else family.trigger

    for text in walks(compiler, name, ToolSelection("auto", TOOLS), 8, said + begin):
        assert check(name, text) or family.is_anchored  # what begins like a call and is none is text there
        assert texts(read(family, [text])).startswith(said.strip())


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", FAMILY)
def test_what_the_family_writes_is_allowed(name: str, kind: str) -> None:
    compiler = vocabulary(kind)
    text = EXAMPLES[name][0].removesuffix("<|call|>")
    for mode in ("auto", "required"):
        assert accepts(compiler, form(name, compiler).grammar(ToolSelection(mode, TOOLS)), text)


@pytest.mark.parametrize("name", [name for name in FAMILY if not FAMILY[name].is_harmony])
def test_free_text_is_free_and_ends_anywhere(name: str) -> None:
    compiler = vocabulary("tokens")
    for mode in ("auto", "none"):
        spec = form(name, compiler).grammar(ToolSelection(mode, TOOLS))
        assert accepts(compiler, spec, "")
        assert accepts(compiler, spec, 'Say {"name": "x"} [1] <b>é🙂</b>\n\n</tool> \\ ')


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", [name for name in FAMILY if not FAMILY[name].is_harmony])
def test_without_a_choice_no_call_comes(name: str, kind: str) -> None:
    compiler = vocabulary(kind)
    text = EXAMPLES[name][0]

    assert not accepts(compiler, form(name, compiler).grammar(ToolSelection("none", TOOLS)), text)


@pytest.mark.parametrize("name", [name for name in FAMILY if FAMILY[name].between is not None])
def test_several_calls_come_only_where_they_may(name: str) -> None:
    compiler, family = vocabulary("tokens"), FAMILY[name]
    two = write(family, [PARIS, PARIS])
    for mode in ("auto", "required"):
        assert accepts(compiler, form(name, compiler).grammar(ToolSelection(mode, TOOLS)), two)
        single = form(name, compiler).grammar(ToolSelection(mode, TOOLS, is_parallel=False))
        assert not accepts(compiler, single, two)
        matcher = compiler.compile(single)
        for token in ids(compiler, write(family, [PARIS])):
            matcher.accept(token)
        matcher.mask()
        assert matcher.is_finished


def test_a_model_whose_template_writes_one_call_makes_one() -> None:
    compiler = vocabulary("tokens")
    spec = form("llama3", compiler).grammar(ToolSelection("required", TOOLS))
    text = write(FAMILY["llama3"], [PARIS])

    assert accepts(compiler, spec, text)
    assert not accepts(compiler, spec, text + text)


@pytest.mark.parametrize("name", FAMILY)
def test_only_tools_that_were_chosen_are_called(name: str) -> None:
    compiler = vocabulary("tokens")
    for text in walks(compiler, name, ToolSelection("required", TOOLS[2:]), 4):
        assert {called for called, _ in check(name, text)} == {"set.it"}


ODD = {
    "type": "object",
    "properties": {
        "date": {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"},
        "level": {"type": "string", "enum": ["low", "high"]},
        "when": {"type": "string", "format": "date"},
        "size": {"type": ["integer", "null"], "minimum": 5, "maximum": 7},
    },
    "required": ["date", "level", "when", "size"],
    "additionalProperties": False,
}
WORDED = [name for name in FAMILY if name not in ("gemma4", "function-gemma", "minimax-m3")]


@pytest.mark.parametrize("name", WORDED)
def test_strict_tools_are_held_to_every_word(name: str) -> None:
    compiler = vocabulary("tokens")
    tools = read_tools([function("get_weather", ODD, strict=True)])
    fits = jsonschema_rs.validator_for(ODD, validate_formats=True)

    for text in walks(compiler, name, ToolSelection("required", tools, is_parallel=False), 3):
        called = calls(read(FAMILY[name], [text], tools))
        assert called
        assert all(fits.is_valid(arguments) for _, arguments in called), text


BESIDE = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 2, "maxItems": 3},
        "unit": {"enum": ["C", None]},
        "never": False,
        "more": {"type": "object", "additionalProperties": {"type": "boolean"}},
    },
    "required": ["list", "unit", "more"],
    "additionalProperties": {"type": "integer"},
}


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "deepseek-v4", "kimi-k3", "lfm2", "gemma4", "seed", "minimax-m3"])
def test_arguments_that_have_no_name_are_held_to_their_schema_too(name: str) -> None:
    compiler, family = vocabulary("tokens"), FAMILY[name]
    tools = read_tools([function("f", BESIDE)])
    spec = form(name, compiler).grammar(ToolSelection("required", tools, is_parallel=False))
    fits = jsonschema_rs.validator_for(BESIDE)
    known = {"list": ["a", 1], "unit": None, "more": {"on": True}}
    known = dict(sorted(known.items())) if name == "gemma4" else known

    def is_taken(**more: Any) -> bool:
        text = write(family, [("f", {**known, **more})])
        text = text.replace("'", '"').replace("None", "null").replace("True", "true") if name == "lfm2" else text
        return accepts(compiler, spec, text)

    assert is_taken()
    assert is_taken(extra=3)
    assert not is_taken(extra="x")
    assert not is_taken(list=["a"])
    for text in walks(compiler, name, ToolSelection("required", tools, is_parallel=False), 12):
        [(_, called)] = calls(read(family, [text], tools))
        assert fits.is_valid(called), text


def test_an_argument_comes_once() -> None:
    compiler = vocabulary("spelt")
    tools = read_tools([function("f", {"properties": {"a": {"type": "integer"}}, "additionalProperties": True})])
    once, again = "<arg_key>a</arg_key><arg_value>1</arg_value>", "<arg_key>b</arg_key><arg_value>2</arg_value>"
    spec = form("glm", compiler).grammar(ToolSelection("required", tools))

    assert accepts(compiler, spec, f"<tool_call>f{once}{again}</tool_call>")
    assert not accepts(compiler, spec, f"<tool_call>f{once}{once}</tool_call>")


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("gemma4", ODD, "properties.date: pattern can not be enforced"),
        ("gemma4", {"properties": {"a": {"type": "array", "prefixItems": [{}]}}}, "properties.a: prefixItems"),
        ("glm", {"properties": {}, "minProperties": 1}, "parameters: minProperties can not be enforced"),
        ("glm", {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "number"}}}, "put what it names there"),
        ("lfm2", {"properties": {"a b": {}}, "additionalProperties": False}, "an argument of that name"),
    ],
)
def test_what_a_strict_tool_can_not_be_held_to_is_refused(name: str, schema: Any, words: str) -> None:
    tools = read_tools([function("f", {"type": "object", **schema}, strict=True)])
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refusal:
        form(name, vocabulary("spelt")).grammar(ToolSelection("auto", tools))

    assert (refusal.value.param or "").startswith("tools[0].function.parameters")


NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "list": {"type": "array"},
        "deep": {"type": "object", "properties": {"a": {"type": "object"}, "on": {"type": "boolean"}}},
    },
    "additionalProperties": False,
}
NOTES = read_tools([function("f", NOTE)])
XML_NOTE = "<seed:tool_call>\n<function=f>\n<parameter={}>{}</parameter>\n</function>\n</seed:tool_call>"
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
INVOKED = '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>'
AS_PRINTED: list[tuple[str, str, list[Any]]] = [
    (
        "seed",
        XML_NOTE.format("list", "[1, 'it is', \"it's\", None, True, {'a b': [2.5]}]"),
        [{"list": [1, "it is", "it's", None, True, {"a b": [2.5]}]}],
    ),
    (
        "seed",
        XML_NOTE.format("deep", r"{'a': {'k': 'é \' \\ \n \x1b \u200b'}, 'on': False}"),
        [{"deep": {"a": {"k": "é ' \\ \n \x1b \u200b"}, "on": False}}],
    ),
    ("seed", XML_NOTE.format("list", "['<b>\"', 1]"), [{"list": ['<b>"', 1]}]),
    ("seed", XML_NOTE.format("list", "[1e+400, -5]"), None),
    (
        "minicpm5",
        '<function name="f"><param name="text"><![CDATA[a <b>\n & ]]></param></function>',
        [{"text": "a <b>\n & "}],
    ),
    (
        "minicpm5",
        '<function name="f"><param name="text">a > b</param><param name="deep">{\'on\': True}</param></function>',
        [{"text": "a > b", "deep": {"on": True}}],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(text='one\n\n two it's d'été', list=[1, 'x'])]<|tool_call_end|>",
        [{"text": "one\n\n two it's d'été", "list": [1, "x"]}],
    ),
    ("pythonic", "[f(text=\"one\ntwo\"), f(deep={'on': True})]", [{"text": "one\ntwo"}, {"deep": {"on": True}}]),
    (
        "deepseek-v3",
        f"<｜tool▁calls▁begin｜>{FENCED}                \n{FENCED}        <｜tool▁calls▁end｜>".replace("{}", "{}"),
        [{}, {}],
    ),
    ("deepseek-v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', [{}]),
    (
        "mistral-list",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "aB3dE5gH7"}, {"name": "f", "arguments": {}, "id": "aB3dE5gH8"}]',
        [{}, {}],
    ),
    ("solar", "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>", [{}]),
    ("granite-20b", '<function_call> {"name": "f", "arguments": {}}\n', [{}]),
]


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize(("name", "text", "called"), AS_PRINTED)
def test_what_templates_print_is_allowed_and_read(name: str, text: str, called: Any, kind: str) -> None:
    compiler = vocabulary(kind)
    for mode in ("auto", "required"):
        assert accepts(compiler, form(name, compiler).grammar(ToolSelection(mode, NOTES)), text)

    deltas = read(FAMILY[name], [text], NOTES)
    assert read(FAMILY[name], list(text), NOTES) == deltas
    assert texts(deltas) == ""
    assert called is None or calls(deltas) == [("f", arguments) for arguments in called]


def test_a_text_in_quotes_is_closed_by_them() -> None:
    compiler = vocabulary("tokens")
    spec = form("minicpm5", compiler).grammar(ToolSelection("required", NOTES))
    begun = '<function name="f"><param name="text"><![CDATA[a'

    assert accepts(compiler, spec, f"{begun}]]></param></function>")
    assert not accepts(compiler, spec, f"{begun}</param></function>")
    assert calls(read(FAMILY["minicpm5"], list(f"{begun}</param>]]></param></function>"), NOTES)) == [
        ("f", {"text": "a</param>"})
    ]


def test_letters_are_escaped_where_the_template_does_and_no_argument_can_come_twice() -> None:
    compiler = vocabulary("spelt")
    escaping = dataclasses.replace(form("hermes", compiler), family=dataclasses.replace(FAMILY["hermes"], is_ascii=True))
    open_tools = read_tools([function("f", {**NOTE, "additionalProperties": True})])
    text = '<tool_call>\n{"name": "f", "arguments": {"text": "Gr\\u00fc\\u00df"}}\n</tool_call>'

    assert accepts(compiler, escaping.grammar(ToolSelection("required", CLOSED_NOTES)), text)
    assert not accepts(compiler, escaping.grammar(ToolSelection("required", open_tools)), text)
    assert not accepts(compiler, form("hermes", compiler).grammar(ToolSelection("required", CLOSED_NOTES)), text)


CLOSED_NOTES = read_tools([function("f", {"properties": {"text": {"type": "string"}}, "additionalProperties": False})])


def test_an_answer_is_calls_or_what_was_asked_for() -> None:
    compiler = vocabulary("tokens")
    answer = GrammarSpec("json_schema", json.dumps(OPTIONAL))
    spec = form("hermes", compiler).grammar(ToolSelection("auto", TOOLS), answer)

    assert accepts(compiler, spec, '{"a": true}')
    assert accepts(compiler, spec, EXAMPLES["hermes"][0])
    assert not accepts(compiler, spec, "Hello")
    assert form("hermes", compiler).grammar(ToolSelection("none", TOOLS), answer) == answer
    with pytest.raises(InvalidRequest, match="regex"):
        form("hermes", compiler).grammar(ToolSelection("auto", TOOLS), GrammarSpec("regex", "a"))


def test_a_channel_is_chosen_before_a_call() -> None:
    compiler = vocabulary("tokens")
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    called = EXAMPLES["harmony"][0].removesuffix("<|call|>")
    said = "<|channel|>final<|message|>Hello."
    auto, forced, none = (form("harmony", compiler).grammar(ToolSelection(mode, TOOLS)) for mode in ("auto", "required", "none"))

    assert all(accepts(compiler, auto, thought + rest) for rest in (called, said))
    assert accepts(compiler, forced, thought + called)
    assert accepts(compiler, forced, "<|start|>assistant" + called)  # the thinking may have been somebody else's business
    assert accepts(compiler, none, thought + said)
    assert not accepts(compiler, forced, said)
    assert not accepts(compiler, none, called)


def test_what_was_asked_for_stands_in_the_final_channel() -> None:
    compiler = vocabulary("tokens")
    spec = form("harmony", compiler).grammar(ToolSelection("none", ()), GrammarSpec("json_schema", json.dumps(OPTIONAL)))

    assert accepts(
        compiler, spec, '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{"a": true}'
    )
    assert not accepts(compiler, spec, "<|channel|>final<|message|>Hello")


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "lfm2", "gemma4", "minimax-m3"])
def test_an_agents_many_tools_are_compiled_within_the_limits(name: str) -> None:
    compiler = vocabulary("tokens")
    tools = read_tools([function(f"tool_{index}", WEATHER) for index in range(62)])

    assert compiler.compile(form(name, compiler).grammar(ToolSelection("auto", tools)))


WORDS = st.sampled_from(
    [
        "type",
        "properties",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "items",
        "additionalProperties",
        "minItems",
        "$defs",
        "a",
    ]
)
SCRAPS = st.sampled_from(["string", "object", "array", "b", "x y", "", {"$ref": "#/$defs/a"}, {"$ref": "#"}, {"$ref": "#/no"}])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | SCRAPS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "kimi-k3", "lfm2", "gemma4", "minimax-m3", "minicpm5"])
@given(schema=st.dictionaries(WORDS, JUNK, max_size=4))
@settings(max_examples=60)
def test_no_schema_is_too_odd_for_a_tool_that_is_not_strict(name: str, schema: dict[str, Any]) -> None:
    compiler = vocabulary("tokens")
    try:
        tools = read_tools([function("f", {**schema, "type": "object"})])
        assert compiler.compile(form(name, compiler).grammar(ToolSelection("auto", tools)))
    except InvalidRequest as refusal:
        # A name that can not be written, or a schema that nothing fits.
        assert "argument of that name" in str(refusal) or "nsatisfiable" in str(refusal)  # noqa: PT017 - it may be refused
