"""A text beside tool calls stays in the prompt, in its turn or in one of its own, however the client spells it."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from weft.model.resolve import TINY_HYBRID
from weft.text.normalise import PromptWriter
from weft.text.template import ChatTemplate
from weft.text.types import Conversation, Message, ToolCall

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"
NAMES = ("look", "read", "find")
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
)
LOOP = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
# Users and answers take turns; turns of calls and their results are not counted.
TURNS = (
    "{% set ns = namespace(count=0) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% endfor %}"
)
STRICT = "{% if not loop.first and loop.previtem.role == m.role %}{{ raise_exception('must alternate') }}{% endif %}"
EITHER = "[{{ m.role }}]{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
# Shapes that templates of the wild have, in their shortest form.
SHAPES = {
    "calls instead of a text": LOOP + EITHER,
    "one call instead of a text": LOOP + "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('only one') }}"
    "{% endif %}" + EITHER,
    "a text instead of calls": LOOP + "[{{ m.role }}]{% if m.content %}{{ m.content }}{% else %}" + CALLS
    + "{% endif %}\n{% endfor %}",
    "reasoning beside calls alone": LOOP + "{% if m.tool_calls %}{{ m.reasoning }}{% endif %}" + EITHER,
    "reasoning beside a text too": LOOP + "{{ m.reasoning }}" + EITHER,
    "content or calls": LOOP + "{% if m.tool_calls is defined and m.content is defined %}{{ raise_exception('both') }}{% endif %}"
    + EITHER,
    "a text after its calls, in turns": LOOP + STRICT + "[{{ m.role }}]" + CALLS + "{{ m.content }}\n{% endfor %}",
    "a text before its calls": LOOP + "[{{ m.role }}]{{ m.content }}" + CALLS + "\n{% endfor %}",
}  # fmt: skip
ALTERNATING = {"answers take turns with users": TURNS + LOOP + EITHER, "answers take turns with all": LOOP + STRICT + EITHER}


@cache
def writer(name: str) -> PromptWriter:
    source = (SHAPES | ALTERNATING)[name] if name in SHAPES | ALTERNATING else FILES[name].read_text(encoding="utf-8")
    return PromptWriter(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


WITH_PLACE = [name for name in [*FILES, *SHAPES] if writer(name)._with_tools.arguments]
KEEPING = [name for name in WITH_PLACE if name != "mistral"]
QUESTION, NEXT = Message("user", "zqquestion"), Message("user", "zqnext")


def turn(count: int, number: int, text: str | None, *, apart: bool = False, reasoning: str | None = None) -> tuple[Message, ...]:
    """The messages of one turn of calls and their results; the text beside the calls in a message `apart` if that is asked."""
    calls = tuple(
        ToolCall(NAMES[one], json.dumps({"path": f"zqpath{number}{one}"}), f"call{number}000{one}") for one in range(count)
    )
    results = tuple(Message("tool", f"zqfound{number}{one}", tool_call_id=call.id) for one, call in enumerate(calls))
    if apart and text is not None:
        return (Message("assistant", text, reasoning), Message("assistant", None, tool_calls=calls), *results)
    return (Message("assistant", text, reasoning, calls), *results)


def histories(*, apart: bool = False) -> list[tuple[Message, ...]]:
    """Histories of one or two turns of calls with texts, alone or with an answer and a question after them."""
    made = []
    for first, second in product((1, 2, 3), (0, 1, 2)):
        turns = (*turn(first, 1, "zqtext1", apart=apart), *(turn(second, 2, "zqtext2", apart=apart) if second else ()))
        made += [(QUESTION, *turns), (QUESTION, *turns, Message("assistant", "zqanswer"), NEXT)]
    return made


def words(messages: tuple[Message, ...]) -> list[str]:
    texts = [text for message in messages for text in message.texts if text]
    return texts + [json.loads(call.arguments)["path"] for message in messages for call in message.tool_calls]


@pytest.mark.parametrize("name", [name for name in KEEPING if name != "gpt-oss"])
def test_a_text_beside_calls_is_in_the_prompt_once_behind_what_came_before_it(name: str) -> None:
    for apart in (False, True):
        for messages in histories(apart=apart):
            prompt = writer(name).write(Conversation(messages, TOOLS))
            assert {word: prompt.count(word) for word in words(messages)} == dict.fromkeys(words(messages), 1)
            places = [prompt.find(word) for word in ("zqquestion", "zqtext1", "zqfound10", "zqtext2", "zqfound20", "zqnext")]
            assert [place for place in places if place >= 0] == sorted(place for place in places if place >= 0)


def test_a_text_beside_the_calls_of_a_turn_is_in_the_prompt_that_asks_for_the_answer_where_it_is_thinking_later() -> None:
    for count in (1, 2, 3):
        messages = (QUESTION, *turn(count, 1, "zqtext1"))
        assert writer("gpt-oss").write(Conversation(messages, TOOLS)).count("zqtext1") == 1


@pytest.mark.parametrize("name", [name for name in [*KEEPING, "mistral", *ALTERNATING] if name != "gpt-oss"])
def test_a_text_and_its_calls_give_one_prompt_whether_they_are_one_message_or_two(name: str) -> None:
    for together, apart in zip(histories(), histories(apart=True), strict=True):
        assert writer(name).write(Conversation(together, TOOLS)) == writer(name).write(Conversation(apart, TOOLS))


@pytest.mark.parametrize("name", ["mistral", *ALTERNATING])
def test_where_answers_must_take_turns_and_calls_have_no_text_the_calls_stay(name: str) -> None:
    for messages in histories():
        bare = tuple(Message("assistant", None, tool_calls=one.tool_calls) if one.tool_calls else one for one in messages)
        assert writer(name).write(Conversation(messages, TOOLS)) == writer(name).write(Conversation(bare, TOOLS))


@pytest.mark.parametrize("name", ["reasoning beside calls alone", "reasoning beside a text too"])
def test_the_reasoning_before_a_text_and_its_calls_stays(name: str) -> None:
    prompt = writer(name).write(Conversation((QUESTION, *turn(1, 1, "zqtext1", reasoning="zqthought")), TOOLS))

    assert prompt.count("zqthought") == prompt.count("zqtext1") == prompt.count("zqpath10") == 1
    assert prompt.find("zqthought") < prompt.find("zqpath10")


def test_an_answer_that_is_followed_by_calls_and_is_nowhere_else_is_not_looked_for() -> None:
    for name in ("mistral", *ALTERNATING):
        prompt = writer(name).write(Conversation((QUESTION, *turn(2, 1, "zqtext1", apart=True)), TOOLS))
        assert "zqpath10" in prompt
        assert "zqpath11" in prompt


@pytest.mark.parametrize("name", [*KEEPING, "mistral", *ALTERNATING])
def test_a_history_with_texts_beside_calls_is_the_beginning_of_the_next_prompt(name: str) -> None:
    if name in ("gpt-oss", "mistral"):  # what is thinking, or stands before the last question, moves by the template's own rule
        return
    for messages in histories():
        before = writer(name).write(Conversation(messages, TOOLS, add_generation_prompt=False))
        after = writer(name).write(Conversation((*messages, *turn(1, 3, "zqtext3")), TOOLS, add_generation_prompt=False))
        assert after.startswith(before)
