"""Something breaks for one of eight: that one gets an error, and nobody else notices."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import pytest

from servers import Server, running
from weft.engine.faults import VARIABLE, Point

# A token of its own for every point: whoever has it in the prompt is struck there.
MARKED: dict[Point, int] = {
    "prefill": 3001, "decode": 3002, "mask": 3003, "accept": 3004, "sampler": 3005, "logprobs": 3006, "snapshot": 3007,
    "restore": 3008, "logits": 3009,
}  # fmt: skip
TROUBLED = 5  # of eight
TRUNK = [(7 * place) % 900 + 100 for place in range(150)]  # one whole chunk: what is behind it stands on it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    rules = [{"point": point, "token": token, "after": 3 * (point in LATE)} for point, token in MARKED.items()]
    log = tmp_path_factory.mktemp("faults") / "log"
    with running(log, "tiny-hybrid", "--log-format", "json", environment={VARIABLE: json.dumps(rules)}) as server:
        yield server


LATE = ("decode", "mask", "accept", "sampler", "logprobs", "logits")  # amid the answer


def body(number: int, marker: int) -> dict[str, Any]:
    """A prompt on a common trunk; every second one has a schema, every third log-probabilities."""
    prompt = [*TRUNK, marker, 200 + number, 300, *range(400, 400 + 3 * number)]
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0.5, "seed": number, "ignore_eos": True}
    if number % 2:
        asked["structured_outputs"] = {"regex": "[a-z ]{200}"}
    if number % 3 == 2:
        asked["logprobs"] = 2
    return asked


def ask(server: Server, asked: dict[str, Any]) -> Any:
    reply = server.post("/v1/completions", asked)
    return reply.json()["choices"] if reply.status_code == 200 else reply.json()["error"]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    """The answers of eight requests when nothing breaks, each alone."""
    return [ask(server, body(number, 3100)) for number in range(8)]


@pytest.mark.parametrize("point", MARKED)
def test_exactly_the_guilty_one_fails(server: Server, undisturbed: list[Any], point: Point) -> None:
    before = server.status()
    bodies = [body(number, 3100) for number in range(8)]
    bodies[TROUBLED] = body(TROUBLED, MARKED[point])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda asked: ask(server, asked), bodies))

    error = together.pop(TROUBLED)
    assert error["type"] == "server_error", error
    assert "fail" in error["message"] or "finite" in error["message"]
    assert together == [*undisturbed[:TROUBLED], *undisturbed[TROUBLED + 1 :]]
    server.wait_idle()
    after = server.status()
    assert after["engine_pid"] == before["engine_pid"]
    assert after["engine_restarts"] == 0
    assert after["memory"]["rows"] == 0
    (model,) = server.get("/v1/cache").json()["models"]
    assert all(node["pins"] == 0 for node in model["nodes"])


def test_a_poisoned_row_leaves_nothing_in_the_cache(server: Server) -> None:
    ask(server, body(0, 3100))  # the trunk is known, and what comes behind it for one that is well
    before = numbers(server)
    assert "finite" in ask(server, body(0, MARKED["logits"]))["message"]

    assert numbers(server) <= before


def numbers(server: Server) -> set[int]:
    """The chunks that are kept."""
    (model,) = server.get("/v1/cache").json()["models"]
    return {node["number"] for node in model["nodes"]}


def test_a_stream_that_fails_ends_with_an_error_and_not_with_a_stop(server: Server) -> None:
    reply = server.post("/v1/completions", {**body(0, MARKED["decode"]), "stream": True})

    assert '"error"' in reply.text
    assert "[DONE]" not in reply.text
    assert '"finish_reason":"stop"' not in reply.text


def test_the_engine_logs_as_the_server_does(server: Server) -> None:
    ask(server, body(0, MARKED["decode"]))
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    failures = [line for line in lines if line["logger"] == "weft.engine" and line["level"] == "error"]

    assert "InjectedFault" in failures[-1]["exception"]
    assert failures[-1]["time"].endswith("Z")
    assert "Traceback" not in [line for line in server.log.read_text().splitlines() if not line.startswith("{")]
