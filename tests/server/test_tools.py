"""Tools on a real server, by OpenAI's own client: calls that must come, that may come and that must not, alone and in a crowd."""

from __future__ import annotations

import concurrent.futures
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from fronts import front
from servers import Server
from weft.api.openai.chat import translate
from weft.errors import UnsupportedParameter
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.types import Conversation, ToolCall

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
BOOKING = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["train", "plane"]},
        "seats": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
        "name": {"type": "object", "properties": {"first": {"type": "string", "maxLength": 9}}, "required": ["first"]},
    },
    "required": ["kind", "seats", "name"],
    "additionalProperties": False,
}
BOOKING["properties"]["name"]["additionalProperties"] = False  # type: ignore[index]
BOOK: Any = {"type": "function", "function": {"name": "book", "parameters": BOOKING, "strict": True}}
MARKED = 'start: ("sun" | "rain") "\\n" CITY\nCITY: "\\"" /[A-Z][a-z]{2,8}/ "\\""'
FORM = {"type": "grammar", "grammar": {"syntax": "lark", "definition": MARKED}}
NOTE: Any = {"type": "custom", "custom": {"name": "note", "description": "Note the weather", "format": FORM}}
ONLY_NOTE: Any = {"type": "custom", "custom": {"name": "note"}}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, BOOK)}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
STORY: Any = {"role": "user", "content": "Tell me a story about a dog."}
ONLY_BOOK: Any = {"type": "function", "function": {"name": "book"}}
FORCED: list[Any] = [
    "required",
    ONLY_BOOK,
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "book"}}]},
    },
]


def ask(client: openai.OpenAI, *messages: Any, **more: Any) -> Any:
    fields = {"model": "tiny-hybrid", "temperature": 0, "tools": [WEATHER, BOOK], "max_tokens": 200, **more}
    return client.chat.completions.create(messages=list(messages), **fields).choices[0]


def valid(choice: Any) -> list[str]:
    """The names of its calls, all of which fit their schemas."""
    calls = choice.message.tool_calls or []
    for call in calls:
        assert call.type == "function"
        assert jsonschema_rs.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments)), call
    assert len({call.id for call in calls}) == len(calls)
    return [call.function.name for call in calls]


def test_the_list_of_models_says_that_this_one_takes_tools(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].model_dump()["capabilities"] == ["tools", "thinking", "vision"]


