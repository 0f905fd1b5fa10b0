"""Nothing is computed twice, seen from outside: conversations that grow, prompts that arrive together."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from conftest import Server

SYSTEM = "You are a small helper who tells short stories about dogs, trees and boats. " * 6


def chat(server: Server, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    reply: dict[str, Any] = server.post(
        "/v1/chat/completions", {**body, "chat_template_kwargs": {"enable_thinking": False}}
    ).json()
    return reply


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_that_grows_computes_its_last_turns_only(server: Server) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM + "(growing)"}]
    new = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"Tell me about number {turn}."})
        reply = chat(server, messages)
        new.append(reply["usage"]["prompt_tokens"] - cached(reply))
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})

    assert new[0] > 100
    assert max(new[1:]) <= 60  # the answer before, the new question, and the opening of the next turn


def test_the_same_prompt_again_computes_one_token(server: Server) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Once more."}]
    first, again = chat(server, messages), chat(server, messages)

    assert again["usage"]["prompt_tokens"] - cached(again) == 1
    assert again["choices"] == first["choices"]


def test_an_answer_cut_at_a_stop_string_tells_what_was_cached_too(server: Server) -> None:
    body = {"prompt": SYSTEM + "Once upon a time", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    cut = server.post("/v1/completions", {**body, "stop": [whole[8:12]]}).json()

    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["prompt_tokens"] - cached(cut) == 1


def test_prompts_that_arrive_together_share_their_beginning(server: Server) -> None:
    shared = "A trunk that nobody has asked about before today. " * 20
    bodies = [{"prompt": f"{shared} Number {number}:", "max_tokens": 4, "temperature": 0} for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        replies = [reply.json() for reply in pool.map(lambda body: server.post("/v1/completions", body), bodies)]
    alone = [server.post("/v1/completions", body).json() for body in bodies]

    total = sum(reply["usage"]["prompt_tokens"] for reply in replies)
    computed = total - sum(map(cached, replies))
    assert computed < total / 2
    assert [reply["choices"] for reply in alone] == [reply["choices"] for reply in replies]


def test_the_memory_of_prefixes_is_told(server: Server) -> None:
    chat(server, [{"role": "user", "content": SYSTEM}])

    assert server.status()["memory"]["prefixes"] > 0
