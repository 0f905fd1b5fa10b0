"""Tools for models whose template has no place for them: described in words, called and answered in texts of plain turns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import UnsupportedParameter
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.tools import read_tool_selection, read_tools, template_tools
from weft.text.tools.described import INSTRUCTION
from weft.text.types import CallArguments, CallClosed, CallOpened, Conversation, GenerationRequest, Message, Text, ToolCall

TEMPLATES = Path(__file__).parent.parent / "templates"
WITHOUT_PLACE = ("chatml", "gemma2", "gemma3", "parts-only")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "description": "Look out", "parameters": CITY}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NOTE: dict[str, Any] = {"type": "custom", "custom": {"name": "note", "description": "Write it down"}}
QUESTION = Message("user", "How is it there?")
CITIES = ("rome", "oslo", "lima", "bern")


@pytest.fixture(params=WITHOUT_PLACE)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> Codec:
    return made(tmp_path, request.param)


def made(folder: Path, template: str, **options: Any) -> Codec:
    """A model with the tiny vocabulary and this template."""
    shutil.copy(TINY_HYBRID / "tokenizer.json", folder)
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return Codec(folder, **options)


def asked(*messages: Message, choice: Any = None, tools: Any = (WEATHER, NOW), parallel: bool = True) -> GenerationRequest:
    selection = read_tool_selection(choice, read_tools(tools), parallel)
    prompt = Conversation(messages or (QUESTION,), template_tools(tools))
    return GenerationRequest(model=None, prompts=(prompt,), sampling={}, tool_choice=selection)


def prompt_of(codec: Codec, generation: GenerationRequest) -> str:
    (one,) = codec.encode_request(codec.fitted(generation))
    return codec.tokenizer.decode(one.ids, skip_special_tokens=False)


def constraint(codec: Codec, generation: GenerationRequest) -> ConstraintSpec | None:
    (one,) = codec.encode_request(codec.fitted(generation))
    return one.constraint


def called(num_calls: int) -> tuple[Message, ...]:
    """A question, parallel calls, and their results."""
    calls = tuple(ToolCall("get_weather", json.dumps({"city": city}), f"call_{city}") for city in CITIES[:num_calls])
    results = (Message("tool", f"weather of {city}", tool_call_id=f"call_{city}") for city in CITIES[:num_calls])
    return QUESTION, Message("assistant", None, tool_calls=calls), *results


def test_tools_are_described_before_the_question_each_on_a_line_of_its_own(codec: Codec) -> None:
    prompt = prompt_of(codec, asked(tools=(WEATHER, NOW, NOTE)))
    lines = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"name"') and "parameters" in line]

    assert [line["name"] for line in lines] == ["get_weather", "now", "note"]
    assert lines[0] == WEATHER["function"]
    assert lines[1]["parameters"] == {"type": "object", "properties": {}}
    assert lines[2]["parameters"]["required"] == ["input"]
    assert INSTRUCTION.rpartition("⟨tools⟩")[2].strip() in prompt
    assert prompt.index("get_weather") < prompt.index("How is it there?")


def test_own_instructions_stay_before_the_tools(codec: Codec) -> None:
    prompt = prompt_of(codec, asked(Message("system", "Be brief."), Message("developer", "Be kind."), QUESTION))

    places = [prompt.index(text) for text in ("Be brief.", "Be kind.", "get_weather", "How is it there?")]
    assert places == sorted(places)


@pytest.mark.parametrize("num_calls", range(1, 5))
def test_earlier_calls_are_read_back_and_results_name_theirs(codec: Codec, num_calls: int) -> None:
    before = prompt_of(codec, asked())
    history = prompt_of(codec, asked(*called(num_calls), Message("assistant", "Fine."), Message("user", "And now?")))
    answer = history[len(before) :]
    generation = asked()
    reader = codec.reader(generation, codec.encode_request(generation)[0])
    ids = codec.tokenizer.encode(answer.partition("<tool_response")[0], add_special_tokens=False)
    deltas = [delta for token in ids for delta in reader.feed(token)] + reader.finish()

    assert history.startswith(before)
    opened = [delta.name for delta in deltas if isinstance(delta, CallOpened)]
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))
    assert opened == ["get_weather"] * num_calls
    assert sum(isinstance(delta, CallClosed) for delta in deltas) == num_calls
    assert arguments == "".join(json.dumps({"city": city}) for city in CITIES[:num_calls])
    results = [f'<tool_response name="get_weather">\nweather of {city}\n</tool_response>' for city in CITIES[:num_calls]]
    places = [history.index(result) for result in results]
    assert places == sorted(places)
    assert places[-1] < history.index("Fine.") < history.index("And now?")


def test_a_history_of_calls_is_written_without_tools_too(codec: Codec) -> None:
    generation = replace(asked(*called(2)), tool_choice=None, prompts=(Conversation(called(2)),))
    prompt = prompt_of(codec, generation)

    assert "You may call tools" not in prompt
    assert all(f"weather of {city}" in prompt for city in CITIES[:2])


def test_texts_beside_calls_and_parts_of_results_are_kept(codec: Codec) -> None:
    call = Message("assistant", "I look.", tool_calls=(ToolCall("now", "{}", "a"),))
    parts = [{"type": "text", "text": "four"}, {"type": "text", "text": "o'clock"}]
    prompt = prompt_of(codec, asked(QUESTION, call, Message("tool", parts, tool_call_id="a")))

    places = [
        prompt.index(text) for text in ("I look.", '{"name": "now", "arguments": {}}', '<tool_response name="now">', "four")
    ]
    assert places == sorted(places)
    assert prompt.index("o'clock") < prompt.index("</tool_response>")


def test_tools_that_may_not_be_called_are_not_offered_and_nothing_is_enforced(codec: Codec) -> None:
    without = replace(asked(), tool_choice=None, prompts=(Conversation((QUESTION,)),))

    assert prompt_of(codec, asked(choice="none")) == prompt_of(codec, without)
    assert constraint(codec, asked(choice="none")) is None


STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True, "parameters": {**CITY, "additionalProperties": False}}}
GRAMMAR = {**NOTE, "custom": {**NOTE["custom"], "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}}


def test_a_grammar_holds_calls_that_must_come_and_what_was_asked_of_those_that_may(codec: Codec) -> None:
    named = {"type": "function", "function": {"name": "now"}}

    assert constraint(codec, asked()) is None
    for held in (
        asked(choice="required"),
        asked(choice=named),
        asked(tools=(STRICT,)),
        asked(tools=(GRAMMAR,)),
        asked(parallel=False),
    ):
        assert constraint(codec, held) is not None
    assert constraint(codec, replace(asked(), grammar=GrammarSpec("json_schema", '{"type":"object"}'))) is not None


def test_a_call_that_may_come_is_read_if_the_model_writes_one(codec: Codec) -> None:
    generation = asked()
    reader = codec.reader(generation, codec.encode_request(generation)[0])
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    deltas = [delta for token in codec.tokenizer.encode(text, add_special_tokens=False) for delta in reader.feed(token)]

    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == "I look."
    assert [delta.name for delta in deltas if isinstance(delta, CallOpened)] == ["get_weather"]


@pytest.mark.parametrize("template", WITHOUT_PLACE)
def test_where_they_are_not_to_be_described_tools_are_refused_with_the_flag_that_describes_them(
    tmp_path: Path, template: str
) -> None:
    codec = made(tmp_path, template, describes_tools=False)

    assert codec.calls is None
    for choice in (None, "required"):
        with pytest.raises(UnsupportedParameter, match=r"no place for tools.*--tools-without-template describe") as caught:
            prompt_of(codec, asked(choice=choice))
        assert caught.value.param == "tools"
    assert "get_weather" not in prompt_of(codec, asked(choice="none"))


def test_a_model_whose_template_has_a_place_is_told_there(tmp_path: Path) -> None:
    codec = Codec(TINY_HYBRID)

    assert not codec.describes_tools
    assert "You may call tools" not in prompt_of(codec, asked())
    assert prompt_of(codec, asked(choice="none")) == prompt_of(codec, asked())
    shutil.copy(TINY_HYBRID / "tokenizer.json", tmp_path)
    assert Codec(tmp_path).calls is None  # without any template nothing can be said
