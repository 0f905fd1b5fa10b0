"""A model's family is found by what its chat template writes, and its reader understands that template."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from written import FAMILY, calls, function, read

from weft.model.resolve import TINY_HYBRID
from weft.text.normalise import PromptWriter
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.tools import CallFormat, Family, find_family, read_tools
from weft.text.tools.call_writer import spelling_of
from weft.text.tools.described import describe_tools
from weft.text.types import Conversation, Message, ToolCall

FILES = {path.stem: path for path in sorted((Path(__file__).parent.parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"
FOUND = {
    "deepseek": "deepseek-v3.1",
    "gemma4": "gemma4",
    "glm": "glm",
    "gpt-oss": "harmony",
    "lfm2": "lfm2",
    "llama3": "llama3",
    "mistral": "mistral-list",
    "qwen3-coder": "qwen-xml",
    "qwen3.5": "qwen-xml",
    "tiny-hybrid": "hermes",
}
ONE_AT_A_TIME = {"gpt-oss", "llama3"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array"},
        "deep": {"type": "object"},
        "all": {"type": "boolean"},
    },
}
TOOL = function("read", SCHEMA, description="Reads.")


def writer(source: str) -> PromptWriter:
    return PromptWriter(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


@cache
def ours(name: str) -> PromptWriter:
    return writer(FILES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_a_template_tells_its_family(name: str) -> None:
    family = find_family(ours(name))

    assert (family and family.name) == FOUND.get(name)
    assert family is None or (family.between is None) == (name in ONE_AT_A_TIME)


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"path": "a b.txt"},
    {"path": "", "lines": [1, 2.5, -3]},
    {"path": 'say "hi"\n\n  <b>&amp; {"x": [1]}\n', "deep": {"a": {"b": 1}}, "all": True},
    {"path": "Grüß 日本 🙂 \\n \\", "lines": ["x", "it is"], "deep": {"k": None}},
]
UNSAID = {"lfm2": ["\n", "\\"]}  # what this template does not escape


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize("name", FOUND)
def test_what_a_template_writes_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    if any(sign in str(arguments.get("path")) for sign in UNSAID.get(name, ())):
        pytest.skip("the template writes what Python would not read")
    family = find_family(ours(name))
    assert family is not None
    asked = Message("user", "[[?]]")
    called = tuple(ToolCall("read", json.dumps(arguments), f"call_{index}") for index in range(1 if name in ONE_AT_A_TIME else 2))
    results = (Message("tool", "[[!]]", tool_call_id=call.id) for call in called)
    talk = (asked, Message("assistant", None, tool_calls=called), *results)
    prompt = ours(name).write(Conversation((asked,), (TOOL,)))
    text = ours(name).write(Conversation(talk, (TOOL,), add_generation_prompt=False))
    begun = text.removeprefix(prompt) if text.startswith(prompt) else text.partition("[[?]]")[2]

    assert calls(read(family, [begun], read_tools([TOOL]))) == [("read", arguments)] * len(called)


# A conversation in which only calls are written in the model's own way: what stands before them, one of them, and so on.
PLAIN = (
    "{%% for tool in tools or [] %%}{{ tool | tojson }}{%% endfor %%}{%% for m in messages %%}[{{ m.role }}]{{ m.content or '' }}"
    "{%% for call in m.tool_calls or [] %%}{%% set f = call.function %%}{%% if loop.first %%}%s{%% else %%}%s{%% endif %%}%s"
    "{%% if loop.last %%}%s{%% endif %%}{%% endfor %%}\n{%% endfor %%}{%% if add_generation_prompt %%}[assistant]{%% endif %%}"
)
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
ITEMS = "{% for k, v in f.arguments | items %}"
XML = f'\n<invoke name="{{{{ f.name }}}}">{ITEMS}\n<parameter name="{{{{ k }}}}">{{{{ v }}}}</parameter>{{% endfor %}}\n</invoke>'
KEYED = f"<tool_call>{{{{ f.name }}}}{ITEMS}<arg_key>{{{{ k }}}}</arg_key><arg_value>{{{{ v }}}}</arg_value>{{% endfor %}}"
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>"
GIVEN = "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
KIMI = "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}" + GIVEN
SHORT = f"{ITEMS}<param name='{{{{ k }}}}'>{{{{ v }}}}</param>{{% endfor %}}".replace("'{{ k }}'", '"{{ k }}"')
HY3 = (
    f"<tool_call>{{{{ f.name }}}}<tool_sep>\n{ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}</arg_value>\n"
    "{% endfor %}</tool_call>"
)
SOLAR = (
    "<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}<|tool_call:end|>"
)
M3 = "]<]minimax[>["
ELEMENT = f"{ITEMS}{M3}<{{{{ k }}}}>{{{{ v }}}}{M3}</{{{{ k }}}}>{{% endfor %}}"
NAMED = '{"{{ f.name }}": {{ f.arguments | tojson }}}'
WRITTEN = {
    "phi": ("<|tool_call|>[", ", ", OBJECT, "]<|/tool_call|>"),
    "granite": ("<|tool_call|>[\n    ", ",\n    ", "{{ {'name': f.name, 'arguments': f.arguments} | tojson(indent=4) }}", "\n]"),
    "granite-20b": ("", "", f"<function_call> {OBJECT}\n\n", ""),
    "tool-calls": ("<tool_calls>[", ", ", OBJECT.replace("}}}", '}}, "id": "{{ call.id }}"}'), "]</tool_calls>"),
    "minimax-m1": ("<tool_calls>\n", "", OBJECT + "\n\n", "</tool_calls>"),
    "apertus": ("<|tools_prefix|>[", ", ", NAMED, "]<|tools_suffix|>"),
    "solar": ("<|tool_calls|>", "", SOLAR, "<|calls|>"),
    "internlm2": ("", "", f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>", ""),
    "functionary-v3.1": ("", "", "<function={{ f.name }}>{{ f.arguments | tojson }}</function>", ""),
    "minimax-m3": (
        f"{M3}<tool_call>",
        "",
        f'\n{M3}<invoke name="{{{{ f.name }}}}">{ELEMENT}{M3}</invoke>',
        f"\n\n{M3}</tool_call>",
    ),
    "minicpm5": ("", "\n", f'<function name="{{{{ f.name }}}}">{SHORT}</function>', ""),
    "hy3": ("<tool_calls>\n", "\n", HY3, "\n</tool_calls>"),
    "hy3-opensource": tuple(text.replace(">", ":opensource>") for text in ("<tool_calls>\n", "\n", HY3, "\n</tool_calls>")),
    "json-list": ("[", ", ", OBJECT, "]"),
    "pythonic": (
        "[",
        ", ",
        "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})",
        "]",
    ),
    "functools": ("functools[", ", ", OBJECT, "]"),
    "nemotron": ("<TOOLCALL>[", ", ", OBJECT, "]</TOOLCALL>"),
    "mistral": ("", "", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "mistral-ids": ("", "", "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ 'abcdefghi' }}[ARGS]{{ f.arguments | tojson }}", ""),
    "minimax": ("<minimax:tool_call>", "", XML, "\n</minimax:tool_call>"),
    "glm": ("", "", KEYED + "</tool_call>", ""),  # as later ones of that family write it, without line breaks
    "deepseek-v3": ("<｜tool▁calls▁begin｜>", " " * 16 + "\n\n", FENCED, " " * 8 + "<｜tool▁calls▁end｜>"),
    "kimi-k2": ("<|tool_calls_section_begin|>", "", KIMI, "<|tool_calls_section_end|>"),
    "json": ("", "; ", OBJECT, ""),
    "hermes": ("", "\n", f"<tool_call>{OBJECT}</tool_call>", ""),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_family_is_found_by_the_shape_of_its_calls(name: str) -> None:
    family = find_family(writer(PLAIN % WRITTEN[name]))

    assert family is not None
    assert family.name == name
    assert family.between == (None if name == "json" else FAMILY[name].between)


def test_a_family_that_could_write_several_calls_writes_one_where_the_template_does() -> None:
    first_only = "{% if loop.first %}<tool_call>" + OBJECT + "</tool_call>{% endif %}"

    assert find_family(writer(PLAIN % ("", "", first_only, ""))) == replace(FAMILY["hermes"], between=None)


def test_thinking_before_a_call_that_is_not_announced_does_not_hide_it() -> None:
    family = find_family(writer(PLAIN % ("<think>\n\n</think>\n\n", ",", OBJECT, "")))

    assert family == FAMILY["json"]


def test_a_model_that_announces_each_call_by_one_text_writes_one_call_where_its_template_does() -> None:
    first = "{% if loop.first %}<|function_call|>" + OBJECT + "{% endif %}"

    assert find_family(writer(PLAIN % ("", "", first, ""))) == FAMILY["gigachat3.1"]


@pytest.mark.parametrize(
    "pair",
    ["{{ k }}={{ v }}{{ ', ' if not loop.last }}", "{{ k }}=\"{{ v }}\"{{ ', ' if not loop.last }}", "{{ k }}={{ v | tojson }}"],
    ids=["without quotes", "all in quotes", "without commas"],
)
def test_a_template_that_prints_keyword_arguments_carelessly_is_known_by_those_that_come_out_right(pair: str) -> None:
    call = f"{{{{ f.name }}}}({ITEMS}{pair}{{% endfor %}})"

    assert find_family(writer(PLAIN % ("[", ", ", call, "]"))) == FAMILY["pythonic"]
    assert find_family(writer(PLAIN % ("<|python_start|>[", ", ", call, "]<|python_end|>"))) == FAMILY["llama4"]


def test_a_template_that_escapes_letters_is_known_to() -> None:
    escaped = OBJECT.replace("tojson", "tojson(ensure_ascii=true)")
    family = find_family(writer(PLAIN % ("", "\n", f"<tool_call>{escaped}</tool_call>", "")))

    assert family == replace(FAMILY["hermes"], is_ascii=True)


def test_a_template_that_writes_ids_instead_of_names_is_known_by_ids_that_have_them() -> None:
    calls_by_id = "<|tool_call_begin|>{{ call.id }}" + GIVEN
    by_id = writer(PLAIN % ("<|tool_calls_section_begin|>", "", calls_by_id, "<|tool_calls_section_end|>"))

    assert find_family(by_id) == FAMILY["kimi-k2"]
    assert by_id.capabilities.arguments
    assert by_id.capabilities.any_call_id


# A conversation in which no calls are written, with words about them.
SILENT = (
    "{%% for tool in tools or [] %%}{{ tool | tojson }}%s{%% endfor %%}"
    "{%% for m in messages %%}[{{ m.role }}]{{ m.content }}\n{%% endfor %%}"
)


def described(name: str) -> str:
    """All fixed texts of a family, as a template's instructions have them."""
    return "{% raw %}" + FAMILY[name].literals.replace("\0", " ") + "{% endraw %}"


