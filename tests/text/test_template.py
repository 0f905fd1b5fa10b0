"""Chat templates run as their authors tested them, and whatever goes wrong inside is told in their words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from weft.errors import BadModel, TemplateFailed
from weft.model.resolve import TINY_HYBRID
from weft.text.template import ChatTemplate

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TOOL = {"type": "function", "function": {"name": "read", "description": "Reads <b>.", "parameters": {"type": "object"}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "read", "arguments": {"path": "é & <ü>"}}}
TALK: list[dict[str, Any]] = [{"role": "user", "content": "Grüße & <b>"}, {"role": "assistant", "content": "'yes'"}]
WORK = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "ok", "tool_call_id": "call00001"},
]


def one(source: str, **values: Any) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "a"}], **values)


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize(("messages", "tools"), [(TALK, None), (TALK, [TOOL]), (WORK, [TOOL])])
@pytest.mark.parametrize("name", FILES)
def test_the_prompt_is_what_transformers_gives(name: str, messages: list[dict[str, Any]], tools: Any, begin: bool) -> None:
    source = FILES[name].read_text(encoding="utf-8")
    theirs: str | None
    try:
        options = {"tools": tools, "chat_template": source, "add_generation_prompt": begin, **SPECIAL}
        theirs = render_jinja_template([messages], **options)[0][0]
    except Exception:  # the template refuses, in whichever way
        theirs = None

    ours: str | None
    try:
        ours = ChatTemplate(source, SPECIAL).render(messages, tools=tools, add_generation_prompt=begin)
    except TemplateFailed:
        ours = None

    assert ours == theirs
    assert ours is not None or tools  # all of them can talk


def test_json_is_written_with_the_options_templates_use() -> None:
    value = {"b": "é<&>'", "a": [1]}

    assert one("{{ v | tojson }}", v=value) == '{"b": "é<&>\'", "a": [1]}'
    assert one("{{ v | tojson(sort_keys=True, separators=(',', ':')) }}", v=value) == '{"a":[1],"b":"é<&>\'"}'
    assert one("{{ v | tojson(indent=1, ensure_ascii=True) }}", v=["é"]) == '[\n "\\u00e9"\n]'


def test_loop_controls_dates_and_generation_marks_work() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"

    assert one(source) == "02"
    assert one("{{ strftime_now('%Y') | int > 2024 }}") == "True"
    assert one("a {%- generation %} b{% set x = 1 %} {%- endgeneration %} c") == "a b c"


def test_tools_and_documents_are_none_when_there_are_none() -> None:
    assert one("{{ tools is none and documents is none }}") == "True"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Only users, please.') }}", "refuses these messages: Only users, please."),
        ("{{ missing.field.deeper }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ {}.pop('key') }}", "KeyError: 'key'"),
        ("{{ messages[0].pop('role') }}", "'pop' on a list or an object of the request, which is unsafe"),
        ("{{ '{a}'.format_map({}) }}", "KeyError: 'a'"),
        ("{{ messages[0].content.encode('latin-1').decode('utf-16') }}", "UnicodeDecodeError"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError|Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '%d' | format('x') }}", "TypeError"),
        ("{{ missing | tojson }}", "not JSON serializable"),
    ],
)
def test_any_failure_inside_is_told_in_its_words(source: str, words: str) -> None:
    with pytest.raises(TemplateFailed, match=words) as caught:
        one(source)
    assert caught.value.param == "messages"


def test_a_template_may_change_the_lists_and_objects_that_it_made_itself() -> None:
    made = "{% set own = [] %}{% for m in messages %}{% set _ = own.append(m.content) %}{% endfor %}"
    count = "{% set seen = {'n': 0} %}{% set _ = seen.update({'n': own | length}) %}"

    assert (
        one(made + count + "{{ own.pop(0) }} {{ own }} {{ seen.n }} {{ own.extend(messages[:1]) }}{{ own | length }}")
        == "a [] 1 None1"
    )


@pytest.mark.parametrize(
    "change",
    [
        "messages.append(1)",
        "messages.clear()",
        "messages[0].update({'role': 'system'})",
        "messages[0].content.append('x')",
        "tools[0].function.parameters.pop('type')",
        "tools[0].function.parameters.enum.remove('a')",
        "given.append(1)",
        "(messages | list)[0].pop('role')",
        "messages[0:][0].setdefault('name', 'x')",
    ],
)
def test_what_was_handed_to_a_template_stays_as_it_is(change: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "enum": ["a"]}}}]
    values: dict[str, Any] = {"tools": tools, "given": [2]}

    with pytest.raises(TemplateFailed, match="of the request, which is unsafe"):
        ChatTemplate(f"{{{{ {change} }}}}", {}).render(messages, **values)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert (tools[0]["function"]["parameters"], values["given"]) == ({"type": "object", "enum": ["a"]}, [2])  # type: ignore[index]


def test_a_template_says_which_variables_it_reads() -> None:
    source = (
        "{% set own = 1 %}{% for m in messages %}{{ m.content }}{{ own }}{% endfor %}{{ enable_thinking }}{{ raise_exception }}"
    )

    assert ChatTemplate(source, {}).variables == {"messages", "enable_thinking"}
    assert ChatTemplate(source, {}, tool_use="{{ tools }}").variables == {"messages", "enable_thinking", "tools"}


def test_a_variable_may_have_the_name_of_a_python_argument() -> None:
    assert ChatTemplate("{{ x }}", {}).render([], self=1, messages=2, x=3) == "3"


def test_the_template_for_tools_is_used_with_tools() -> None:
    both = ChatTemplate("plain", {}, tool_use="{{ tools | length }} tools")

    assert both.render([], tools=[TOOL]) == "1 tools"
    assert both.render([], tools=None) == both.render([], tools=[]) == both.render([]) == "plain"


def folder_with(folder: Path, **files: Any) -> ChatTemplate | None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return ChatTemplate.of(folder)


def test_the_file_of_its_own_wins_over_the_older_places(tmp_path: Path) -> None:
    steps = [("tokenizer_config_json", {"chat_template": "config", "bos_token": {"content": "<s>"}})]
    steps += [("chat_template_json", {"chat_template": "json {{ bos_token }}"})]

    found = [folder_with(tmp_path, **dict([step])) for step in steps]
    found.append(folder_with(tmp_path, chat_template_jinja="jinja"))

    assert [template.render([]) for template in found if template] == ["config", "json <s>", "jinja"]


def test_named_templates_come_in_a_list_or_in_files(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "x"},
    ]
    template = folder_with(tmp_path, tokenizer_config_json={"chat_template": named})
    assert template is not None
    assert (template.render([]), template.render([], tools=[TOOL])) == ("plain", "tools")

    template = folder_with(tmp_path, additional_chat_templates__tool_use_jinja="tools from a file")
    assert template is not None
    assert (template.render([]), template.render([], tools=[TOOL])) == ("plain", "tools from a file")


def test_a_model_without_a_default_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.of(tmp_path) is None
    assert folder_with(tmp_path, tokenizer_config_json={"chat_template": [{"name": "rag", "template": "x"}]}) is None
    assert folder_with(tmp_path, tokenizer_config_json={"chat_template": None}) is None


def test_every_special_token_of_the_model_can_be_read(tmp_path: Path) -> None:
    settings = {"eos_token": "</s>", "image_token": {"content": "<image>"}, "add_bos_token": True, "pad_token": None}
    source = "{{ eos_token }}{{ image_token }}{{ add_bos_token is defined }}{{ pad_token is defined }}"

    template = folder_with(tmp_path, tokenizer_config_json=settings, chat_template_jinja=source)

    assert template is not None
    assert template.render([]) == "</s><image>FalseFalse"


@pytest.mark.parametrize("content", ["{", "[]", {"chat_template": [{"name": "default"}]}, {"chat_template": ["x"]}])
def test_files_that_can_not_be_read_are_named(tmp_path: Path, content: Any) -> None:
    with pytest.raises(BadModel, match=r"tokenizer_config\.json is not|chat_template is a list"):
        folder_with(tmp_path, tokenizer_config_json=content)


def test_an_unknown_filter_is_a_broken_template() -> None:
    with pytest.raises(BadModel, match="line 2: No filter named 'shout'"):
        ChatTemplate("a\n{{ a | shout }}", {})
