"""`weft service` and `weft completion`, and that every command has an example."""

from __future__ import annotations

import plistlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from cyclopts import App

from weft.cli import app, completion, service_unit
from weft.cli.service_unit import Launchd, Systemd
from weft.errors import WeftError

MANAGER = """#!/bin/sh
echo "$@" >> "$HOME/asked"
case "$*" in *is-active*) echo active;; *enable*) test ! -e "$HOME/refuse" || { echo no bus >&2; exit 1; };; esac
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a systemd that writes down what it is asked."""
    for name in ("systemctl", "journalctl"):
        (tmp_path / name).write_text(MANAGER)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path


def asked(home: Path) -> list[str]:
    return (home / "asked").read_text().splitlines() if (home / "asked").exists() else []


def test_installing_writes_a_unit_and_starts_it_and_uninstalling_takes_both_back(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = home / ".config" / "systemd" / "user" / "weft.service"
    service_unit.install_command("tiny-hybrid", "--port", "9000")
    written, first = unit.read_text(), asked(home)
    service_unit.uninstall_command()

    assert "-m weft serve tiny-hybrid --port 9000\n" in written
    assert first == ["--user daemon-reload", "--user enable weft", "--user restart weft"]
    assert not unit.exists()
    assert asked(home)[3:] == ["--user disable --now weft"]
    assert str(unit) in capsys.readouterr().out


def test_a_manager_that_refuses_leaves_nothing_behind(home: Path) -> None:
    (home / "refuse").touch()

    with pytest.raises(WeftError, match="`systemctl --user enable weft` failed: no bus"):
        service_unit.install_command()
    assert not (home / ".config" / "systemd" / "user" / "weft.service").exists()


def test_printing_shows_the_unit_and_asks_nobody(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service_unit.install_command(show=True)

    assert capsys.readouterr().out.startswith("[Unit]\n")
    assert asked(home) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prot", "9000"), "--prot"),
        (("--port", "99999"), "port 99999 must be between"),
        (("--api-key=x",), "config.toml"),
    ],
)
def test_settings_that_can_not_be_are_refused_before_anything_is_written(
    home: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(WeftError, match=words):
        service_unit.install_command(*arguments)
    assert asked(home) == []


def test_status_tells_file_state_and_health(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_URL", "http://127.0.0.1:1")
    without = service_unit.status_command()
    unit = home / ".config" / "systemd" / "user" / "weft.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    silent = service_unit.status_command()
    told = capsys.readouterr().out.splitlines()

    assert (without, silent) == (1, 1)
    assert told[:2] == [f"file    {unit} (not there)", "state   not installed"]
    assert told[3:5] == [f"file    {unit}", "state   active"]
    assert "no server answers" in told[5]


def test_a_unit_quotes_what_units_would_read_otherwise() -> None:
    unit = Systemd().text(["/my python", "-m", "weft", "a%b", "$HOME"], {"HF_HOME": "/a b"}).splitlines()

    assert 'ExecStart="/my python" -m weft a%%b "$$HOME"' in unit
    assert 'Environment="HF_HOME=/a b"' in unit


def test_a_property_list_is_one(home: Path) -> None:
    facts = plistlib.loads(Launchd().text(["python", "-m", "weft", "serve", "a<b"], {"HF_HOME": "/x"}).encode())

    assert facts["ProgramArguments"] == ["python", "-m", "weft", "serve", "a<b"]
    assert facts["EnvironmentVariables"] == {"HF_HOME": "/x"}
    assert facts["KeepAlive"] == {"SuccessfulExit": False}
    assert Launchd().file == home / "Library" / "LaunchAgents" / "dev.weft.serve.plist"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_knows_the_commands(
    shell: Literal["bash", "zsh", "fish"], capsys: pytest.CaptureFixture[str]
) -> None:
    completion(shell)
    script = capsys.readouterr().out

    assert all(word in script for word in ("serve", "doctor", "shared-prefix"))


def test_bash_takes_its_script(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(app.generate_completion(prog_name="weft", shell="bash"))
    ask = f'. {tmp_path}/script; COMP_WORDS=(weft do); COMP_CWORD=1; _weft; echo "${{COMPREPLY[@]}}"'

    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False).stdout.split() == ["doctor"]


def commands(of: App, path: str) -> Iterator[tuple[str, str]]:
    for name in of:
        if not name.startswith("-"):
            command = of[name]
            if command.default_command is not None:
                yield f"{path} {name}", command.default_command.__doc__ or ""
            else:
                yield from commands(command, f"{path} {name}")


COMMANDS = dict(commands(app, "weft"))


@pytest.mark.parametrize(("path", "words"), COMMANDS.items(), ids=[*COMMANDS])
def test_every_command_has_an_example_in_its_help(path: str, words: str) -> None:
    assert f"For example:\n      {path}" in words
