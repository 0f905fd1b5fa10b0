"""The command line as such: help, mistakes, and the model that comes with weft loaded in process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_command import WEFT, environment, weft

from weft.cli import COMMANDS as SUMMARIES
from weft.cli import main, make_command_line

STORY = ("run", "tiny-hybrid", "Once upon a time", "--local", "--seed", "1")


def test_the_shipped_model_tells_a_story_with_the_network_off(tmp_path: Path) -> None:
    done = weft(tmp_path, *STORY, "--max-tokens", "40")

    assert done.returncode == 0
    assert done.stdout.startswith("Once upon a time, there was a")
    assert "40 tokens" in done.stderr


def test_what_is_piped_in_follows_the_prompt(tmp_path: Path) -> None:
    told = weft(tmp_path, "run", "tiny-hybrid", "Once upon", "--local", "--max-tokens", "2", stdin="a time\n")

    assert told.stdout.startswith("Once upon\n\na time")


def test_what_is_piped_in_is_the_prompt_where_there_is_none(tmp_path: Path) -> None:
    piped = weft(tmp_path, "run", "tiny-hybrid", *STORY[3:], "--max-tokens", "9", stdin="Once upon a time\n")
    given = weft(tmp_path, *STORY, "--max-tokens", "9")

    assert piped.stdout == given.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "no-such-model", "hi"), "no model 'no-such-model'"),
        (("run", "nobody/nothing", "hi"), "nobody/nothing"),
        (("run", "tiny-hybrid", "hi", "--local", "--temperature", "-3"), "temperature -3.0"),
        (("run", "tiny-hybrid", "hi", "--local", "--max-tokens", "999999"), "max_tokens 999999"),
        (("run", "tiny-hybrid", "--local"), "no prompt"),
        (("run", "tiny-hybrid", "hi", "--temprature", "1"), "--temperature"),
    ],
)
def test_what_can_not_be_done_is_one_sentence_and_status_one(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = weft(tmp_path, *arguments)

    assert done.returncode == 1
    assert done.stderr.startswith("weft: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")  # it reads sys.argv, as for a user
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "MODEL"),
        (("rum", "tiny-hybrid"), "run"),
        (("serve", "tiny-hybrid", "--continuous-batching"), "--continuous-batching"),
        (("serve", "tiny-hybrid", "--mllm"), "--mllm"),
        (("pull", "no-such-model"), "no model 'no-such-model'"),
        (("ps", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("ps", "--url", "localhost"), "'localhost' is no server's address"),
        (("load", "tiny-hybrid", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("unload", "tiny-hybrid", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("cache", "ls", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("cache", "clear", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("cache", "why", "x", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("cache", "why"), "REQUEST_ID"),
    ],
)
def test_what_is_mistaken_is_one_sentence_and_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err

    assert ended.value.code == 1
    assert told.startswith("weft: ")
    assert told.count("\n") == 1
    assert words in told


def test_a_reader_that_leaves_ends_the_answer_quietly(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*WEFT, *STORY], env=environment(tmp_path),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.stdout.close()
        told = process.stderr.read()

    assert "Traceback" not in told
    assert process.returncode == 141


def test_weft_s_help_has_the_first_line_of_every_command_s_own() -> None:
    resolved = make_command_line().resolved_commands()

    assert {name: resolved[name].help.split("\n\n")[0] for name in SUMMARIES} == SUMMARIES


def test_help_waits_for_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "weft", "--help"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    imported = {module.partition(".")[0] for module in modules}

    assert "serve" in done.stdout
    assert not {module for module in modules if module.startswith("weft.cli.")}
    assert "cyclopts" in imported
    assert not imported & {"mlx", "mlx_lm", "numpy", "starlette", "uvicorn", "tokenizers", "zmq", "jinja2", "huggingface_hub"}


COMMANDS = [
    "serve",
    "run",
    "ls",
    "pull",
    "ps",
    "load",
    "unload",
    "launch",
    "cache ls",
    "cache clear",
    "cache why",
    "doctor",
    "bench serve",
    "top",
]


@pytest.mark.parametrize("command", [*COMMANDS, "service install", "service status", "service uninstall", "completion"])
def test_every_command_has_an_example_in_its_help(tmp_path: Path, command: str) -> None:
    assert f"For example:\n  weft {command}" in weft(tmp_path, *command.split(), "--help").stdout


def chat(home: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A chat with somebody at a terminal, whose keyboard is the file descriptor."""
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        [*WEFT, "run", *arguments], env=environment(home),
        stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(terminal)
    return process, keyboard


def test_a_chat_remembers_and_ends_with_the_input(tmp_path: Path) -> None:
    process, keyboard = chat(tmp_path, "tiny-hybrid", "--local", "--temperature", "0", "--no-think")
    os.write(keyboard, b"The code word is BRONZE-913.\nWhat is the code word?\n\x04")
    told, _ = process.communicate(timeout=60)
    os.close(keyboard)

    assert process.returncode == 0
    assert "BRONZE-913" in told.rsplit(">", 2)[-2]


def test_interrupting_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    process, keyboard = chat(tmp_path, "tiny-hybrid", "--local", "--temperature", "1.5", "--seed", "1")
    os.write(keyboard, b"Tell me a story.\n")
    assert process.stdout is not None
    assert process.stdout.read(4)  # the prompt sign, and the answer has begun
    process.send_signal(signal.SIGINT)
    os.write(keyboard, b"Reply with JSON. The marker is 7.\n\x04")
    told, notes = process.communicate(timeout=60)
    os.close(keyboard)

    assert process.returncode == 0
    assert "cancelled" in notes
    assert notes.count("first after") == 2
    assert told.rstrip().endswith(">")
