"""Nothing is computed twice, seen from outside: conversations that grow, prompts that arrive together."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers import Server, running
from waiting import until
from weft.model.resolve import TINY_HYBRID

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from bench.agent import title_request, turns

SYSTEM = "You are a small helper who tells short stories about dogs, trees and boats. " * 6


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
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


def turn_starts(server: Server, messages: list[dict[str, Any]]) -> list[int]:
    """Where the turns of a conversation begin, in tokens; the last one is that of the answer."""
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    return [place for place, token in enumerate(tokens) if token == tokens[0]]


class TestBoundaries:
    """A later prompt that parts from an earlier one goes on where the turn began in which they part, and no token later."""

    SAME = SYSTEM + "Whoever asks is told the truth."
    QUESTIONS = ("Tell me about the red boat and the river.", "How old is that tree?", "Where did the little dog go?")

    def begun(self, question: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.SAME}, {"role": "user", "content": question}]

    def check(self, server: Server, messages: list[dict[str, Any]], expected: int) -> None:
        reply = chat(server, messages)
        cold = chat(server, messages, cache_salt=f"{len(messages)} {messages[-1]['content']}")

        assert cached(reply) == expected
        assert cached(cold) == 0
        assert reply["choices"] == cold["choices"]

    def test_another_conversation_under_the_same_instructions_computes_none_of_them(self, server: Server) -> None:
        first, *others = map(self.begun, self.QUESTIONS)
        assert cached(chat(server, first)) == 0
        _, user, _ = turn_starts(server, first)
        for messages in others:
            self.check(server, messages, user)

        assert user > 100

    def test_another_question_at_the_same_junction_computes_nothing_before_the_answer(self, server: Server) -> None:
        talk = [*self.begun("Is the house big?"), {"role": "assistant", "content": "Yes, and it is old."}]
        first, second = ([*talk, {"role": "user", "content": question}] for question in self.QUESTIONS[:2])
        chat(server, talk[:2])
        _, _, answer, _, _ = turn_starts(server, first)
        for messages in (first, second):
            self.check(server, messages, answer)


def test_the_same_prompt_again_computes_one_token(server: Server) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Once more."}]
    first, again = chat(server, messages), chat(server, messages)

    assert again["usage"]["prompt_tokens"] - cached(again) == 1
    assert again["choices"] == first["choices"]


def test_of_several_answers_to_a_prompt_the_cached_tokens_are_counted_once(server: Server) -> None:
    text = prefix_node("several answers")
    first, again = (complete(server, text, n=3) for _ in range(2))

    assert cached(first) == 0
    assert computed(again) == 1


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


def complete(server: Server, prompt: str, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def computed(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens"]) - cached(reply)


def at_once(ask: Callable[[int], dict[str, Any]], count: int = 8) -> list[dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def prefix_node(name: str) -> str:
    """About a thousand tokens that nobody has sent before."""
    return f"This is the long beginning called {name}. " + "The little dog ran to the big house by the river. " * 80


def last_words(
    server: Server, words: int, number: int, system: str, is_thinking: bool, is_strict: bool, salt: str
) -> dict[str, Any]:
    """Answer a chat prompt that ends with a number."""
    text = " ".join(itertools.islice(itertools.cycle(["the", "boat", "and", "tree"]), words))
    instructions = [{"role": "system", "content": system}] if system else []
    schema = {
        "type": "object",
        "properties": {"marker": {"const": number}},
        "required": ["marker"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "marker", "strict": True, "schema": schema}}
    body = {
        "messages": [*instructions, {"role": "user", "content": f"Look at {text} and say {number}"}],
        "chat_template_kwargs": {"enable_thinking": is_thinking},
        "cache_salt": salt,
        "max_tokens": 4,
        "temperature": 0,
    }
    reply: dict[str, Any] = server.post("/v1/chat/completions", body | ({"response_format": form} if is_strict else {})).json()
    return reply


class TestEightAtOnce:
    def test_a_common_beginning_is_computed_once(self, server: Server) -> None:
        shared = prefix_node("eight")
        ask = lambda number: complete(server, f"{shared} Number {number}:")  # noqa: E731
        num_shared = complete(server, shared + " x", cache_salt="only to count")["usage"]["prompt_tokens"] - 2
        replies = at_once(ask)
        warm = at_once(lambda number: complete(server, f"{shared} Again {number}:"))

        assert num_shared > 900
        tails = sum(reply["usage"]["prompt_tokens"] - num_shared for reply in replies)
        assert sum(map(computed, replies)) <= 1.05 * num_shared + tails
        assert sum(0 < cached(reply) < reply["usage"]["prompt_tokens"] for reply in replies) >= 7
        assert all(0 < cached(reply) < reply["usage"]["prompt_tokens"] for reply in warm)
        assert [ask(number)["choices"] for number in range(8)] == [reply["choices"] for reply in replies]

    def test_short_prompts_that_differ_in_their_last_words_hit_what_one_before_them_left(self, server: Server) -> None:
        """The size and the fields of the report that this is for: prompts of 59 tokens, one warm-up with another marker."""

        def ask(number: int) -> dict[str, Any]:
            schema = {"type": "object", "properties": {"marker": {"const": number}}, "required": ["marker"]}
            body = {
                "messages": [
                    {"role": "system", "content": "You are a helper. The dog ran to the big house by the river."},
                    {"role": "user", "content": f"Look at the boat and the tree, and tell me the marker {number}."},
                ],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "marker", "strict": True, "schema": {**schema, "additionalProperties": False}},
                },
                "chat_template_kwargs": {"enable_thinking": False},
                "max_tokens": 40,
                "temperature": 0,
            }
            reply: dict[str, Any] = server.post("/v1/chat/completions", body).json()
            return reply

        tokens = ask(99)["usage"]["prompt_tokens"]
        replies = at_once(ask)

        assert 50 <= tokens <= 60
        assert all(0 < cached(reply) < reply["usage"]["prompt_tokens"] for reply in replies), [*map(cached, replies)]
        assert [json.loads(reply["choices"][0]["message"]["content"]) for reply in replies] == [
            {"marker": number} for number in range(8)
        ]

    @pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "free"])
    @pytest.mark.parametrize("is_thinking", [True, False], ids=["thinking", "not thinking"])
    @pytest.mark.parametrize("system", ["", SYSTEM[:76]], ids=["user only", "with a system message"])
    def test_of_chat_prompts_eight_hit_after_one_and_fourteen_of_fifteen_cold(
        self, server: Server, system: str, is_thinking: bool, is_strict: bool
    ) -> None:
        for words in (5, 15, 45):
            mark = f"{words} {system} {is_thinking} {is_strict}"
            ask = lambda number, salt: last_words(server, words, number, system, is_thinking, is_strict, salt)  # noqa: B023, E731
            first = ask(99, mark)
            (model,) = server.get("/v1/cache").json()["models"]
            warm = at_once(lambda number: ask(number + 10, mark))  # noqa: B023
            cold = at_once(lambda number: ask(number + 10, f"cold {mark}"), 15)  # noqa: B023

            assert any(node["has_checkpoint"] and node["length"] == min(map(cached, warm)) for node in model["nodes"])
            assert all(0 < cached(reply) < reply["usage"]["prompt_tokens"] for reply in warm), [*map(cached, warm)]
            assert sum(cached(reply) > 0 for reply in cold) >= 14, [*map(cached, cold)]
            assert first["usage"]["prompt_tokens"] - min(map(cached, warm)) <= 2 * 16 + 16

    def test_each_has_its_own_marker_under_its_own_schema(self, server: Server) -> None:
        shared = prefix_node("markers")

        def ask(number: int) -> dict[str, Any]:
            schema = {"type": "object", "properties": {"marker": {"const": number}}, "required": ["marker"]}
            schema["additionalProperties"] = False
            return complete(server, f"{shared} Marker {number}:", max_tokens=40, structured_outputs={"json": schema})

        replies = at_once(ask)

        assert [json.loads(reply["choices"][0]["text"]) for reply in replies] == [{"marker": number} for number in range(8)]
        assert sum(cached(reply) > 0 for reply in replies) >= 7

    def test_a_leader_that_leaves_takes_nothing_with_it(self, server: Server) -> None:
        shared = prefix_node("leader")
        body = json.dumps({"prompt": shared + " I am first.", "stream": True}).encode()
        leader = socket.create_connection(("127.0.0.1", server.port))
        leader.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.status()["rows_running"])
        with concurrent.futures.ThreadPoolExecutor(7) as pool:
            asked = [pool.submit(complete, server, f"{shared} Number {number}:") for number in range(7)]
            leader.close()
            replies = [one.result() for one in asked]

        num_prompt = max(reply["usage"]["prompt_tokens"] for reply in replies)
        assert sum(map(computed, replies)) <= 1.05 * num_prompt + 7 * 16
        alone = [complete(server, f"{shared} Number {number}:")["choices"] for number in range(7)]
        assert [reply["choices"] for reply in replies] == alone


def test_forty_turns_of_an_agent_compute_what_is_new(server: Server) -> None:
    messages: list[dict[str, Any]] = []
    before, so_far = 0, []
    for turn, new in enumerate(turns(40)):
        messages += new
        so_far.append(len(messages))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            side = pool.submit(chat, server, title_request(messages))
            reply = chat(server, messages)
            side.result()
        tokens = reply["usage"]["prompt_tokens"]
        assert computed(reply) <= tokens - before + 2 * 128, turn
        before = tokens

    edited = messages[: so_far[20]]
    edited[-1] = {"role": "user", "content": "No, look at another one."}
    trunk_tokens = chat(server, messages[: so_far[19]])["usage"]["prompt_tokens"]
    assert cached(chat(server, edited)) >= trunk_tokens - 128
    assert cached(chat(server, messages)) >= before - 128  # the other branch is still there


@pytest.mark.parametrize("is_idle", [False, True], ids=["at once", "when all is quiet"])
def test_back_to_back_requests_hit(server: Server, is_idle: bool) -> None:
    text = prefix_node(f"back to back {is_idle}")
    first = complete(server, text)
    if is_idle:
        server.wait_idle()

    assert computed(complete(server, text)) == 1
    assert cached(complete(server, text + " And another question.")) >= first["usage"]["prompt_tokens"] - 1 - 128


def num_chunks(server: Server, name: str) -> int:
    """How many cached chunks begin the prefix of this name."""
    (model,) = server.get("/v1/cache").json()["models"]
    return sum(f"called {name}" in (node["text"] or "") for node in model["nodes"])  # of a salted request no text is shown


def test_an_aborted_prompt_is_gone_on_with(server: Server) -> None:
    text = prefix_node("aborted")
    body = json.dumps({"prompt": text, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: num_chunks(server, "aborted"))  # some chunks; all of them on a fast machine, which is as good
    server.wait_idle()

    assert cached(complete(server, text)) >= 128


def test_why_it_missed_is_told(server: Server) -> None:
    text = prefix_node("why")
    complete(server, text + "a big red dog ran away from the house.")
    reply = server.post("/v1/completions", {"prompt": text + "a big red frog ran away from the house.", "max_tokens": 2})
    why = reply.json()["timings"]["cache"]

    assert why["cause"] in ("differs", "checkpoint")
    assert "frog".startswith(why["token"].strip()) or why["token"].strip() in "frog"
    again = server.get(f"/v1/cache/requests/{reply.headers['x-request-id']}").json()
    assert again["cause"] == why["cause"]
    assert f'cause="{why["cause"]}"' in server.get("/metrics").text


def test_what_is_kept_is_listed_and_cleared(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid") as server:
        text = prefix_node("listed")
        complete(server, text)
        (model,) = server.get("/v1/cache").json()["models"]
        assert model["held_bytes"] > 0
        assert any("long beginning" in node["text"] for node in model["nodes"])
        assert max(node["length"] for node in model["nodes"]) > 900

        cleared = server.post("/v1/cache/clear", {}).json()["cleared"]
        assert cleared["tiny-hybrid"] == model["num_nodes"]
        assert cached(complete(server, text)) == 0


def test_the_cache_can_be_switched_off(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--cache-megabytes", "0") as server:
        first, again = complete(server, SYSTEM), complete(server, SYSTEM)

    assert [cached(first), cached(again)] == [0, 0]
    assert again["timings"]["cache"]["cause"] == "off"
    assert again["choices"] == first["choices"]


class TestRestart:
    def test_a_known_conversation_is_there_for_the_same_model_and_damage_is_reported(self, tmp_path: Path) -> None:
        settings = ("tiny-hybrid", "--cache-dir", str(tmp_path / "kept"))
        conversation = [{"role": "system", "content": prefix_node("kept")}, {"role": "user", "content": "Hello."}]
        with running(tmp_path / "log1", *settings) as server:
            first = chat(server, conversation)
            for number in range(5):
                complete(server, prefix_node(f"other {number}"))
        with running(tmp_path / "log2", *settings, "--cache-megabytes", "512") as server:
            again = chat(server, conversation)
            assert computed(again) == 1  # how much is kept changes no number
            assert again["choices"] == first["choices"]
        files = sorted((tmp_path / "kept").rglob("*.safetensors"))
        other = shutil.copytree(TINY_HYBRID, tmp_path / "other")
        for path in other.glob("*.json"):
            path.write_bytes(path.read_bytes() + b" ")
        with running(tmp_path / "log3", str(other), *settings[1:]) as server:
            assert cached(chat(server, conversation)) == 0

        damaged = files[:: len(files) // 10][:10]
        for place, path in enumerate(damaged):
            data = bytearray(path.read_bytes())
            data[place * (len(data) - 1) // 9] ^= 0x10
            path.write_bytes(bytes(data))
        with running(tmp_path / "log4", *settings) as server:
            last = chat(server, conversation)
            until(lambda: _reported(tmp_path / "log4") >= {path.name for path in damaged})

        assert last["choices"] == first["choices"]
        assert _reported(tmp_path / "log4") == {path.name for path in damaged}


def _reported(log: Path) -> set[str]:
    return set(re.findall(r"(\w+\.safetensors) is not used", log.read_text()))


def test_the_canary_looks_and_is_content(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--cache-canary") as server:
        complete(server, prefix_node("canary"))
        pattern = r'weft_prefix_cache_events\S*kind="checked"\S* (\d+)'
        until(lambda: (found := re.search(pattern, server.get("/metrics").text)) and int(found[1]) >= 8)

        assert re.search(r'kind="wrong"\S* 0', server.get("/metrics").text)
