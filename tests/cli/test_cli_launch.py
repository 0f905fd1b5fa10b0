"""`weft launch`: what each agent is told, and that it is started with it.

What `--print` shows of each agent stands in `launched/`. `python tests/cli/test_cli_launch.py` writes it anew; read the
difference.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_command import weft
from cli_server import running

from weft.cli.launch import AGENTS, KEY, MAX_OUTPUT, NO_KEY, Agent, Target, shell_script

FOLDER = Path(__file__).parent / "launched"
TARGET = Target("http://127.0.0.1:8400", NO_KEY, "org/model-4bit", 65536, Path("/home/me/.local/share/weft/agents/NAME"))
SECRET = Target("https://weft.example", "s3cret", "m", 4096, Path("/data/my agents"))
AGENT = """#!/bin/sh
echo "arguments: $@"
env | sort
"""


def shown(name: str, target: Target = TARGET) -> str:
    agent = AGENTS[name].pointed_at(target)
    return shell_script(agent, target, [name, *agent.arguments, "--help"])


@pytest.mark.parametrize("name", AGENTS)
def test_what_an_agent_is_told_is_as_written(name: str) -> None:
    assert shown(name) == (FOLDER / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", AGENTS)
def test_the_server_s_key_is_neither_shown_nor_written(name: str) -> None:
    agent = AGENTS[name].pointed_at(SECRET)

    assert SECRET.key in agent.environment.values()
    assert not any(SECRET.key in text for text in (*agent.files.values(), *agent.arguments))
    assert SECRET.key not in shown(name, SECRET)
    assert KEY in shown(name, SECRET)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_told_server_model_and_a_place_of_its_own(name: str) -> None:
    told = _told(AGENTS[name].pointed_at(TARGET))

    assert TARGET.url in told
    assert TARGET.model in told
    assert str(TARGET.folder) in told


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_told_the_true_context(name: str) -> None:
    told = _told(AGENTS[name].pointed_at(TARGET))

    assert str(TARGET.context) in told or str(TARGET.context - TARGET.output) in told


def _told(agent: Agent) -> str:
    return "\n".join([*agent.environment.values(), *agent.files.values(), *agent.arguments])


def test_an_answer_takes_a_quarter_of_a_context_and_never_too_much() -> None:
    assert (SECRET.output, TARGET.output) == (1024, 16384)
    assert Target("u", "k", "m", 1_000_000, Path()).output == MAX_OUTPUT


def test_what_codex_is_told_is_toml() -> None:
    flags = AGENTS["codex"].pointed_at(TARGET).arguments
    settings = tomllib.loads("\n".join(flag for flag in flags if flag != "-c"))

    assert settings["model_context_window"] == 65536
    assert settings["model_providers"]["weft"]["wire_api"] == "responses"
    assert flags[::2] == ["-c"] * (len(flags) // 2)


def test_what_is_shown_is_what_a_shell_does(tmp_path: Path) -> None:
    target = Target("http://u", NO_KEY, "it's", 4096, tmp_path / "a folder")
    agent = AGENTS["qwen"].pointed_at(target)
    ran = subprocess.run(["sh"], input=shell_script(agent, target, ["env"]), capture_output=True, text=True, check=True)

    assert f"QWEN_HOME={target.folder}" in ran.stdout.splitlines()
    assert (target.folder / "weft.json").read_text() == agent.files["weft.json"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a program called qwen that tells what it was told."""
    program = tmp_path / "bin" / "qwen"
    program.parent.mkdir()
    program.write_text(AGENT)
    program.chmod(0o755)
    return tmp_path


def launch(home: Path, *arguments: str, **variables: str) -> Any:
    return weft(home, "launch", *arguments, PATH=f"{home}/bin:/usr/bin:/bin", **variables)


def test_the_agent_is_started_with_its_files_and_its_own_arguments(home: Path) -> None:
    with running() as server:
        server.key = "right"
        done = launch(home, "qwen", "--model", "tiny-hybrid", "--url", server.url, "--api-key", "right", "--", "-p", "hi you")
        folder = home / ".local/share/weft/agents/qwen"
        settings = json.loads((folder / "weft.json").read_text())

    assert done.returncode == 0
    told = done.stdout.splitlines()
    assert told[0] == "arguments: -p hi you"
    assert {f"QWEN_HOME={folder}", "WEFT_API_KEY=right", f"HOME={home}"} <= set(told)
    (model,) = settings["modelProviders"]["openai"]
    assert (model["id"], model["baseUrl"]) == ("tiny-hybrid", f"{server.url}/v1")
    assert model["generationConfig"]["contextWindowSize"] == 2048
    assert "no place for tools" in done.stderr
    assert "a context of 2048 tokens" in done.stderr


def test_showing_starts_and_writes_nothing(home: Path) -> None:
    with running() as server:
        done = launch(home, "qwen", "--model", "tiny-hybrid", "--print", WEFT_URL=server.url, XDG_DATA_HOME=str(home / "data"))

    assert done.stdout.splitlines()[0] == "# qwen speaks /v1/chat/completions"
    assert "no place for tools" in done.stderr
    assert "a context of 2048 tokens" in done.stderr
    assert "arguments:" not in done.stdout
    assert done.stdout.splitlines()[-1] == "qwen"
    assert f"export QWEN_HOME={home}/data/weft/agents/qwen" in done.stdout
    assert not (home / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("quen",), "weft knows no agent 'quen'; did you mean 'qwen'?"),
        (("emacs",), "weft knows no agent 'emacs'; there are claude, codex, opencode"),
        (
            ("codex", "--model", "tiny-hybrid"),
            "codex is not installed, or not in PATH; install it with `npm install -g @openai/codex`",
        ),
        (("qwen",), "the server has several models (tiny-hybrid, other); choose one with --model"),
        (("qwen", "--model", "nobody"), "no model 'nobody' is served; there is tiny-hybrid, other"),
        (("qwen", "--model", "other"), "other is still being loaded"),
        (("qwen", "--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
    ],
)
def test_what_can_not_be_started_is_one_sentence(home: Path, arguments: tuple[str, ...], words: str) -> None:
    with running() as server:
        done = launch(home, *arguments, WEFT_URL=server.url)

    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert words in done.stderr


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for agent_name in AGENTS:
        (FOLDER / f"{agent_name}.sh").write_text(shown(agent_name))
