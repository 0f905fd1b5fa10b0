"""`weft engine` twice and `weft serve --engines`: processes as users start them, with a key, one stopped amid answers."""

from __future__ import annotations

import concurrent.futures
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from servers import Server, running
from waiting import HANG_SECONDS, until

ASKED: list[dict[str, Any]] = [
    *[{"prompt": f"There were {n} cats", "max_tokens": 400, "ignore_eos": True, "temperature": 0} for n in range(2)],
    {"prompt": "A red ball", "max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": 6, "n": 2},
    {"prompt": "Digits:", "max_tokens": 400, "seed": 8, "structured_outputs": {"regex": "[0-9]{300}"}},
]


@contextmanager
def engine(folder: Path, name: str, key: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`weft engine` at a free port; gives its process and address."""
    log = folder / name
    command = [sys.executable, "-m", "weft", "engine", "tiny-hybrid", "--listen", "127.0.0.1:0", "--engine-key", str(key)]
    with log.open("wb") as errors, subprocess.Popen([*command, "--drain-seconds", "0"], stderr=errors) as process:
        try:
            found = until(lambda: re.search(r"listens at tcp://(\S+)", log.read_text()), log.read_text)
            assert found
            yield process, found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(HANG_SECONDS)


def told(reply: dict[str, Any]) -> Any:
    return reply["choices"], reply["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "engine.key"
    subprocess.run([sys.executable, "-m", "weft", "key", str(path)], check=True, capture_output=True)
    return path


def test_answers_go_on_in_the_other_engine_when_one_is_stopped(tmp_path: Path, key: Path) -> None:
    with ExitStack() as stack:
        (one, first), (_, second) = [stack.enter_context(engine(tmp_path, name, key)) for name in ("one", "two")]
        options = ("--engines", f"{first},{second}", "--engine-key", str(key))
        server: Server = stack.enter_context(running(tmp_path / "log", *options))
        until(lambda: [one["status"] for one in server.status()["models"][0]["replicas"]] == ["ready", "ready"])
        assert server.status()["models"][0]["id"] == "tiny-hybrid"
        alone = [told(server.post("/v1/completions", body).json()) for body in ASKED]
        with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as threads:
            answers = [threads.submit(server.post, "/v1/completions", body) for body in ASKED]
            until(lambda: server.status()["models"][0]["replicas"][0]["rows_running"])
            one.send_signal(signal.SIGTERM)
            found = [told(answer.result(HANG_SECONDS).json()) for answer in answers]

        assert found == alone
        assert one.wait(HANG_SECONDS) == 0
        assert server.status()["models"][0]["moved"] > 0
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny-hybrid", "--listen", "0.0.0.0:8500"], "there is no engine key: make one with `weft key`"),
        (["tiny-hybrid", "--listen", "x y"], "is no address of an engine"),
        (["tiny-hybrid", "--engine-key", "/nowhere"], "can not be read"),
        (["tiny-hybrid", "--max-rows", "0"], "max_rows 0 must be at least 1"),
    ],
)
def test_what_an_engine_can_not_be_started_with_is_said_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "weft", "engine", *arguments], check=False, capture_output=True, text=True)

    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
