"""`weft serve`: where its settings come from, what is refused, and what the operator sees."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_command import weft

from weft.cli.serve import Terminal
from weft.config import EngineSettings, ServerConfig
from weft.errors import WeftError
from weft.serving.server import make_service


def settings(home: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    done = weft(home, "serve", "--dump-config", *arguments, **variables)
    assert done.stderr == ""
    table: dict[str, Any] = tomllib.loads(done.stdout)["serve"]
    return table


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[serve]\n{text}\n")


def test_a_flag_wins_over_a_variable_over_the_near_file_over_the_far_one(tmp_path: Path) -> None:
    write(tmp_path / ".config/weft/config.toml", "port = 1\nmax_queue = 1\ndrain_seconds = 1\nbody_seconds = 1")
    write(tmp_path / "weft.toml", 'port = 2\nmax_queue = 2\ndrain-seconds = 2\nmodels = ["a", "b"]')
    got = settings(tmp_path, "--port", "4", WEFT_PORT="3", WEFT_MAX_QUEUE="3")

    assert (got["port"], got["max_queue"], got["drain_seconds"], got["body_seconds"]) == (4, 3, 2, 1)
    assert got["heartbeat_seconds"] == ServerConfig.heartbeat_seconds
    assert got["models"] == ["a", "b"]


def test_a_named_file_is_read_alone(tmp_path: Path) -> None:
    write(tmp_path / "weft.toml", "port = 2\nmax_queue = 2")
    write(tmp_path / "own.toml", "port = 5")
    got = settings(tmp_path, "--config", "own.toml")

    assert (got["port"], got["max_queue"]) == (5, ServerConfig.max_queue)


def test_keys_come_from_flags_or_from_a_variable_with_commas_and_are_not_shown(tmp_path: Path) -> None:
    by_flag = settings(tmp_path, "a", "--api-key", "SECRET-1", "--api-key", "SECRET-2", "--api-key", "SECRET-3")
    by_variable = weft(tmp_path, "serve", "--dump-config", WEFT_API_KEY="SECRET-1, SECRET-2", WEFT_MODELS="b,c").stdout

    assert by_flag["api_key"] == ["********"] * 3
    assert tomllib.loads(by_variable)["serve"]["api_key"] == ["********"] * 2
    assert tomllib.loads(by_variable)["serve"]["models"] == ["b", "c"]
    assert "SECRET" not in by_variable


@pytest.mark.parametrize("blank", ["", " ", " , "])
def test_a_variable_with_a_blank_key_does_not_open_the_door(tmp_path: Path, blank: str) -> None:
    done = weft(tmp_path, "serve", "--dump-config", WEFT_API_KEY=blank)

    assert done.returncode == 1
    assert "WEFT_API_KEY is set and has no key in it" in done.stderr
    assert settings(tmp_path, "--api-key", "SECRET", WEFT_API_KEY=blank)["api_key"] == ["********"]


def test_a_flag_can_switch_off_what_a_file_switched_on(tmp_path: Path) -> None:
    write(tmp_path / "weft.toml", "exact = true\ninsecure = true")
    got = settings(tmp_path, "--no-exact")

    assert (got["exact"], got["insecure"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nprot = 3", "a setting 'prot' that weft does not know; did you mean 'port'?"),
        ("[serve]\nconfig = 'x'", "a setting 'config'"),
        ("port = 3", "'port' outside of the table [serve]"),
        ("[server]\nport = 3", "'server' outside of the table [serve]"),
        ("serve = 3", "outside of the table [serve]"),
        ("[serve", "is not TOML"),
        ("[serve]\nport = 'x'", "[port] from weft.toml"),
        ("[serve]\nlate_system = 'x'", 'Choose from: "fold", "hoist"'),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "weft.toml").write_text(text)
    done = weft(tmp_path, "serve", "--dump-config")

    assert done.returncode == 1
    assert done.stderr.startswith("weft: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "weft.toml" in done.stderr


def test_a_named_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "own.toml can not be read" in weft(tmp_path, "serve", "--config", "own.toml").stderr


def test_other_machines_are_not_let_in_without_a_key(tmp_path: Path) -> None:
    done = weft(tmp_path, "serve", "--host", "0.0.0.0")

    assert done.returncode == 1
    assert all(words in done.stderr for words in ("0.0.0.0", "--api-key", "WEFT_API_KEY", "--insecure"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_this_machine_needs_no_key(host: str) -> None:
    ServerConfig(host=host).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", "localhost.example.org", ""])
def test_any_other_address_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(WeftError, match="--api-key"):
        ServerConfig(host=host).check()
    ServerConfig(host=host, insecure=True).check()
    ServerConfig(host=host, api_keys=("k",)).check()
    ServerConfig(host=host, keys_file="keys.toml").check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000}, {"port": -1}, {"max_rows": 0}, {"max_queue": -1}, {"max_body_bytes": 0}, {"api_keys": ("",)},
        {"api_keys": ("a", " ")}, {"keys_file": ""}, {"requests_per_minute": 0}, {"tokens_per_minute": -1},
        {"body_seconds": 0.0}, {"heartbeat_seconds": float("nan")}, {"drain_seconds": -1.0},
        {"cache_dir_megabytes": 0}, {"cache_dir": ""}, {"cache_dir": "x", "cache_megabytes": 0},
        {"cache_canary": True, "cache_megabytes": 0}, {"memory": 0}, {"request_timeout": 0.0}, {"request_timeout": -1.0},
        {"request_timeout": float("inf")},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_can_not_be_is_named(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(WeftError, match="API key" if name == "api_keys" else name):
        ServerConfig(**wrong).check()


def engine_settings(**settings: Any) -> EngineSettings:
    """What an engine of a server with these settings is told."""
    return make_service(ServerConfig(("m",), **settings)).models[0].pool.settings


def test_the_folder_for_prompts_reaches_the_engine_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/eve")
    given = engine_settings(cache_dir="~/kept", cache_dir_megabytes=2, cache_canary=True)

    assert (given.cache_folder, given.cache_folder_bytes, given.cache_canary) == ("/home/eve/kept", 2 * 2**20, True)
    assert engine_settings(cache_dir_megabytes=2).cache_folder is None
    assert not engine_settings().cache_canary


def test_the_memory_reaches_the_engine_in_bytes_and_only_when_it_is_given() -> None:
    assert engine_settings(memory=512).memory_bytes == 512 * 2**20
    assert engine_settings().memory_bytes is None


@pytest.mark.parametrize(
    ("given", "sources"),
    [
        ("auto", ("forced", "lookup", "mtp")),
        ("off", ()),
        ("lookup", ("lookup",)),
        ("mtp, forced", ("forced", "mtp")),
    ],
)
def test_the_sources_of_drafts_reach_the_engine(given: str, sources: tuple[str, ...]) -> None:
    assert engine_settings(speculate=given).speculate == sources
    assert engine_settings().speculate == ("forced", "lookup", "mtp")


@pytest.mark.parametrize("given", ["", "on", "lookup,", "prediction", "off,lookup", "AUTO"])
def test_a_source_of_drafts_that_is_none_is_named_with_the_choices(given: str) -> None:
    with pytest.raises(WeftError, match="must be auto, off, or some of forced, lookup, mtp, separated by commas"):
        ServerConfig(speculate=given).check()


def test_the_sources_of_drafts_come_from_a_flag_a_variable_or_a_file(tmp_path: Path) -> None:
    write(tmp_path / "weft.toml", 'speculate = "off"')

    assert settings(tmp_path)["speculate"] == "off"
    assert settings(tmp_path, WEFT_SPECULATE="lookup,mtp")["speculate"] == "lookup,mtp"
    assert settings(tmp_path, "--speculate", "forced", WEFT_SPECULATE="lookup,mtp")["speculate"] == "forced"
    assert "some of forced, lookup, mtp" in weft(tmp_path, "serve", "--dump-config", "--speculate", "draft").stderr


def test_the_log_format_reaches_the_engine() -> None:
    assert engine_settings(log_format="json").log_format == "json"


def test_the_screen_ends_with_three_lines_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal() as screen:
        screen.serving("http://127.0.0.1:8400")
        screen.loading("it's", "reading weights", 5, 10)
        screen.loading("it's", "reading weights", 10, 10)
        screen.ready("it's", 2048, "cpu", {"weights": 13_000_000, "rows": 2_000}, "the default model could not be fetched")
        screen.ready("second", 4096, "cpu", {"weights": 1})
        screen.failed("third", "there is no such model")
    told = capsys.readouterr()
    lines = told.err.splitlines()
    curl, python, export = (next(line for line in lines if line.startswith(word)) for word in ("curl ", "python ", "export "))

    assert told.out == ""
    assert lines.count("it's: reading weights") == 1
    assert "it's: context 2,048 tokens, on cpu; memory: weights 13.0 MB, rows 2.0 kB" in lines
    assert "it's: the default model could not be fetched" in lines
    assert "weft: third: there is no such model" in lines
    assert json.loads(shlex.split(curl)[-1])["model"] == "it's"
    assert "it's" in shlex.split(python)[-1]
    compile(shlex.split(python)[-1], "line", "exec")
    assert export == "export OPENAI_BASE_URL=http://127.0.0.1:8400/v1 OPENAI_API_KEY=none"
    assert sum(line.startswith("curl ") for line in lines) == 1


def test_the_lines_to_copy_name_the_key_s_variable_and_not_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(has_key=True) as screen:
        screen.ready("m", 2048, "cpu", {})
        screen.serving("http://127.0.0.1:8400")

    assert 'Bearer $WEFT_API_KEY" ' in capsys.readouterr().err


def test_whether_control_tokens_are_parsed_reaches_the_models() -> None:
    made = [make_service(ServerConfig(("m",), parse_special=wanted)).models[0]._make_text_codec for wanted in (False, True)]

    assert [one.keywords["parse_special"] for one in made] == [False, True]
