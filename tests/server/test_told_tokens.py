"""`prompt_logprobs` and `return_token_ids` in vLLM's shape, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from servers import Server

PROMPT = "Once upon a time, there was"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def ids_of(server: Server, prompt: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    return ids


@pytest.mark.parametrize("n", [1, 3])
def test_completions_tell_the_ids_of_each_prompt_and_answer(server: Server, n: int) -> None:
    prompts = [PROMPT, "The dog"]
    body = server.post(TEXT, {**ASKED, "prompt": prompts, "n": n, "return_token_ids": True}).json()
    plain = server.post(TEXT, {**ASKED, "prompt": prompts, "n": n}).json()

    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [
        ids_of(server, one) for one in prompts for _ in range(n)
    ]
    for choice, before in zip(body["choices"], plain["choices"], strict=True):
        assert choice["text"] == before["text"] == server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
        assert len(choice["token_ids"]) == 5
        assert before.keys() == choice.keys() - {"token_ids", "prompt_token_ids"}


def test_an_end_token_is_among_the_ids_and_no_part_of_the_text(server: Server) -> None:
    end = {"max_tokens": 9, "logit_bias": {"4082": 100}, "ignore_eos": False}
    body = server.post(TEXT, {**ASKED, **end, "return_token_ids": True}).json()

    assert body["choices"][0]["token_ids"] == [4082]
    assert body["choices"][0]["text"] == ""


@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_prompt_s_log_probabilities_are_those_of_an_echo(server: Server, count: int) -> None:
    echoed = server.post(TEXT, {**ASKED, "echo": True, "logprobs": count}).json()["choices"][0]["logprobs"]
    told = server.post(TEXT, {**ASKED, "prompt_logprobs": count}).json()["choices"][0]["prompt_logprobs"]
    ids = ids_of(server, PROMPT)

    assert told[0] is None
    for place, (token, entry) in enumerate(zip(ids[1:], told[1:], strict=True), 1):
        chosen = entry[str(token)]
        assert chosen["decoded_token"] == echoed["tokens"][place]
        assert chosen["logprob"] == echoed["token_logprobs"][place]
        others = sorted((one for one in entry.values() if one["rank"] is not None), key=lambda one: one["rank"])
        assert [one["rank"] for one in others] == [*range(1, count + 1)]
        assert [one["logprob"] for one in others] == sorted((one["logprob"] for one in others), reverse=True)
        assert len(entry) == count + (chosen["rank"] is None)


def test_chat_tells_of_its_prompt_beside_the_choices(server: Server) -> None:
    body = server.post(CHAT, {**SAID, "n": 2, "prompt_logprobs": 1, "return_token_ids": True}).json()
    plain = server.post(CHAT, {**SAID, "n": 2}).json()

    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert [entry and next(iter(entry)) for entry in body["prompt_logprobs"]] == [None, *map(str, body["prompt_token_ids"][1:])]
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [5, 5]
    assert not {"prompt_token_ids", "prompt_logprobs"} & plain.keys()
    assert [choice["message"] for choice in body["choices"]] == [choice["message"] for choice in plain["choices"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream": True, "return_token_ids": True}, "return_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_can_not_be_told_is_refused_by_name(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    reply = server.post(path, {**(SAID if path == CHAT else ASKED), **fields})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_an_echo_and_the_prompt_s_own_log_probabilities_are_not_told_together(server: Server) -> None:
    reply = server.post(TEXT, {**ASKED, "echo": True, "prompt_logprobs": 1})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
