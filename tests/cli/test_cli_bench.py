"""`weft bench serve`: what its clients ask, and what is made of what they saw."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from cli_server import running

from weft.cli.bench import BenchOptions, RequestTrace, bench_serve_command, summarize
from weft.cli.client import ServerClient
from weft.errors import WeftError


@pytest.mark.xdist_group("served")
def test_a_crowd_has_prompts_of_the_length_asked_for_that_share_a_beginning(
    served: ServerClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    options = BenchOptions(
        clients=3, requests=7, prompt_tokens=200, max_tokens=5, shared_prefix=128, url=served.url, json_file=file
    )
    status = bench_serve_command(options)
    told = capsys.readouterr().out
    document = json.loads(file.read_text())

    assert status == 0
    assert told.splitlines()[0].split("  ")[:2] == ["tiny-hybrid", "7 requests"]
    assert document["summary"]["tokens"] == 35
    assert document["summary"]["errors"] == {}
    assert {request["prompt_tokens"] for request in document["requests"]} == {200}
    assert sorted(request["cached_tokens"] for request in document["requests"])[3:] == [128] * 4  # the first three come at once
    assert all(request["start"] < request["first"] <= request["end"] for request in document["requests"])
    assert {request["client"] for request in document["requests"]} == {0, 1, 2}


def test_an_agent_s_turns_grow_one_conversation() -> None:
    with running() as server:
        status = bench_serve_command(BenchOptions(clients=2, requests=5, replay=True, model="tiny-hybrid", url=server.url))
    told = [body["messages"] for path, body in server.asked if path == "/v1/chat/completions"]
    agents = {messages[1]["content"]: [each for each in told if each[1] == messages[1]] for messages in told}

    assert status == 0
    assert sorted(map(len, agents.values())) == [2, 3]
    for turns in agents.values():
        assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(turns))
    longest = max(told, key=len)
    assert [message["role"] for message in longest] == ["system", "user", "assistant", "tool", "assistant", "user"]


def test_what_fails_is_counted_by_its_kind_and_ends_an_agent(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as server:
        options = BenchOptions(clients=2, requests=6, max_tokens=999_999, replay=True, model="tiny-hybrid", url=server.url)
        status = bench_serve_command(options)

    assert status == 1
    assert "2 failed: max_tokens N is too much" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions(clients=0), "--clients 0 must be at least 1"),
        (BenchOptions(prompt_tokens=10, shared_prefix=10), "--shared-prefix 10 must be between 0 and --prompt-tokens 10"),
    ],
)
def test_a_load_that_can_not_be_is_refused_before_anything_is_asked(options: BenchOptions, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        bench_serve_command(options)


def test_a_model_must_be_chosen_where_there_are_several() -> None:
    with running() as server, pytest.raises(WeftError, match="choose one with --model"):
        bench_serve_command(BenchOptions(url=server.url))


def test_figures_are_those_of_the_requests_that_succeeded() -> None:
    asked = [
        RequestTrace(0, 0.0, 1.0, 3.0, [0.1] * 19 + [0.5], 100, 40, 21, 0.5, 2.0),
        RequestTrace(1, 0.5, 2.0, 4.0, [0.2] * 20, 100, 0, 21, 1.0, 1.0),
        RequestTrace(1, 4.0, None, 5.0, error="broke off"),
    ]
    summary = summarize(asked, "m", 2, 5.0)

    assert (summary["requests"], summary["prompt_tokens"], summary["cached_tokens"], summary["tokens"]) == (3, 200, 40, 42)
    assert summary["prefill_per_second"] == 160 / 2.0  # from 0 to 2 somebody waited
    assert summary["decode_per_second"] == 42 / 5.0
    assert summary["request_decode_per_second"] == 20.0
    assert summary["first_token"] is not None
    assert (summary["first_token"]["p50"], summary["first_token"]["max"]) == (1.5, 1.5)
    assert summary["gap"] is not None
    assert (summary["gap"]["p50"], summary["gap"]["p95"], summary["gap"]["max"]) == (0.2, 0.2, 0.5)
    assert summary["errors"] == {"broke off": 1}
