"""How one model's files decide what becomes of tools: the grammar asked for, the reader of the answer, or a refusal."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import InvalidRequest
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.tools import read_tool_selection, read_tools
from weft.text.types import CallArguments, CallOpened, Conversation, GenerationRequest, Message, Reasoning, Text, ToolCall

TEMPLATES = Path(__file__).parent / "templates"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
SHAPE = GrammarSpec("json_schema", '{"type":"object"}')
TALK = Conversation((Message("user", "Hi"),))
PLAIN = GenerationRequest(model=None, prompts=(TALK,), sampling={})


def codec(folder: Path, template: str) -> Codec:
    """A model with the tiny vocabulary and this template."""
    shutil.copy(TINY_HYBRID / "tokenizer.json", folder)
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return Codec(folder)


def asked(tool_choice: Any = None, **more: Any) -> GenerationRequest:
    tools = (WEATHER,)
    prompt = replace(TALK, tools=tools)
    return replace(PLAIN, prompts=(prompt,), tool_choice=read_tool_selection(tool_choice, read_tools(tools)), **more)


def constraint(one: Codec, generation: GenerationRequest) -> ConstraintSpec | None:
    return one.constraint(generation, one.encode(generation.prompts[0]))


def said(one: Codec, generation: GenerationRequest, text: str) -> list[Any]:
    reader = one.reader(generation, replace(one.encode(generation.prompts[0]), opened=False))
    ids = one.tokenizer.encode(text, add_special_tokens=False)
    return [delta for token in ids for delta in reader.feed(token)] + reader.finish()


def test_tools_are_held_to_a_grammar_that_begins_after_the_thinking() -> None:
    one = Codec(TINY_HYBRID)
    for choice in (None, "required", "none"):
        found = constraint(one, asked(choice))

        assert found is not None
        assert found.grammar is not None
        assert found.grammar.kind == "lark"
        assert found.reasoning is not None
    assert constraint(one, PLAIN) is None


def test_calls_are_read_where_tools_may_be_called_and_are_text_elsewhere() -> None:
    one = Codec(TINY_HYBRID)

    assert isinstance(said(one, asked(), CALL)[0], CallOpened)
    for generation in (PLAIN, asked("none")):
        assert "".join(delta.text for delta in said(one, generation, CALL)) == CALL


def test_triggers_are_kept_out_of_the_thinking_where_there_are_tools(tmp_path: Path) -> None:
    hermes, anchored = constraint(Codec(TINY_HYBRID), asked()), constraint(codec(tmp_path, "llama3"), asked())

    assert hermes is not None
    assert hermes.reasoning is not None
    assert hermes.reasoning.forbidden == "<tool_call>"
    assert anchored is not None
    assert anchored.reasoning is None or anchored.reasoning.forbidden == ""
    budgeted = constraint(Codec(TINY_HYBRID), replace(PLAIN, thinking_budget=5))
    assert budgeted is not None
    assert budgeted.reasoning is not None
    assert budgeted.reasoning.forbidden == ""


def test_a_client_that_sends_the_reasoning_back_gets_a_prompt_that_begins_as_the_answer_went_on() -> None:
    one, generation = Codec(TINY_HYBRID), asked()
    conversation = generation.prompts[0]
    assert isinstance(conversation, Conversation)
    before = one.encode(conversation)
    given = one.tokenizer.encode("I look.\n</think>\n\n" + CALL, add_special_tokens=False)
    reader = one.reader(generation, before)
    deltas = [delta for token in given for delta in reader.feed(token)] + reader.finish()
    (opened,) = [delta for delta in deltas if isinstance(delta, CallOpened)]
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))
    call = ToolCall(opened.name, arguments, opened.id)
    result = Message("tool", "sunny", tool_call_id=call.id)

    def next_prompt(reasoning: str | None) -> list[int]:
        answer = Message("assistant", None, reasoning, (call,))
        return one.encode(replace(conversation, messages=(*conversation.messages, answer, result))).ids

    assert next_prompt("I look.")[: len(before.ids) + len(given)] == before.ids + given
    assert next_prompt(None)[: len(before.ids) + 1] != next_prompt("I look.")[: len(before.ids) + 1]


def test_of_shapes_only_a_schema_goes_with_tools() -> None:
    one = Codec(TINY_HYBRID)

    assert constraint(one, asked(grammar=SHAPE)) is not None
    for kind, word in (("regex", "regex"), ("choice", "choice"), ("lark", "grammar"), ("structural_tag", "structural_tag")):
        with pytest.raises(InvalidRequest, match=f"a {word} can not be asked for together with tools"):
            constraint(one, asked(grammar=GrammarSpec(kind, "a+")))


def test_where_answers_have_channels_they_are_read_and_shaped_by_them_also_without_tools(tmp_path: Path) -> None:
    one = codec(tmp_path, "gpt-oss")
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    shaped = constraint(one, replace(PLAIN, grammar=SHAPE))
    plain_text = replace(PLAIN, split_thinking=False)

    deltas = said(one, PLAIN, text)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)) == "hm"
    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == "Hi"
    assert constraint(one, PLAIN) is None
    assert shaped is not None
    assert shaped.grammar is not None
    assert "final" in shaped.grammar.text
    assert "".join(delta.text for delta in said(one, plain_text, text)) == text
    assert constraint(one, replace(plain_text, grammar=SHAPE)) == ConstraintSpec(SHAPE)


def test_wishes_about_thinking_are_left_out_where_a_model_does_not_think_and_demands_are_not(tmp_path: Path) -> None:
    wish = replace(PLAIN, effort="high", thinking_budget=5, is_flexible=True)
    plain, channels = codec(tmp_path, "chatml"), codec(tmp_path, "gpt-oss")
    plain.reasoning = channels.reasoning = None  # the tiny vocabulary has tokens for thinking, those of such models have not

    fitted = {name: one.fitted(wish) for name, one in (("plain", plain), ("channels", channels), ("tiny", Codec(TINY_HYBRID)))}

    assert (fitted["plain"].effort, fitted["plain"].thinking_budget) == (None, None)
    assert (fitted["channels"].effort, fitted["channels"].thinking_budget) == ("high", None)
    assert fitted["tiny"] == wish
    demand = replace(wish, is_flexible=False)
    assert plain.fitted(demand) == demand


def test_the_text_of_a_vision_model_needs_no_processor(tmp_path: Path) -> None:
    """The files that describe images may be missing; a prompt is read from the same files as any other model's."""
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(TINY_HYBRID / name, tmp_path)
    settings = json.loads((TINY_HYBRID / "tokenizer_config.json").read_text()) | {"processor_class": "Qwen3VLProcessor"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "vision_config": {}, "text_config": {}}))

    assert Codec(tmp_path).encode(TALK) == Codec(TINY_HYBRID).encode(TALK)