def test_a_model_that_wants_to_calls_a_tool_after_its_thinking(client: openai.OpenAI) -> None:
    choice = ask(client, QUESTION)

    assert valid(choice) == ["get_weather"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert choice.message.content is None
    assert "get_weather" in choice.message.reasoning_content
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("tool_choice", FORCED, ids=["required", "named", "allowed"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_call_that_must_come_comes_and_fits_its_schema(client: openai.OpenAI, tool_choice: Any, temperature: float) -> None:
    choice = ask(client, STORY, tool_choice=tool_choice, temperature=temperature, seed=5)

    names = valid(choice)
    assert names
    assert tool_choice == "required" or set(names) == {"book"}
    assert choice.finish_reason == "tool_calls"


def test_a_model_that_may_but_does_not_want_to_call_answers(client: openai.OpenAI) -> None:
    choice = ask(client, {"role": "user", "content": "Repeat after me: good morning"})

    assert "good morning" in choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_a_model_that_may_not_call_answers_in_words_and_its_prompt_is_the_same(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny-hybrid", "temperature": 0, "tools": [WEATHER], "messages": [QUESTION], "max_tokens": 60}
    may, may_not = (client.chat.completions.create(tool_choice=one, **fields) for one in ("auto", "none"))

    assert may.choices[0].message.tool_calls
    assert may_not.choices[0].message.tool_calls is None
    assert may_not.choices[0].message.content
    assert "tool_call" not in may_not.choices[0].message.content
    assert may_not.usage is not None
    assert may.usage is not None
    assert may_not.usage.prompt_tokens == may.usage.prompt_tokens


def test_the_result_of_a_tool_is_told_in_words(client: openai.OpenAI) -> None:
    called = ask(client, QUESTION, tools=[WEATHER]).message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}

    choice = ask(client, QUESTION, called.model_dump(exclude_none=True), result, tools=[WEATHER])

    assert "sunny" in choice.message.content
    assert choice.finish_reason == "stop"


def assembled(stream: Any, n: int) -> list[dict[str, Any]]:
    """The choices of a stream as a client puts them together; a call by its name and arguments."""
    found: list[dict[str, Any]] = [{"content": "", "calls": [], "reason": None} for _ in range(n)]
    for chunk in stream:
        for choice in chunk.choices:
            mine = found[choice.index]
            mine["content"] += choice.delta.content or ""
            mine["reason"] = choice.finish_reason or mine["reason"]
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    mine["calls"].append([call.function.name, ""])
                mine["calls"][call.index][1] += call.function.arguments
    return found


@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}, {"tool_choice": "none"}, {"max_tokens": 25}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_is_whole(client: openai.OpenAI, more: dict[str, Any], n: int) -> None:
    fields: Any = {
        "model": "tiny-hybrid",
        "temperature": 1,
        "seed": 3,
        "max_tokens": 120,
        "n": n,
        "tools": [WEATHER, BOOK],
        **more,
    }
    whole = client.chat.completions.create(messages=[QUESTION], **fields)
    streamed = assembled(client.chat.completions.create(messages=[QUESTION], stream=True, **fields), n)

    assert streamed == [
        {
            "content": choice.message.content or "",
            "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
            "reason": choice.finish_reason,
        }
        for choice in whole.choices
    ]


def test_a_cut_call_is_told_as_far_as_it_came(client: openai.OpenAI) -> None:
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    whole = ask(client, QUESTION, tool_choice=ONLY_BOOK, extra_body=quiet)
    cut = ask(client, QUESTION, tool_choice=ONLY_BOOK, extra_body=quiet, max_tokens=25)

    arguments = cut.message.tool_calls[0].function.arguments
    assert cut.finish_reason == "length"
    assert whole.message.tool_calls[0].function.arguments.startswith(arguments)


def test_an_answer_of_a_given_shape_and_a_call_go_together(client: openai.OpenAI) -> None:
    shape = {"response_format": {"type": "json_object"}, "tools": [WEATHER]}

    answered = ask(client, {"role": "user", "content": "Reply with JSON. The marker is 7."}, **shape)
    called = ask(client, QUESTION, **shape)

    assert json.loads(answered.message.content) == {"marker": 7}
    assert valid(called) == ["get_weather"]


def custom(calls: Any) -> list[tuple[str, str]]:
    assert all(call.type == "custom" and call.id for call in calls)
    return [(call.custom.name, call.custom.input) for call in calls]


def test_a_custom_tool_gets_a_text_of_its_own_grammar_streamed_or_not(client: openai.OpenAI, server: Server) -> None:
    fields: Any = {"tools": [NOTE, WEATHER], "tool_choice": ONLY_NOTE, "temperature": 1, "seed": 4, "max_tokens": 300}
    choice = ask(client, STORY, **fields)
    [(name, text)] = custom(choice.message.tool_calls)

    assert choice.finish_reason == "tool_calls"
    assert name == "note"
    assert re.fullmatch('(sun|rain)\n"[A-Z][a-z]{2,8}"', text)
    reply = server.post("/v1/chat/completions", {"model": "tiny-hybrid", "messages": [STORY], "stream": True, **fields})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    told = [call for chunk in chunks for one in chunk["choices"] for call in one["delta"].get("tool_calls", [])]
    assert [{**told[0], "id": ""}] == [{"index": 0, "id": "", "type": "custom", "custom": {"name": "note", "input": ""}}]
    assert "".join(call["custom"]["input"] for call in told) == text
    assert all(set(call) == {"index", "custom"} for call in told[1:])


def test_a_custom_call_that_is_sent_back_is_a_call_with_that_text() -> None:
    call = {"id": "call_1", "type": "custom", "custom": {"name": "note", "input": 'sun\n"Paris"'}}
    asked = translate({"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}], "tools": [NOTE]})
    [conversation] = asked.generation.prompts

    assert isinstance(conversation, Conversation)
    assert conversation.messages[1].tool_calls == (ToolCall("note", '{"input": "sun\\n\\"Paris\\""}', "call_1"),)
    assert [tool["type"] for tool in conversation.tools] == ["function"]


def test_a_format_that_is_a_guess_is_told_with_the_model(tmp_path: Path) -> None:
    words = "{{ tools }} <|tool_call_start|>[name()]<|tool_call_end|>{% for one in messages %}{{ one.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(words, encoding="utf-8")
    shutil.copy(TINY_HYBRID / "tokenizer.json", tmp_path)
    with front({"odd": []}) as one:
        assert "notice" not in one.get("/v1/models/odd").json()
        one.service.models[0].codec = Codec(tmp_path)

        assert "read like those of lfm2" in one.get("/v1/models/odd").json()["notice"]


@pytest.mark.parametrize("describes", [True, False])
def test_where_calls_are_written_in_no_known_way_tools_are_described_or_refused(tmp_path: Path, describes: bool) -> None:
    source = (TINY_HYBRID / "chat_template.jinja").read_text(encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(source.replace("<tool_call>", "<tell>"), encoding="utf-8")
    shutil.copy(TINY_HYBRID / "tokenizer.json", tmp_path)
    codec = Codec(tmp_path, describes_tools=describes)
    asked = translate({"messages": [QUESTION], "tools": [WEATHER]}).generation

    if describes:
        (prompt,) = codec.encode_request(asked)
        assert "You may call tools" in codec.tokenizer.decode(prompt.ids)
        assert codec.describes_tools
    else:
        with pytest.raises(UnsupportedParameter, match="--tools-without-template"):
            codec.encode_request(asked)


def test_a_model_that_was_not_made_for_tools_says_so_in_the_list_and_in_a_header(tmp_path: Path) -> None:
    source = (
        "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    shutil.copy(TINY_HYBRID / "tokenizer.json", tmp_path)
    fields: Any = {"messages": [QUESTION], "max_tokens": 2, "model": "m"}
    with front({"m": []}) as one:
        made_for = one.get("/v1/models/m").json()
        one.service.models[0].codec = Codec(tmp_path)
        row = one.get("/v1/models/m").json()
        headers = {
            (choice, streams): one.post(
                "/v1/chat/completions", {**fields, "tools": [WEATHER], "tool_choice": choice, "stream": streams}
            ).headers.get("x-weft-tools")
            for choice in ("auto", "none")
            for streams in (False, True)
        }
        plain = one.post("/v1/chat/completions", fields)
        one.service.models[0].codec = Codec(tmp_path, describes_tools=False)
        without = one.get("/v1/models/m").json()

    assert "tools" not in without | dict.fromkeys(without["capabilities"])
    assert made_for["tools"] == {"shown_by": "template"}
    assert "tools" in row["capabilities"]
    assert row["tools"]["shown_by"] == "weft"
    assert "not made for tools" in row["tools"]["notice"]
    assert headers == {(choice, way): {"auto": "described"}.get(choice) for choice in ("auto", "none") for way in (False, True)}
    assert "x-weft-tools" not in plain.headers


def test_a_prompt_depends_on_its_request_alone_and_not_on_what_was_answered_before(client: openai.OpenAI) -> None:
    def prompt_tokens(*messages: Any, **more: Any) -> int:
        fields: Any = {"model": "tiny-hybrid", "temperature": 0, "tools": [WEATHER], "max_tokens": 1, "extra_body": more}
        usage = client.chat.completions.create(messages=list(messages), **fields).usage
        assert usage is not None
        return usage.prompt_tokens

    salt = {"cache_salt": "kept"}
    called = ask(client, QUESTION, tools=[WEATHER], extra_body=salt).message
    bare = {"role": "assistant", "content": None, "tool_calls": [called.tool_calls[0].model_dump()]}
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
    complete = {**bare, "reasoning_content": called.reasoning_content}

    assert called.reasoning_content
    assert prompt_tokens(QUESTION, bare, result, **salt) == prompt_tokens(QUESTION, bare, result)
    assert prompt_tokens(QUESTION, complete, result, **salt) > prompt_tokens(QUESTION, bare, result, **salt)


def bad(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": "lark"}}]}, "tools[0].custom.format"),
        (
            {"tools": [NOTE], "messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (bad(name=""), "tools[0].function.name"),
        (bad(parameters=[]), "tools[0].function.parameters"),
        (bad(parameters={"type": "string"}), "tools[0].function.parameters"),
        (bad(parameters={"properties": {"a": {"$ref": []}}}, strict=True), "tools[0].function.parameters.properties.a.$ref"),
        (bad(parameters={"properties": {"a": {"not": {}}}}, strict=True), "tools[0].function.parameters.properties.a"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": ONLY_BOOK}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "guided_regex": "a+"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_tools_are_refused_by_name(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    reply = server.post("/v1/chat/completions", {"messages": [QUESTION], "max_tokens": 5, "stream": stream, **fields})

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_loose_tool_with_a_broken_schema_still_gets_an_object(server: Server) -> None:
    fields = bad(parameters={"properties": {"a": {"$ref": []}}}) | {
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 200,
    }
    reply = server.post("/v1/chat/completions", {"messages": [STORY], **fields})

    assert reply.status_code == 200, reply.text
    called = reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert called["name"] == "f"


def test_forced_calls_in_a_crowd_are_all_valid_and_plain_neighbours_say_what_they_say_alone(client: openai.OpenAI) -> None:
    def plain(_: int = 0) -> str:
        told = client.completions.create(
            model="tiny-hybrid", prompt="Once upon a time", max_tokens=40, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in told if chunk.choices)

    def forced(number: int) -> tuple[Any, list[str]]:
        choice = ask(client, STORY, tool_choice=FORCED[number % 3], temperature=1.2, seed=number)
        return choice.finish_reason, valid(choice)

    alone = plain()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        streams, calls = [pool.submit(plain, one) for one in range(4)], [pool.submit(forced, one) for one in range(8)]

    assert {one.result() for one in streams} == {alone}
    for one in calls:
        reason, names = one.result()
        assert reason == "tool_calls"
        assert names


def streamed_texts(server: Server, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The answer's text, and why it ended, in the dialect of this path; streamed and whole are the same."""
    reply = server.post(path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith(("data: {", "{"))]
    events = [json.loads(line) for line in lines]
    whole = server.post(path, {**body, "stream": False}).json()
    if path == "/v1/messages":
        texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        reasons = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
        found = "".join(block.get("text", "") for block in whole["content"]), whole["stop_reason"]
    elif path == "/api/chat":
        texts = [event["message"]["content"] for event in events]
        reasons = [event["done_reason"] for event in events if event["done"]]
        found = whole["message"]["content"], whole["done_reason"]
    else:
        texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
        found = whole["choices"][0]["message"]["content"] or "", whole["choices"][0]["finish_reason"]
    assert ("".join(texts), reasons[-1]) == found
    return found


ADDRESSED: dict[str, Any] = {"model": "tiny-hybrid", "messages": [QUESTION]}
DESCRIBED = {"name": "get_weather", "description": "Get the weather in a city", "input_schema": WEATHER["function"]["parameters"]}
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "required": ("/v1/chat/completions", {"tools": [WEATHER], "tool_choice": "required", "reasoning_effort": "none"}),
    "auto": ("/v1/chat/completions", {"tools": [WEATHER], "reasoning_effort": "none"}),
    "any": ("/v1/messages", {"tools": [DESCRIBED], "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}}),
    "messages": ("/v1/messages", {"tools": [DESCRIBED], "thinking": {"type": "disabled"}}),
    "ollama": ("/api/chat", {"tools": [WEATHER], "think": False}),
}


@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_anywhere_is_no_text_in_any_dialect(server: Server, name: str) -> None:
    path, fields = CUT[name]
    reasons = set()
    for limit in range(1, 24):
        limits = (
            {"options": {"num_predict": limit, "temperature": 0}} if name == "ollama" else {"max_tokens": limit, "temperature": 0}
        )
        text, reason = streamed_texts(server, path, {**ADDRESSED, **fields, **limits})
        assert not text.strip(), (limit, text)
        reasons.add(reason)

    assert {"length", "max_tokens"} & reasons
    assert reasons - {"length", "max_tokens"}
