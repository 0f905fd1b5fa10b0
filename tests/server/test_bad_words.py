"""`allowed_token_ids` and `bad_words` over HTTP."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from servers import Server

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 40, "ignore_eos": True}
BODIES = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True},
    "/v1/responses": {"input": "Tell me a story.", "max_output_tokens": 40, "ignore_eos": True},
}


def text_of(body: dict[str, Any]) -> str:
    if "output" in body:
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    said = (choice.get("message", {"content": choice.get("text")}) for choice in body["choices"])
    return "".join(one.get("reasoning_content", "") + one["content"] for one in said)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_words_that_are_bad_do_not_occur(server: Server, path: str, temperature: int) -> None:
    body = {**BODIES[path], "temperature": temperature, "seed": 7}
    free = text_of(server.post(path, body).json())
    words = sorted({free[start : start + 3] for start in range(0, len(free) - 3, 5)} | {" ", "."})
    without = text_of(server.post(path, {**body, "bad_words": words}).json())

    assert without
    assert not [word for word in words if word in without]


@pytest.mark.parametrize("path", BODIES)
def test_only_allowed_tokens_occur(server: Server, path: str) -> None:
    allowed = [
        token for text in (" cat", " dog", " and") for token in server.post("/tokenize", {"prompt": text}).json()["tokens"]
    ]
    text = text_of(server.post(path, {**BODIES[path], "allowed_token_ids": allowed}).json())

    assert set(text.split()) <= {"cat", "dog", "and"}
    assert len(text.split()) == 40


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 4096]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
    ],
)
def test_lists_that_can_not_be_are_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="", messages=SAID["messages"], extra_body=fields)

    assert caught.value.param == param
