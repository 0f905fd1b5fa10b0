"""A real Ray cluster on loopback places engines of the shipped model, loses a machine, and loses its head."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, cluster_of

from servers import Server, running
from waiting import HANG_SECONDS, until

LENGTH = 250
PLAIN = {"max_tokens": LENGTH, "ignore_eos": True}
WORDS = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 40}, "minItems": 3, "maxItems": 3}
ASKED: list[dict[str, Any]] = [
    *[{"prompt": f"There were {n} cats", **PLAIN, "temperature": 0} for n in range(13)],
    *[{"prompt": f"The big house {n}", **PLAIN, "temperature": 0.9, "seed": n, "frequency_penalty": 0.8} for n in range(13)],
    *[{"prompt": f"A red ball {n}", **PLAIN, "temperature": 0.9, "seed": n, "n": 2} for n in range(3)],
    *[{"prompt": "List:", "max_tokens": LENGTH, "seed": n, "structured_outputs": {"json": WORDS}} for n in range(3)],
]


def serving(log: Path, cluster: Cluster, *more: str, num_replicas: str = "2") -> Any:
    arguments = ("--ray", cluster.address, "--replicas", num_replicas, "--ray-resources", "CPU=1", "--drain-seconds", "0")
    return running(log, "tiny-hybrid", *arguments, *more)


def replicas(server: Server) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.status()["models"][0]["replicas"]
    return rows


def wait_all_ready(server: Server) -> None:
    until(lambda: all(row["status"] == "ready" for row in replicas(server)), server.log.read_text)


def told(reply: Any) -> Any:
    return reply.json()["choices"]


def in_trouble(server: Server, trouble: Any) -> list[Any]:
    """The answers of all at once, with trouble when both replicas compute some."""
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as threads:
        waiting = [threads.submit(server.post, "/v1/completions", asked) for asked in ASKED]
        until(lambda: all(row["rows_running"] for row in replicas(server)))
        trouble()
        return [told(answer.result(HANG_SECONDS)) for answer in waiting]


def test_a_machine_is_lost_and_its_answers_are_those_alone(short_folder: Path) -> None:
    with cluster_of(short_folder, 3) as cluster, serving(short_folder / "log", cluster) as server:
        wait_all_ready(server)
        alone = [told(server.post("/v1/completions", asked)) for asked in ASKED]
        answers = in_trouble(server, lambda: cluster.kill(2))

        assert answers == alone
        assert server.status()["models"][0]["moved"] > 0
        wait_all_ready(server)  # the machine that is left has two cores


def test_ray_s_head_is_lost_and_all_answers_go_on(short_folder: Path) -> None:
    with cluster_of(short_folder, 3) as cluster, serving(short_folder / "log", cluster) as server:
        wait_all_ready(server)
        alone = [told(server.post("/v1/completions", asked)) for asked in ASKED]
        answers = in_trouble(server, lambda: cluster.kill(0))

        assert answers == alone
        placement = until(lambda: not (one := server.status()["models"][0]["placement"])["can_place"] and one)
        assert "can not be reached" in placement["message"]
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", ASKED[0]).status_code == 200
        assert [row["engine_restarts"] for row in replicas(server)] == [0, 0]


def test_two_fronts_share_the_engines_and_the_last_one_ends_them(short_folder: Path) -> None:
    with cluster_of(short_folder, 2) as cluster:
        with serving(short_folder / "first", cluster) as first:
            wait_all_ready(first)
            with serving(short_folder / "second", cluster) as second:
                wait_all_ready(second)
                assert len(cluster.engine_pids()) == 2
                assert told(first.post("/v1/completions", ASKED[0])) == told(second.post("/v1/completions", ASKED[0]))
            assert len(cluster.engine_pids()) == 2
            pids = cluster.engine_pids()
            assert first.post("/v1/replicas/renew", {"replica": "0"}).status_code == 200
            until(lambda: len(cluster.engine_pids()) == 2 and cluster.engine_pids() != pids)
            wait_all_ready(first)
        until(lambda: cluster.engine_pids() == set())


def test_a_queue_has_a_second_engine_placed_and_all_are_answered(short_folder: Path) -> None:
    with (
        cluster_of(short_folder, 2) as cluster,
        serving(short_folder / "log", cluster, "--max-rows", "2", num_replicas="1-2") as server,
    ):
        wait_all_ready(server)
        assert len(cluster.engine_pids()) == 1
        alone = told(server.post("/v1/completions", ASKED[0]))
        is_over = threading.Event()

        def ask() -> list[Any]:
            found = []
            while not is_over.is_set():
                found.append(told(server.post("/v1/completions", ASKED[0])))
            return found

        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            waiting = [threads.submit(ask) for _ in range(24)]
            try:
                until(lambda: len(cluster.engine_pids()) == 2, server.log.read_text)
                until(lambda: len(replicas(server)) == 2 and all(row["rows_running"] for row in replicas(server)))
            finally:
                is_over.set()
            answers = [answer for one in waiting for answer in one.result(HANG_SECONDS)]

        assert answers == [alone] * len(answers)
        assert server.status()["models"][0]["scaling"]["wanted"] == 2


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "ray 127.0.0.1:1: nobody listens there"), ("auto", "Could not find any running Ray instance")],
)
def test_a_cluster_that_is_not_there_is_said_in_a_sentence(tmp_path: Path, address: str, words: str) -> None:
    command = [sys.executable, "-m", "weft", "serve", "tiny-hybrid", "--ray", address, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=tmp_path, check=False)

    assert ended.returncode == 1
    assert words in ended.stderr
    assert "weft listens" not in ended.stderr
