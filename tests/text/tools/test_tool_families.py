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
from weft.text.tools import CallFormat, find_family, read_tools
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
WRITTEN = {
    "phi": ("<|tool_call|>[", ", ", OBJECT, "]<|/tool_call|>"),
    "granite": ("<|tool_call|>[", ", ", OBJECT, "]"),
    "nemotron": ("<TOOLCALL>[", ", ", OBJECT, "]</TOOLCALL>"),
    "mistral": ("", "", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "mistral-ids": ("", "", "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ 'abcdefghi' }}[ARGS]{{ f.arguments | tojson }}", ""),
    "minimax": ("<minimax:tool_call>", "", XML, "\n</minimax:tool_call>"),
    "glm": ("", "", KEYED + "</tool_call>", ""),  # as later ones of that family write it, without line breaks
    "deepseek-v3": ("<｜tool▁calls▁begin｜>", "\n", FENCED, "<｜tool▁calls▁end｜>"),
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
    family = find_family(writer(PLAIN % ("<think>\n\n</think>\n\n", "", OBJECT, "")))

    assert family == FAMILY["json"]


def test_a_template_that_writes_ids_instead_of_names_is_known_by_ids_that_have_them() -> None:
    calls_by_id = "<|tool_call_begin|>{{ call.id }}" + GIVEN
    by_id = writer(PLAIN % ("<|tool_calls_section_begin|>", "", calls_by_id, "<|tool_calls_section_end|>"))

    assert find_family(by_id) == FAMILY["kimi-k2"]
    assert by_id.capabilities.arguments
    assert by_id.capabilities.any_call_id


def test_a_template_that_can_not_be_understood_is_guessed_at_aloud(caplog: pytest.LogCaptureFixture) -> None:
    sources = ("@@{{ f.name }}({{ f.arguments | tojson }})", "[TOOL_CALLS]@{{ f.name }}({{ f.arguments | tojson }})")
    with caplog.at_level(logging.WARNING, "weft.text"):
        forms = [CallFormat.of(writer(PLAIN % ("", "", source, "")), Tokenizer(TINY_HYBRID)) for source in sources]

    assert [form and form.family for form in forms] == [replace(FAMILY[name], is_guess=True) for name in ("hermes", "mistral")]
    notices = [
        f"the chat template writes tool calls in no way that weft knows; they are read like those of {name}"
        for name in ("hermes", "mistral")
    ]
    assert [form and form.notice for form in forms] == notices
    assert [record.message for record in caplog.records] == notices


def test_a_model_shows_the_tokens_that_mark_its_calls() -> None:
    tokenizer = Tokenizer(TINY_HYBRID)
    form = CallFormat.of(ours("tiny-hybrid"), tokenizer)

    assert form is not None
    assert form.shown == {tokenizer.id_of("<tool_call>"), tokenizer.id_of("</tool_call>")}
    assert form.trigger == "<tool_call>"
    assert form.notice is None
    assert CallFormat.of(ours("chatml"), tokenizer) is None
