"""Calls of a history that the chat template leaves out are written in the format in which the model's calls are read."""

from __future__ import annotations

import json
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InvalidRequest
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.normalise import PromptWriter
from weft.text.template import ChatTemplate
from weft.text.tools import CallFormat, read_tools
from weft.text.tools.arguments import decode_json
from weft.text.tools.call_writer import spelling_of
from weft.text.tools.families import FAMILIES
from weft.text.types import CallArguments, CallOpened, Conversation, Message, ToolCall

SPELT = {family.name: family for family in FAMILIES if spelling_of(family) is not None}
NAMES = ("look", "read", "find", "list")
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES)
# As of LFM2, granite 3.3 and GLM 4: tools and results have their places, calls have none.
SOURCE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OBSERVED = SOURCE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text("aé '\"\\\n{}[],=", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab ", min_size=1, max_size=2), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "long_name"]), VALUES, max_size=3)


def writer(source: str, family: str | None) -> PromptWriter:
    made = PromptWriter(ChatTemplate(source, {}))
    made.spelling = spelling_of(SPELT[family]) if family else None
    return made


def turn(count: int, order: tuple[int, ...]) -> tuple[Message, ...]:
    calls = tuple(ToolCall(NAMES[number], json.dumps({"path": f"zqpath{number}"}), f"call_{number}") for number in range(count))
    results = (Message("tool", f"zqfound{number}", tool_call_id=f"call_{number}") for number in order)
    return (Message("user", "zqquestion"), Message("assistant", "zqwords", tool_calls=calls), *results)


@pytest.mark.parametrize("name", SPELT)
@settings(max_examples=40)
@given(called=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_what_is_written_is_read_as_the_same_calls(name: str, called: list[dict[str, Any]]) -> None:
    spelling, family = spelling_of(SPELT[name]), SPELT[name]
    assert spelling is not None
    called = called if spelling.is_several else called[:1]

    text = spelling.write([{"name": "look", "arguments": arguments} for arguments in called])

    found = CallFormat(family, frozenset()).reader(read_tools(TOOLS)).feed(text)
    pieces = [one for one in found if isinstance(one, CallArguments)]
    made = ["".join(one.text for one in pieces if one.index == index) for index in range(len(called))]
    assert [one.name for one in found if isinstance(one, CallOpened)] == ["look"] * len(called)
    assert [decode_json(one) for one in made] == called


@pytest.mark.parametrize("name", ["lfm2", "granite", "hermes", "llama3"])
@pytest.mark.parametrize("source", [SOURCE, OBSERVED])
def test_calls_and_results_of_a_template_without_a_place_for_calls_stand_in_their_order(source: str, name: str) -> None:
    for count in range(1, 5):
        for order in permutations(range(count)):
            messages = (*turn(count, order), Message("user", "zqtext"), *turn(1, (0,))[1:])
            first = writer(source, name).write(Conversation(turn(count, order), TOOLS, add_generation_prompt=False))
            prompt = writer(source, name).write(Conversation(messages, TOOLS, add_generation_prompt=False))

            paths, results = ([first.index(f"zq{kind}{number}") for number in range(count)] for kind in ("path", "found"))
            assert paths == sorted(paths)
            assert results == sorted(results)
            assert all(path < result for path, result in zip(paths, results, strict=True))
            assert first.count("zqwords") == 1
            assert prompt.startswith(first)
            assert (f"<|im_start|>{'tool' if source == SOURCE else 'observation'}\nzqfound0") in first


def test_without_a_known_format_such_calls_are_refused_and_the_cause_is_said() -> None:
    with pytest.raises(InvalidRequest, match="no place for tool calls: it leaves them out"):
        writer(SOURCE, None).write(Conversation(turn(1, (0,)), TOOLS))


def test_the_marks_of_calls_are_control_tokens_and_those_of_clients_are_not(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY_HYBRID / file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(f"{{# calls: <|tool_call_start|>[…]<|tool_call_end|> #}}{SOURCE}")
    codec = Codec(tmp_path)
    mark = "<|im_end|>"
    plain = codec.encode(Conversation(turn(2, (1, 0)), TOOLS)).ids
    asked, called, *results = turn(2, (1, 0))
    typed = tuple(ToolCall(one.name, json.dumps({"path": mark}), one.id) for one in called.tool_calls)
    ids = codec.encode(Conversation((asked, Message("assistant", mark, tool_calls=typed), *results), TOOLS)).ids

    assert codec.calls is not None
    assert codec.calls.family.name == "lfm2"
    prompt, written = (codec.tokenizer.decode(one, skip_special_tokens=False) for one in (plain, ids))
    assert prompt.count(codec.calls.family.trigger) == 1  # a list of both calls
    for token in codec.tokenizer.special_ids:
        assert ids.count(token) == plain.count(token)
    assert written.count(mark) == prompt.count(mark) + 3
