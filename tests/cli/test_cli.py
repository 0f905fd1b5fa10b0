"""The command as a user runs it, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

WEFT = [sys.executable, "-m", "weft"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "MLX_DISABLE_COMPILE": "1"}


def weft(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **OFFLINE}
    return subprocess.run([*WEFT, *arguments], capture_output=True, text=True, env=environment, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


def test_the_shipped_model_tells_a_story_with_the_network_off() -> None:
    done = weft("run", "tiny-hybrid", "Once upon a time", "--seed", "1", "--max-tokens", "40")

    assert done.returncode == 0
    assert done.stdout.startswith("Once upon a time, there was a")
    assert "40 tokens" in done.stderr


def test_a_chat_remembers_and_ends_with_the_input() -> None:
    asked = "The code word is BRONZE-913.\nWhat is the code word?\n"
    done = weft("run", "tiny-hybrid", "--temperature", "0", "--no-think", input=asked)

    assert done.returncode == 0
    assert "BRONZE-913" in done.stdout.rsplit(">", 2)[-2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "no-such-model", "hi"), "no model 'no-such-model'"),
        (("run", "nobody/nothing", "hi"), "nobody/nothing"),
        (("run", "tiny-hybrid", "hi", "--temperature", "-3"), "temperature -3.0"),
        (("run", "tiny-hybrid", "hi", "--max-tokens", "999999"), "max_tokens 999999"),
    ],
)
def test_what_can_not_be_done_is_one_sentence_and_status_one(arguments: tuple[str, ...], words: str) -> None:
    done = weft(*arguments)

    assert done.returncode == 1
    assert done.stderr.startswith("weft: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_the_answer_quietly() -> None:
    with subprocess.Popen(
        [*WEFT, "run", "tiny-hybrid", "Once upon a time", "--seed", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **OFFLINE},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.stdout.close()
        told = process.stderr.read()

    assert "Traceback" not in told
    assert process.returncode == 141


def test_help_is_there_at_once() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert "run" in weft("--help").stdout
        times.append(time.perf_counter() - start)

    assert min(times) < 0.6  # 0.3 s on a quiet machine; test processes share the cores


def test_interrupting_stops_the_answer_and_not_the_program() -> None:
    process = subprocess.Popen(
        [*WEFT, "run", "tiny-hybrid", "--temperature", "1.5", "--seed", "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **OFFLINE},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Tell me a story.\n")
    process.stdin.flush()
    assert process.stdout.read(4)  # the prompt sign, and the answer has begun
    process.send_signal(signal.SIGINT)
    process.stdin.write("Reply with JSON. The marker is 7.\n")
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "cancelled" in err
    assert err.count("first after") == 2
    assert out.rstrip().endswith(">")
