"""Over the wire, constants that hold the vocabulary's own tokens are answered to the letter, whatever the vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders

from servers import Server, running
from vocabularies import write
from weft.model.resolve import TINY_HYBRID

LITERALS = [
    "strip <|im_end|> tags",
    "a <|endoftext|>",
    "b <think>c</think> <tool_call>d</tool_call>",
    " New  York\n\nline ",
    "0123456789 " * 30 + "<|im_end|><tool_response> end",
]
QUESTION = {"messages": [{"role": "user", "content": "Say it."}], "temperature": 0, "max_tokens": 700}
THINKING = {"on": {"thinking_token_budget": 8}, "off": {"chat_template_kwargs": {"enable_thinking": False}}}


def strict(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}}


def object_with(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"b": schema}, "required": ["b"], "additionalProperties": False}


def asked(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions", QUESTION | fields)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def escaped(text: str) -> str:
    """A regex for the text alone."""
    return "".join("\\" + one if one in "|.()[]{}*+?\\^$" else one for one in text)


@pytest.mark.parametrize("speculate", [True, False], ids=["speculating", "plain"])
@pytest.mark.parametrize("thinking", THINKING)
@pytest.mark.parametrize("literal", LITERALS)
def test_a_constant_is_answered_to_the_letter_in_every_way_to_ask_for_it(
    server: Server, literal: str, thinking: str, speculate: bool
) -> None:
    more = {**THINKING[thinking], "speculate": speculate}
    for schema in ({"const": literal}, {"enum": [literal, f"{literal}!"]}):
        choice = asked(server, **strict(object_with(schema)), **more)
        assert (json.loads(choice["message"]["content"])["b"].rstrip("!"), choice["finish_reason"]) == (literal, "stop")
    for fields in ({"guided_choice": [literal, f"{literal}!"]}, {"guided_regex": f"{escaped(literal)}!?"}):
        choice = asked(server, **fields, **more)
        assert (choice["message"]["content"].rstrip("!"), choice["finish_reason"]) == (literal, "stop")


@pytest.mark.parametrize("thinking", THINKING)
@pytest.mark.parametrize("literal", LITERALS)
def test_a_strict_tool_gets_a_constant_to_the_letter(server: Server, literal: str, thinking: str) -> None:
    function = {"name": "say", "parameters": object_with({"const": literal}), "strict": True}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "parallel_tool_calls": False}
    choice = asked(server, **tools, **THINKING[thinking])

    assert choice["finish_reason"] == "tool_calls"
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [{"b": literal}]


@contextmanager
def served_with(folder: Path, tokenizer: Any) -> Iterator[Server]:
    """The shipped model's weights under another tokenizer, which a function writes into the folder."""
    model = folder / "model"
    shutil.copytree(TINY_HYBRID, model)
    tokenizer(model)
    with running(folder / "log", str(model), environment={"WEFT_CACHE": str(folder)}) as server:
        yield server


@pytest.mark.parametrize("kind", ["metaspace", "fallback, metaspace", "tiktoken"])
def test_a_model_is_constrained_whatever_decoder_its_tokenizer_has(tmp_path: Path, kind: str) -> None:
    with served_with(tmp_path, lambda folder: write(kind, folder)) as server:
        for literal in ("New York", "strip <|im_end|> tags", "a<think>b</think>c <tool_call>"):
            choice = asked(server, **strict(object_with({"const": literal})))
            assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == ({"b": literal}, "stop")
        pattern = asked(server, **strict(object_with({"type": "string", "pattern": "^[^ ]{8}$"})))
        assert " " not in json.loads(pattern["message"]["content"])["b"]
        assert server.status()["models"][0]["engine_restarts"] == 0


def test_a_model_whose_tokens_are_decoded_otherwise_is_served_without_constraints_and_says_so(tmp_path: Path) -> None:
    def underlined(folder: Path) -> None:
        inner: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(" ", "_")])
        inner.save(str(folder / "tokenizer.json"))

    with served_with(tmp_path, underlined) as server:
        assert asked(server, max_tokens=5)["finish_reason"] == "length"
        refused = server.post("/v1/chat/completions", QUESTION | {"guided_choice": ["Yes", "No"]})
        assert refused.status_code == 400
        assert "answers of this model can not be constrained" in refused.json()["error"]["message"]
        assert "can not be constrained" in json.dumps(server.status())
        assert "can not be constrained" in server.log.read_text()