@pytest.mark.parametrize("name", FAMILY)
def test_calls_that_no_reader_understands_have_no_family(name: str) -> None:
    for call in (
        "@@{{ f.name }}({{ f.arguments | tojson }})",
        '<tool_call><{{ f.name }} a="{{ f.arguments | tojson }}"/></tool_call>',
    ):
        shown = f"{FAMILY[name].trigger}{call}"
        assert find_family(writer(described(name) + PLAIN % ("", "", call, ""))) is None
        assert find_family(writer(described(name) + PLAIN % ("", "", shown, ""))) is None


@pytest.mark.parametrize("name", FAMILY)
def test_what_a_template_only_describes_is_that_family_or_none(name: str) -> None:
    family = find_family(writer(SILENT % described(name)))

    assert family in (None, replace(FAMILY[name], is_guess=True))
    assert (family is None) == (name in AMBIGUOUS or spelling_of(FAMILY[name]) is None)


def history(family: Family) -> Conversation:
    call, tool = ToolCall("read", '{"path": "zqpath"}', "call_1"), {"type": "function", "function": {"name": "read"}}
    called = (Message("assistant", None, tool_calls=(call,)), Message("tool", "zqfound", tool_call_id="call_1"))
    return Conversation((Message("user", f"zq {family.name}?"), *called), (tool,))


