"""`weft serve` as a whole: how it comes up, and that nothing of it stays when it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servers import Server, running
from waiting import HANG_SECONDS, until


def is_alive(process: int) -> bool:
    """Whether a process runs; one that nobody has asked after its end does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_network_the_model_of_the_package_is_served_and_the_notice_says_so(tmp_path: Path) -> None:
    cut_off = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    with running(tmp_path / "log", environment=cut_off) as server:
        models = [model["id"] for model in server.get("/v1/models").json()["data"]]
        reply = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0})

    assert models == ["tiny-hybrid"]
    assert reply.json()["choices"][0]["text"] == ", there"
    assert "smollm2 could not be had, so tiny-hybrid is served instead" in (tmp_path / "log").read_text()


def test_a_name_that_is_no_model_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", "serve", str(tmp_path / "nothing"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    assert ended.returncode == 1
    assert "no model" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_known_at_once(server: Server) -> None:
    command = [sys.executable, "-m", "weft", "serve", "tiny-hybrid", "--port", str(server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    assert ended.returncode == 1
    assert f"port {server.port}" in ended.stderr
    assert "--port" in ended.stderr


def test_what_can_be_reached_from_elsewhere_needs_a_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", "serve", "tiny-hybrid", "--host", "0.0.0.0", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd=tmp_path)

    assert ended.returncode == 1
    assert "--api-key" in ended.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_server_and_engine_though_streams_run(tmp_path: Path, how: signal.Signals) -> None:
    with running(tmp_path / "log", "tiny-hybrid", "--drain-seconds", "1") as server:
        engine = server.status()["engine_pid"]
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "n": 16}
        with server.stream("/v1/completions", body) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(server.process.pid, how)
            rest = "\n".join(lines)
        status = server.process.wait(HANG_SECONDS)
        until(lambda: not is_alive(engine))

    assert status == 0
    assert "data: [DONE]" in rest or '"error"' in rest  # finished in time, or told that it was not
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_an_engine_ends_when_its_front_is_killed(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid") as server:
        engine = server.status()["engine_pid"]
        server.process.kill()

        until(lambda: not is_alive(engine))


def test_a_killed_engine_is_replaced_and_health_tells_the_truth(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid") as server:
        engine = server.status()["engine_pid"]
        os.kill(engine, signal.SIGKILL)
        server.wait_dead()
        server.wait_ready()
        status = server.status()
        reply = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0})

    assert status["engine_pid"] != engine
    assert status["engine_restarts"] == 1
    assert reply.json()["choices"][0]["text"] == ", there"
