"""The keeper of a gate, with a script in the gate's place; and the gate that a keeper keeps, as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from waiting import HANG_SECONDS, until
from weft.config import GateConfig
from weft.serving.engine_keeper import COMMAND, END_SECONDS, HOLD_SECONDS, EngineKeeper
from weft.serving.kept_gate import GateNews

CONFIG = GateConfig("m", drain_seconds=0.0)
# Says its own pid as its port, and ends with stdin.
SCRIPT = """
import json, os, sys
assert json.loads(sys.stdin.readline())["model"] == "m"
print(json.dumps({"address": f"127.0.0.1:{os.getpid()}"}), flush=True)
sys.stdin.read()
"""
FAILING = 'import sys; print(\'{"failed": "no such model"}\', flush=True); sys.exit(1)'


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keeper(script: str = SCRIPT, clock: Clock | None = None) -> EngineKeeper:
    return EngineKeeper(CONFIG, command=(sys.executable, "-c", script), clock=clock or Clock())


def address(keeper: EngineKeeper) -> str:
    return until(lambda: keeper.hold("front").address) or ""


def test_who_holds_an_engine_is_told_where_it_listens() -> None:
    one = keeper()

    assert address(one) == f"127.0.0.1:{one.pid}"
    one.end()


def test_a_gate_that_was_killed_is_started_again() -> None:
    one = keeper()
    before = address(one)
    os.kill(one.pid, signal.SIGKILL)

    assert until(lambda: address(one) != before)
    one.end()


def test_a_renewed_gate_is_another_process() -> None:
    one = keeper()
    before = address(one)
    one.renew()

    assert address(one) != before
    one.end()


@pytest.mark.parametrize(("script", "words"), [(FAILING, "no such model"), ("import sys; sys.exit(3)", "status 3")])
def test_a_gate_that_fails_is_not_started_again(script: str, words: str) -> None:
    one = keeper(script)

    assert words in str(until(lambda: one.hold("front").failed))
    assert words in str(one.hold("front").failed)
    one.end()


def test_what_a_gate_said_last_is_awaited_after_its_end(tmp_path: Path) -> None:
    said = tmp_path / "said"
    os.mkfifo(said)
    # The process ends at once; what it said comes through its output when the test lets it.
    one = keeper(f"import os, sys; os.fork() and os._exit(1); open({str(said)!r}).read(); {FAILING}")
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)

    assert one.hold("front") == GateNews()
    said.write_text("now")
    assert until(lambda: one.hold("front").failed) == "no such model"
    one.end()


def test_what_a_gate_left_behind_does_not_hide_its_end(tmp_path: Path) -> None:
    left, clock = tmp_path / "left", Clock()
    os.mkfifo(left)
    one = keeper(f"import os; os.fork() and os._exit(1); open({str(left)!r}).read()", clock)
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)

    assert one.hold("front") == GateNews()
    clock.now += END_SECONDS
    assert "status 1" in str(one.hold("front").failed)
    left.write_text("now")
    one.end()


def test_an_engine_is_held_until_the_last_front_lets_go() -> None:
    one = keeper()
    one.hold("a")
    one.hold("b")

    assert not one.release("a")
    assert one.release("b")
    assert not one.is_held
    one.end()


def test_a_front_that_is_silent_holds_nothing() -> None:
    clock = Clock()
    one = keeper(clock=clock)
    one.hold("front")
    clock.now += HOLD_SECONDS - 1

    assert one.is_held
    clock.now += 1
    assert not one.is_held
    one.end()


def test_a_new_engine_waits_for_its_first_front() -> None:
    clock = Clock()
    one = keeper(clock=clock)

    assert one.is_held
    clock.now += HOLD_SECONDS
    assert not one.is_held
    one.end()


def test_the_end_of_the_keeper_ends_its_gate() -> None:
    one = keeper()
    address(one)
    one.end()

    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


def run_gate(config: GateConfig) -> tuple[GateNews, int]:
    """What a kept gate says first, and how it ends when its keeper is gone."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        news = msgspec.json.decode(process.stdout.readline(), type=GateNews)
        process.stdin.close()
        return news, process.wait(HANG_SECONDS)


def test_a_kept_gate_listens_and_ends_with_its_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    news, status = run_gate(GateConfig("tiny-hybrid", listen="127.0.0.1:0", drain_seconds=0.0))

    assert str(news.address).startswith("127.0.0.1:")
    assert status == 0


def test_a_kept_gate_says_why_it_can_not_listen() -> None:
    news, status = run_gate(GateConfig("tiny-hybrid", listen="0.0.0.0:0", engine_key="/nowhere/engine.key"))

    assert "/nowhere/engine.key" in str(news.failed)
    assert status == 1
