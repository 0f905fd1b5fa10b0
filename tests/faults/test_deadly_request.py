"""A request that takes the engine down with it, each time: it is found and failed, and the others' answers are whole."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path
from typing import Any

import pytest

from servers import Server, running
from weft.engine.faults import VARIABLE

DEADLY = 3001


def ask(server: Server, prompt: list[int]) -> dict[str, Any]:
    reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True})
    body: dict[str, Any] = reply.json()
    return body


@pytest.mark.parametrize("do", ["kill", "hang"])
def test_the_deadly_request_fails_and_the_others_are_answered(tmp_path: Path, do: str) -> None:
    rules = [{"point": "turn", "token": DEADLY, "do": do, "after": 4}]
    prompts = [[200 + number, 300, 401, 502] for number in range(7)]
    settings = ("tiny-hybrid", "--hang-seconds", "3")
    with running(tmp_path / "log", *settings, environment={VARIABLE: json.dumps(rules)}) as server:
        alone = [ask(server, prompt)["choices"] for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            deadly = pool.submit(ask, server, [DEADLY, 300, 401])
            others = list(pool.map(lambda prompt: ask(server, prompt), prompts))

        assert [reply["choices"] for reply in others] == alone
        error = deadly.result()["error"]
        assert error["type"] == "server_error"
        assert server.status()["engine_restarts"] in (4, 5)  # twice among others, perhaps once beside proven ones, twice alone
        assert ask(server, prompts[0])["choices"] == alone[0]