# Templates that write no calls: they write results, drop them, or refuse turns without content.
NO_CALLS = (
    SILENT,
    SILENT.replace("in messages", "in messages if m.role in ('user', 'assistant')"),
    SILENT.replace("{{ m.content }}", "{{ ('user', 'assistant').index(m.role) }}{{ m.content }}"),
)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("silent", range(len(NO_CALLS)))
def test_a_model_that_is_offered_tools_has_a_place_for_the_calls_and_results_of_the_second_turn(silent: int, name: str) -> None:
    made = writer(NO_CALLS[silent] % described(name))
    if (family := find_family(made)) is None:
        made.reword = describe_tools
    else:
        made.spelling = spelling_of(family)

    prompt = made.write(history(FAMILY[name]))

    assert prompt.find("zqpath") < prompt.find("zqfound")
    assert prompt.count("zqpath") == prompt.count("zqfound") == 1


# Without a mark, or with those of another family. Of two that are written with the same marks none is guessed.
AMBIGUOUS = {"functools", "deepseek-v3", "deepseek-v3.1", "tool-calls", "minimax-m1", "llama3", "json", "json-list", "pythonic"}


def test_a_template_without_calls_is_known_by_the_tokens_of_the_vocabulary() -> None:
    silent = writer(SILENT % "")
    tokens = ["<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<think>"]

    assert find_family(silent, tokens) == replace(FAMILY["lfm2"], is_guess=True)
    assert find_family(silent, tokens[:2]) is None
    assert find_family(silent, ["<tool_call>", "</tool_call>"]) is None  # of several families
    assert find_family(silent) is None


def test_a_guess_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft.text"):
        form = CallFormat.of(writer(SILENT % described("hermes")), Tokenizer(TINY_HYBRID))

    assert form is not None
    assert form.family == replace(FAMILY["hermes"], is_guess=True)
    assert form.notice == "the chat template shows no tool calls; by the markers it names they are read like those of hermes"
    assert [record.message for record in caplog.records] == [form.notice]


def test_a_model_shows_the_tokens_that_mark_its_calls() -> None:
    tokenizer = Tokenizer(TINY_HYBRID)
    form = CallFormat.of(ours("tiny-hybrid"), tokenizer)

    assert form is not None
    assert form.shown == {tokenizer.id_of("<tool_call>"), tokenizer.id_of("</tool_call>")}
    assert form.trigger == "<tool_call>"
    assert form.notice is None
    assert CallFormat.of(ours("chatml"), tokenizer) is None


@pytest.mark.parametrize("asks", [True, False])
def test_calls_are_announced_as_the_template_asks_for_though_it_writes_the_bare_ones(asks: bool) -> None:
    words = 'Write functools[{"name": ..., "arguments": ...}, ...].' if asks else "Write JSON."
    family = find_family(writer(words + PLAIN % ("", ",", OBJECT, "")))

    assert family is not None
    assert family.name == ("functools" if asks else "json")
