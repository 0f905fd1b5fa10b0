"""Templates that count the tools wherever the variable is there, or write them beside a system message alone, are served."""

from __future__ import annotations

import pytest

from weft.errors import TemplateFailed
from weft.text.normalise import PromptWriter
from weft.text.template import ChatTemplate
from weft.text.types import Conversation, Message

COUNTING = "{% if tools is defined and tools | length > 0 %}T{% endif %}"
LISTED = "{% for t in tools %}{{ t.function.name }};{% endfor %}"
# As FunctionGemma's: tools are counted, and written behind the instructions.
IN_SYSTEM = (
    COUNTING + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'system' and tools is defined %}"
    "{% if tools | length > 0 %} " + LISTED + "{% endif %}{% endif %}|{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "zqlook", "description": "d", "parameters": {"type": "object"}}}
SYSTEM, QUESTION = Message("system", "zqsystem"), Message("user", "zqquestion")


def writer(source: str) -> PromptWriter:
    return PromptWriter(ChatTemplate(source, {}))


@pytest.mark.parametrize("source", [IN_SYSTEM, COUNTING + "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"])
def test_a_template_that_refuses_tools_of_none_is_rendered_without_the_variable(source: str) -> None:
    assert writer(source).write(Conversation((SYSTEM, QUESTION))) == "<system>zqsystem|<user>zqquestion|"
    assert writer(source).write(Conversation((QUESTION,))) == "<user>zqquestion|"


def test_what_a_template_refuses_without_the_variable_too_is_refused_with_its_first_words() -> None:
    refusing = "{% if tools is defined %}{{ raise_exception('first') }}{% else %}{{ raise_exception('second') }}{% endif %}"

    with pytest.raises(TemplateFailed, match="first"):
        ChatTemplate(refusing, {}).render([{"role": "user", "content": "a"}])


def test_tools_that_stand_behind_the_instructions_are_written_without_instructions_too() -> None:
    assert writer(IN_SYSTEM).write(Conversation((QUESTION,), (TOOL,))) == "T<system> zqlook;|<user>zqquestion|"
    assert writer(IN_SYSTEM).write(Conversation((SYSTEM, QUESTION), (TOOL,))) == "T<system>zqsystem zqlook;|<user>zqquestion|"


def test_no_system_message_is_added_where_tools_need_none() -> None:
    plain = LISTED.replace("in tools", "in tools or []") + "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"

    assert writer(plain).write(Conversation((QUESTION,), (TOOL,))) == "zqlook;<user>zqquestion|"
