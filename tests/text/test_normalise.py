"""What agents send, written down by templates of every kind: the prompt is right, or the request is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InvalidRequest, TemplateFailed, UnsupportedParameter
from weft.model.resolve import TINY_HYBRID
from weft.text.normalise import PromptWriter, normalise
from weft.text.template import Capabilities, ChatTemplate
from weft.text.types import Conversation, LateSystem, Message, ToolCall

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"

# What a template itself takes back from earlier turns once the user has spoken again, or moves to the latest question.
FORGETS = {
    "qwen3.5": r"<think>\n.*?\n</think>\n\n",
    "tiny-hybrid": r"<think>\n.*?\n</think>\n\n",
    "glm": r"<think>.*?</think>",
    "lfm2": r"<think>.*?</think>",
    "gpt-oss": r"<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*?<\|end\|>",
    "mistral": r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]",
}


@cache
def writer(name: str, late_system: LateSystem = "fold") -> PromptWriter:
    template = ChatTemplate(FILES[name].read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
    return PromptWriter(template, late_system)


# Every text a conversation has is marked with a word in double brackets, which no template writes by itself.


def system(text: Any) -> Message:
    return Message("system", text)


def developer(text: Any) -> Message:
    return Message("developer", text)


def user(text: Any) -> Message:
    return Message("user", text)


def assistant(text: Any, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning, calls)


def tool(text: Any, call_id: str = "call_7f3a2b") -> Message:
    return Message("tool", text, tool_call_id=call_id)


def read(path: str, call_id: str = "call_7f3a2b") -> ToolCall:
    return ToolCall("read", json.dumps({"path": path, "lines": [1, 2]}), call_id)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = (function("read", description="Reads a file.", parameters=PATH), function("stop"))

ONE_CALL = (system("[[s]]"), user("[[u]]"), assistant(None, read("[[a]]")), tool("[[t]]"))

CHATS = {
    "a system message and a question": (system("[[s]]"), user("[[u]]")),
    "a developer's message": (developer("[[d]]"), user("[[u]]")),
    "developer and system side by side": (developer("[[d]]"), system("[[s]]"), user("[[u]]")),
    "a late system message": (system("[[s]]"), user("[[u]]"), assistant("[[b]]"), system("[[l]]"), user("[[v]]")),
    "late system messages in a row": (user("[[u]]"), assistant("[[b]]"), system("[[l]]"), developer("[[m]]"), user("[[v]]")),
    "a system message before the answer": (user("[[u]]"), system("[[l]]"), assistant("[[b]]"), user("[[v]]")),
    "a system message at the end": (system("[[s]]"), user("[[u]]"), assistant("[[b]]"), user("[[v]]"), system("[[l]]")),
    "no user": (system("[[s]]"),),
    "two users in a row": (system("[[s]]"), user("[[u]]"), user("[[v]]")),
    "two answers in a row": (user("[[u]]"), assistant("[[b]]"), assistant("[[c]]"), user("[[v]]")),
    "an answer first": (assistant("[[b]]"), user("[[u]]")),
    "parts": (system(parts("[[s]]", "[[r]]")), user(parts("[[u]]", "[[w]]")), assistant(parts("[[b]]", "[[c]]")), user("[[v]]")),
    "parts beside a text": (user(parts("[[u]]", "[[w]]")), user("[[v]]")),
    "emoji": (system("[[s]] Grüß Gott"), user("[[u]] 👩‍👩‍👧 日本語 \u2028 end"), assistant("[[b]] 🙂"), user("[[v]] ✓")),
    "blank lines and code": (user('  [[u]]\n\n\n  if a["b"] == "\\n":\n\treturn \\ \n\n[[w]]  '),),
    "past thinking": (user("[[u]]"), assistant("[[b]]", reasoning="[[?r]]"), user("[[v]]")),
    "past thinking in the text": (user("[[u]]"), assistant("<think>\n[[?r]]\n</think>\n\n[[b]]"), user("[[v]]")),
    "an empty system message": (system(""), user("[[u]]")),
}
AGENTS = {
    "tools": (system("[[s]]"), user("[[u]]")),
    "a call with null content": ONE_CALL,
    "a call with words": (system("[[s]]"), user("[[u]]"), assistant("[[?b]]", read("[[a]]")), tool("[[t]]")),
    "a call with thinking": (user("[[u]]"), assistant(None, read("[[a]]"), reasoning="[[?r]]"), tool("[[t]]")),
    "a call with thinking and words": (user("[[u]]"), assistant("[[?b]]", read("[[a]]"), reasoning="[[?r]]"), tool("[[t]]")),
    "a tool that says nothing": (user("[[u]]"), assistant("", read("[[a]]")), tool(None), assistant("[[b]]"), user("[[v]]")),
    "a tool that answers in parts": (user("[[u]]"), assistant(None, read("[[a]]")), tool(parts("[[t]]", "[[w]]"))),
    "a tool that answers in colour": (
        user("[[u]]"),
        assistant(None, read("[[a]]")),
        tool('[[t]] \x1b[31m"red"\x1b[0m\n\\n 🙂 [[w]]'),
    ),
    "two calls at once": (
        user("[[u]]"),
        assistant(None, read("[[a]]"), read("[[c]]", "call_2")),
        tool("[[t]]"),
        tool("[[w]]", "call_2"),
    ),
    "two calls one after the other": (*ONE_CALL, assistant(None, read("[[c]]", "call_2")), tool("[[w]]", "call_2")),
    "a call without arguments": (user("[[u]]"), assistant(None, ToolCall("stop", "", "call_7f3a2b")), tool("[[t]]")),
    "a late system message, then tools": (
        *(system("[[s]]"), user("[[u]]"), assistant("[[b]]"), system("[[l]]"), user("[[v]]")),
        *(assistant(None, read("[[a]]")), tool("[[t]]")),
    ),
    "a system message after a result": (*ONE_CALL, system("[[l]]")),
    "a system message after a result, and an answer": (*ONE_CALL, system("[[l]]"), assistant("[[b]]"), user("[[v]]")),
    "a user after a result": (*ONE_CALL, user("[[v]]")),
    "a second question": (*ONE_CALL, assistant("[[b]]"), user("[[v]]")),
    "a second question with thinking": (
        *(user("[[u]]"), assistant(None, read("[[a]]"), reasoning="[[?r]]"), tool("[[t]]")),
        *(assistant("[[b]]", reasoning="[[?q]]"), user("[[v]]")),
    ),
}
CONVERSATIONS = {name: Conversation(messages) for name, messages in CHATS.items()} | {
    name: Conversation(messages, TOOLS) for name, messages in AGENTS.items()
}

NO_TOOLS = "no place for tool"
ALTERNATE = "must alternate"
# Every pair of template and conversation that is refused, with the words that say why. All others must give a prompt.
REFUSED: dict[str, dict[str, str]] = {
    "qwen3.5": {"no user": "No user query found"},
    "tiny-hybrid": {"no user": "No user query found"},
    "gemma2": dict.fromkeys(AGENTS, NO_TOOLS) | {"no user": "System role not supported", "an answer first": ALTERNATE},
    "gemma3": dict.fromkeys(AGENTS, NO_TOOLS) | {"no user": "leaves out", "an answer first": ALTERNATE},
    "mistral": {"an answer first": ALTERNATE},
    "chatml": dict.fromkeys(AGENTS, NO_TOOLS),
    "parts-only": dict.fromkeys(AGENTS, NO_TOOLS),
}


def markers(messages: tuple[Message, ...]) -> list[str]:
    """The marks of all that was said, in order. Those with a question mark may be dropped by a template."""
    return [mark for message in messages for mark in re.findall(r"\[\[.+?\]\]", str(message.content))]


def others(messages: tuple[Message, ...]) -> list[str]:
    calls = [call.arguments for message in messages for call in message.tool_calls]
    return re.findall(r"\[\[.+?\]\]", str(calls) + str([message.reasoning for message in messages]))


def check(prompt: str, conversation: Conversation) -> None:
    """Everything said is there once and in its order; nothing is there that nobody said."""
    said = [mark for mark in markers(conversation.messages) if "?" not in mark]
    assert re.findall(r"\[\[[^?]+?\]\]", strip_arguments(prompt, conversation)) == said
    for mark in set(markers(conversation.messages) + others(conversation.messages)):
        assert prompt.count(mark) <= 1 if "?" in mark else prompt.count(mark) == 1
    assert "None" not in prompt
    assert '\\"path' not in prompt  # arguments encoded twice
    assert "{'path" not in prompt  # arguments as Python prints them


def strip_arguments(prompt: str, conversation: Conversation) -> str:
    for mark in others(conversation.messages):
        prompt = prompt.replace(mark, "")
    return prompt


@pytest.mark.parametrize("chat", CONVERSATIONS)
@pytest.mark.parametrize("name", FILES)
def test_every_conversation_gives_a_right_prompt_or_is_refused_with_a_reason(name: str, chat: str) -> None:
    if words := REFUSED.get(name, {}).get(chat):
        with pytest.raises(InvalidRequest, match=words):
            writer(name).write(CONVERSATIONS[chat])
    else:
        check(writer(name).write(CONVERSATIONS[chat]), CONVERSATIONS[chat])


WRITTEN = [(name, chat) for name in FILES for chat in CONVERSATIONS if chat not in {*REFUSED.get(name, {}), "no user"}]
ANSWER, NEXT = assistant("[[answer]]"), user("[[next]]")


@pytest.mark.parametrize(("name", "chat"), WRITTEN)
def test_appending_turns_does_not_change_what_stands_before(name: str, chat: str) -> None:
    """The prompt is the beginning of the next one, once what the template itself forgets is taken out of both.

    What that is for each template stands in FORGETS: past thinking, and tools that stand before the latest question.
    """
    conversation = replace(CONVERSATIONS[chat], add_generation_prompt=False)

    before, after = before_and_after(name, conversation)

    assert after.startswith(before)


def before_and_after(name: str, conversation: Conversation) -> tuple[str, str]:
    """The prompt without the header of an answer, and that of the next turn, both without what the template forgets."""
    prompts = [
        writer(name).write(replace(conversation, messages=(*conversation.messages, *more))) for more in ((), (ANSWER, NEXT))
    ]
    before, after = (re.sub(FORGETS.get(name, r"(?!)"), "", prompt, flags=re.DOTALL) for prompt in prompts)
    return before, after


def test_a_reminder_after_a_result_does_not_make_the_template_forget_its_thinking() -> None:
    loop = Conversation(
        (user("a"), assistant(None, read("b"), reasoning="[[why]]"), tool("c")), TOOLS, add_generation_prompt=False
    )
    reminded = replace(loop, messages=(*loop.messages, system("[[l]]")))

    prompt = writer("qwen3.5").write(reminded)

    assert prompt.startswith(writer("qwen3.5").write(loop).removesuffix("\n</tool_response><|im_end|>\n"))
    assert "[[why]]" in prompt
    assert prompt.endswith("c\n\n<system-reminder>\n[[l]]\n</system-reminder>\n</tool_response><|im_end|>\n")


# What is known of the families, by the shapes that agents send.
FACTS: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "developer": False,
        "late_system": False,
        "arguments": {"object"},
        "user_after_tool": False,
    },
    "qwen3-coder": {"developer": False, "late_system": True, "parts": set(), "arguments": {"object"}},
    "gemma2": {"system": False, "repeats": set(), "tools": False, "arguments": set()},
    "gemma3": {"system": True, "late_system": False, "repeats": set(), "parts": {"user", "assistant"}},
    "gemma4": {"late_system": True, "arguments": {"object", "text"}, "repeats": {"user", "assistant"}},
    "mistral": {"late_system": False, "repeats": set(), "any_call_id": False, "user_after_tool": False, "parts": {"user"}},
    "llama3": {"several_calls": False, "arguments": {"object"}, "late_system": True},
    "gpt-oss": {
        "developer": True,
        "late_system": False,
        "bare_tools": False,
        "several_calls": False,
        "text_and_reasoning": False,
        "reasoning_key": "thinking",
        "user_after_tool": True,
    },
    "glm": {"developer": False, "late_system": True, "arguments": {"object"}, "reasoning_key": "reasoning_content"},
    "chatml": {"developer": False, "late_system": True, "tools": False, "arguments": set()},
    "deepseek": {"developer": False, "late_system": False, "arguments": {"text"}, "parts": set()},
    "parts-only": {"developer": False, "text": set(), "parts": {"system", "user", "assistant"}},
    "lfm2": {"reasoning_key": "thinking", "late_system": True, "arguments": {"object"}, "several_calls": True},
    "tiny-hybrid": {"developer": True, "late_system": False, "arguments": {"object", "text"}},
}


@pytest.mark.parametrize("name", FILES)
def test_probing_finds_what_a_template_does(name: str) -> None:
    found = writer(name).capabilities

    assert {fact: getattr(found, fact) for fact in FACTS[name]} == FACTS[name]


@pytest.mark.parametrize("source", ["", "{{ 1 / 0 }}", "{{ raise_exception('never') }}", "{{ messages[0].content.x.y }}"])
def test_probing_never_raises(source: str) -> None:
    capabilities = Capabilities(ChatTemplate(source, {}))

    assert capabilities.text == capabilities.parts == capabilities.arguments == frozenset()
    assert not capabilities.system
    assert not capabilities.tools


CALLS = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"


def each(source: str) -> PromptWriter:
    return PromptWriter(ChatTemplate("{% for m in messages %}" + source + "{% endfor %}", {}))


def test_a_template_that_drops_a_message_is_found_out() -> None:
    silent = PromptWriter(ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {}))

    with pytest.raises(TemplateFailed, match=r"leaves out what messages\[1\] \(role assistant\) says") as caught:
        silent.write(Conversation((user("a"), assistant("[[b]]"), user("c"))))
    assert caught.value.param == "messages[1]"


def test_the_same_words_twice_must_be_there_twice() -> None:
    once = PromptWriter(ChatTemplate("{% for m in messages | unique(attribute='content') %}{{ m.content }}\n{% endfor %}", {}))

    assert once.write(Conversation((user("yes"), user("no")))) == "yes\nno\n"
    with pytest.raises(TemplateFailed, match=r"messages\[2\]"):
        once.write(Conversation((user("yes"), user("no"), user("yes"))))


def test_results_may_be_written_in_the_order_of_their_calls() -> None:
    calls = "{% for m in messages if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% endfor %}"
    results = (
        "{% for m in messages | selectattr('role', 'eq', 'tool') | sort(attribute='tool_call_id') %}({{ m.content }}){% endfor %}"
    )
    crossed = (user("a"), assistant(None, read("b", "1"), read("c", "2")), tool("[[second]]", "2"), tool("[[first]]", "1"))

    prompt = PromptWriter(ChatTemplate(calls + results, {})).write(Conversation(crossed))

    assert prompt.endswith("([[first]])([[second]])")


def test_a_switch_for_thinking_that_the_template_takes_out_is_not_missed() -> None:
    source = "{% for m in messages %}{{ m.content | replace('/no_think', '') }}\n{% endfor %}"

    prompt = PromptWriter(ChatTemplate(source, {})).write(Conversation((system("Be brief. /no_think"), user("a"))))

    assert prompt == "Be brief. \na\n"


def turns(name: str, *messages: Message, late_system: LateSystem = "fold") -> list[dict[str, Any]]:
    return normalise(Conversation(messages), writer(name).capabilities, late_system)


def test_developer_and_system_at_the_front_become_one_system_turn() -> None:
    assert turns("qwen3.5", developer("a"), system("b"), user("c"), user("d")) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert turns("gpt-oss", developer("a"), system("b"), user("c"))[0] == {"role": "developer", "content": "a\n\nb"}


def test_parts_at_the_front_stay_parts_where_the_template_takes_them() -> None:
    mixed = [system("a"), system(parts("b", "c")), user("d")]

    assert turns("qwen3.5", *mixed)[0]["content"] == parts("a", "\n\n", "b", "c")
    assert turns("gpt-oss", *mixed)[0]["content"] == "a\n\nb\nc"


def test_neighbours_are_merged_only_where_the_template_demands_it() -> None:
    said = [user("a"), user("b"), assistant("c"), assistant("d")]

    assert [turn["content"] for turn in turns("qwen3.5", *said)] == ["a", "b", "c", "d"]
    assert [turn["content"] for turn in turns("gemma2", *said)] == ["a\n\nb", "c\n\nd"]


def test_parts_are_not_merged_with_a_text_where_the_template_takes_both() -> None:
    assert [turn["content"] for turn in turns("qwen3.5", user(parts("a")), user("b"))] == [parts("a"), "b"]
    assert [turn["content"] for turn in turns("mistral", user(parts("a")), user("b"))] == [parts("a", "\n\n", "b")]
    assert [turn["content"] for turn in turns("gemma2", user(parts("a", "b")), user("c"))] == ["a\nb\n\nc"]


def test_merged_answers_keep_their_thinking_and_calls() -> None:
    both = "{% if not loop.first and loop.previtem.role == m.role %}{{ raise_exception('twice') }}{% endif %}{{ m.content }}"
    said = (user("a"), assistant("b", reasoning="r"), assistant("c", read("d"), reasoning="s"), tool("e"))
    merged = normalise(Conversation(said), each(both + CALLS + "|").capabilities)[1]

    assert merged["content"] == "b\n\nc"
    assert merged["reasoning_content"] == "r\n\ns"
    assert merged["tool_calls"][0]["function"] == {"name": "read", "arguments": {"path": "d", "lines": [1, 2]}}


ONE_PART = (  # as MiniMax-Text-01's: of a user's parts it prints the first
    "{% if m.role == 'assistant' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content[0]['text'] }}{% endif %}|"
)


def test_a_content_is_one_part_where_the_template_prints_no_more() -> None:
    first = each(ONE_PART)
    said = (system("[[s]]"), user(parts("[[u]]", "[[v]]")), assistant("[[b]]"), user("[[w]]"))

    assert first.capabilities.only_parts == {"system", "user", "assistant"}
    assert first.write(Conversation(said)) == "[[s]]|[[u]]\n[[v]]|[[b]]|[[w]]|"
    assert first.write(continued(*said[:3])).endswith("[[b]]")


def test_why_a_template_has_no_place_for_calls_is_said() -> None:
    reasons = {
        "{{ m.content }}": "no place for tool calls: it leaves them out",
        "{{ m.content }}{{ messages.append(1) if m.tool_calls }}": "tool calls: .* 'append' on a list .* is unsafe",
        "{{ m.content }}{{ raise_exception('No calls!') if m.tool_calls }}": "tool calls: .*No calls!",
    }
    for source, words in reasons.items():
        with pytest.raises(UnsupportedParameter, match=words):
            each(source).write(Conversation((user("a"), assistant(None, read("b")), tool("c"))))


def test_a_late_system_message_is_hoisted_only_when_asked_for() -> None:
    said = [user("a"), assistant("b"), system("c"), user("d")]
    hoisted = [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]

    assert turns("qwen3.5", *said)[-1]["content"] == "<system-reminder>\nc\n</system-reminder>\n\nd"
    assert turns("qwen3-coder", *said)[2] == {"role": "system", "content": "c"}
    assert turns("qwen3.5", *said, late_system="hoist")[:2] == hoisted
    assert turns("qwen3-coder", *said, late_system="hoist")[:2] == hoisted


def test_an_empty_reminder_is_no_reminder() -> None:
    assert turns("qwen3.5", user("a"), assistant("b"), system(""), user("c"))[-1] == {"role": "user", "content": "c"}


def test_a_user_is_never_made_up() -> None:
    assert [turn["role"] for turn in turns("gemma2", system("a"))] == ["system"]
    assert [turn["role"] for turn in turns("qwen3.5", system("a"), assistant("b"), system("c"))] == [
        "system",
        "assistant",
        "system",
    ]


def test_call_ids_are_shortened_alike_in_call_and_result_where_the_template_wants_nine_letters() -> None:
    call, result = turns("mistral", user("a"), assistant(None, read("b", "call_0123456789")), tool("c", "call_0123456789"))[1:]

    assert re.fullmatch(r"[0-9a-f]{9}", result["tool_call_id"])
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert turns("mistral", user("a"), assistant(None, read("b", "abc123XYZ")))[1]["tool_calls"][0]["id"] == "abc123XYZ"
    assert (
        turns("qwen3.5", user("a"), assistant(None, read("b", "call_0123456789")))[1]["tool_calls"][0]["id"] == "call_0123456789"
    )


def test_empty_content_is_left_out_where_the_template_takes_content_or_calls_but_not_both() -> None:
    both = "{% if m.tool_calls is defined and m.content is defined %}{{ raise_exception('both') }}{% endif %}"
    strict = each(both + "{{ m.content }}" + CALLS)

    assert strict.capabilities.no_content == "absent"
    assert '{"name": "read"' in strict.write(Conversation((user("a"), assistant(None, read("b")), tool("c"))))
    assert 'words{"name": "read"' in strict.write(Conversation((user("a"), assistant("words", read("b")), tool("c"))))


def test_null_is_not_handed_over_where_it_would_be_printed() -> None:
    filled = each("{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}{{ m.content }}" + CALLS)

    assert filled.write(Conversation((user("a"), assistant(None, read("b")), tool("c")))).startswith('a{"name": "read"')


def test_content_is_null_where_the_template_takes_nothing_else_for_a_call() -> None:
    early = each("{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}")

    assert early.capabilities.no_content == "null"
    assert '{"name": "read"' in early.write(Conversation((user("a"), assistant("", read("b")), tool("c"))))
    # It drops a call that has words beside it.
    assert 'words{"name": "read"' in early.write(Conversation((user("a"), assistant("words", read("b")), tool("c"))))


def test_a_system_message_that_the_template_would_carry_along_stays_in_the_first_question() -> None:
    carried = "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}/{% endif %}"
    latest = each(carried + "{% if m.role != 'system' %}{{ m.content }}|{% endif %}")

    assert latest.write(Conversation((system("s"), user("a"), assistant("b"), user("c")))) == "s\n\na|b|c|"


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_where_a_text_will_do_and_named_where_not(arguments: str) -> None:
    said = (user("a"), assistant(None, ToolCall("read", arguments, "call_1")), tool("b", "call_1"))

    assert arguments in writer("tiny-hybrid").write(Conversation(said))
    assert arguments in writer("deepseek").write(Conversation(said))
    with pytest.raises(InvalidRequest, match="is not a JSON object") as caught:
        writer("qwen3.5").write(Conversation(said))
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_part_that_is_not_text_is_refused_by_its_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}

    with pytest.raises(UnsupportedParameter, match=r"messages\[1\]\.content\[1\] is of type 'image_url'") as caught:
        writer("qwen3.5").write(Conversation((system("a"), user([*parts("b"), image]))))
    assert caught.value.param == "messages[1].content[1]"


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        writer("chatml").write(Conversation(()))


def test_half_a_character_is_refused() -> None:
    call = ToolCall("read", '{"path": "\\ud83d"}', "call_1")

    with pytest.raises(InvalidRequest, match="lone surrogate"):
        writer("qwen3.5").write(Conversation((user("a"), assistant(None, call), tool("b", "call_1"))))


def test_what_a_tool_lacks_is_filled_in_only_where_the_template_needs_it() -> None:
    conversation = Conversation((user("a"),), (function("stop", description=None),))

    assert 'type stop = (_: {"type": "object", "properties": {}})' in writer("gpt-oss").write(conversation)
    assert '{"type": "function", "function": {"name": "stop"}}' in writer("qwen3.5").write(conversation)


def test_a_client_sets_variables_of_the_template_but_not_ours() -> None:
    conversation = Conversation((user("a"),), template_kwargs={"enable_thinking": False})

    assert writer("qwen3.5").write(conversation).endswith("<think>\n\n</think>\n\n")
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match=f"may not set {name}") as caught:
            writer("qwen3.5").write(replace(conversation, template_kwargs={name: []}))
        assert caught.value.param == "chat_template_kwargs"


def continued(*messages: Message) -> Conversation:
    return Conversation(messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("text", ["The answer is ", "end", "e", "🙂", ""])
@pytest.mark.parametrize("name", FILES)
def test_an_answer_begun_is_gone_on_with_right_after_its_text(name: str, text: str) -> None:
    begun = writer(name).write(continued(user("a"), assistant(text)))
    whole = writer(name).write(Conversation((user("a"), assistant(text + "and on")), add_generation_prompt=False))

    assert begun.endswith(text)
    assert whole.startswith(begun + "and on")


def test_parts_are_gone_on_with_after_the_last() -> None:
    begun = writer("qwen3.5").write(continued(user("a"), assistant(parts("b", "c"))))

    assert begun.endswith("\n</think>\n\nbc")


def test_what_can_not_be_continued_is_refused() -> None:
    for messages in [(user("a"),), (), (user("a"), assistant("b", read("c")))]:
        with pytest.raises(InvalidRequest, match="needs a last message of role assistant"):
            writer("chatml").write(continued(*messages))
    with pytest.raises(InvalidRequest, match="set one of them to false"):
        writer("chatml").write(replace(continued(user("a"), assistant("b")), add_generation_prompt=True))
    with pytest.raises(TemplateFailed, match="leaves out the message that is to be continued"):
        PromptWriter(ChatTemplate("{{ messages[0].content }}", {})).write(continued(user("a"), assistant("b")))


def test_the_template_for_tools_is_probed_for_itself() -> None:
    plain = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    without_system = "{{ tools | tojson }}{% for m in messages if m.role == 'user' %}({{ m.content }}){% endfor %}"
    both = PromptWriter(ChatTemplate(plain, {}, without_system))

    assert both.write(Conversation((system("a"), user("b")))) == "[system: a][user: b]"
    assert both.write(Conversation((system("a"), user("b")), TOOLS)).endswith("](a\n\nb)")


# Agent-shaped conversations at large.


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    count = iter(range(1000))

    def text(may_drop: bool = False) -> str:
        around = st.sampled_from(
            ["", " ", "\n", " \n\n", "🙂", '"', "\\", "\\n", "{", "'", "\x1b[1m", "<b>", "日本", "\t", "of it"]
        )
        return draw(around) + f"[[{'?' if may_drop else ''}{next(count)}]]" + draw(around)

    def content(empty: bool = False) -> str | list[dict[str, Any]] | None:
        kind = draw(st.sampled_from(["text", "text", "text", "parts", *(["null", ""] if empty else [])]))
        if kind == "parts":
            return parts(*(text() for _ in range(draw(st.integers(1, 2)))))
        return text() if kind == "text" else None if kind == "null" else ""

    def maybe(make: Any, among: int = 3) -> list[Message]:
        return [make()] if draw(st.integers(1, among)) == 1 else []

    def late() -> list[Message]:
        return maybe(lambda: Message(draw(st.sampled_from(["system", "developer"])), content()), 4)

    def step() -> list[Message]:
        ids = [f"call_{next(count)}" for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
        words = draw(st.sampled_from([None, "", text(may_drop=True)]))
        thoughts = draw(st.sampled_from([None, text(may_drop=True)]))
        return [
            assistant(words, *(read(text(), one) for one in ids), reasoning=thoughts),
            *(tool(content(True), one) for one in ids),
        ]

    messages = [Message(draw(st.sampled_from(["system", "developer"])), content()) for _ in range(draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(content()), *maybe(lambda: user(content()), 5), *late()]
        for _ in range(draw(st.integers(0, 2))):
            messages += [*step(), *late()]
        messages += [assistant(content(), reasoning=draw(st.sampled_from([None, text(may_drop=True)]))), *late()]
    if draw(st.booleans()) and messages[-1].role == "assistant":
        messages.pop()  # an answer is due
    return Conversation(tuple(messages), draw(st.sampled_from([(), TOOLS])))


@pytest.mark.parametrize("late_system", ["fold", "hoist"])
@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25)
@given(conversation=conversations())
def test_any_conversation_is_written_whole_or_refused(name: str, late_system: LateSystem, conversation: Conversation) -> None:
    try:
        prompt = writer(name, late_system).write(conversation)
    except InvalidRequest:
        return
    if late_system == "hoist":
        front = [message for message in conversation.messages if message.role in ("system", "developer")]
        rest = [message for message in conversation.messages if message not in front]
        conversation = replace(conversation, messages=(*front, *rest))
    check(prompt, conversation)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=20)
@given(conversation=conversations())
def test_any_prompt_is_the_beginning_of_the_next(name: str, conversation: Conversation) -> None:
    if conversation.messages[-1].role == "assistant":
        return  # two answers in a row: nothing was asked between them
    try:
        before, after = before_and_after(name, replace(conversation, add_generation_prompt=False))
    except InvalidRequest:
        return

    assert after.startswith(before)


def test_a_result_stays_with_its_call_when_a_reminder_comes_between() -> None:
    between = turns("gpt-oss", user("a"), assistant(None, read("b")), system("c"), tool("d"), assistant("e"), user("f"))

    assert [turn["role"] for turn in between] == ["user", "assistant", "tool", "user", "assistant", "user"]
    assert between[3]["content"] == "<system-reminder>\nc\n</system-reminder>"
