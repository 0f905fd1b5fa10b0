"""The engine's process is killed while it encodes an image: the answers are those of an engine that lives."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import signal
from pathlib import Path

from image_files import encoded, noise
from servers import Server, running
from waiting import until

IMAGE_TOKEN = 4085  # of tiny-hybrid
SLOW = json.dumps([{"point": "encode", "token": IMAGE_TOKEN, "do": "slow"}])  # each piece of an encoding takes its time
TEXT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 1000, "ignore_eos": True}


def ask(server: Server, seed: int) -> str:
    url = "data:image/png;base64," + base64.b64encode(encoded(noise(160, 128, seed), "PNG")).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    return str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"])


def text(server: Server) -> str:
    return str(server.post("/v1/completions", TEXT).json()["choices"][0]["text"])


def test_an_engine_that_is_killed_amid_an_encoding_costs_nobody_an_answer(tmp_path: Path) -> None:
    with (
        running(tmp_path / "log", "tiny-hybrid", "--heartbeat-seconds", "0.5", environment={"WEFT_TEST_FAULTS": SLOW}) as server,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        beside = threads.submit(text, server)
        until(lambda: server.status()["rows_running"] == 1, server.status)
        seen = threads.submit(ask, server, 1)
        while not (is_beside := server.status()["rows_running"] == 2) and not seen.done():
            if beside.done():  # before the image was decoded: on a busy machine that may take a while
                beside = threads.submit(text, server)
        assert is_beside
        killed, before = server.status()["engine_pid"], _encoded(server)
        os.kill(killed, signal.SIGKILL)
        was_open = not seen.done()
        answers = seen.result(), beside.result()

        assert was_open
        assert before == 0
        assert server.status()["engine_pid"] != killed
        assert answers == (ask(server, 1), text(server))
        assert answers[0] != ask(server, 2)


def _encoded(server: Server) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith('weft_images_total{kind="encoded"')]
    return sum(float(line.split()[-1]) for line in lines)
