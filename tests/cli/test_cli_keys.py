"""`weft keys`: keys for a keys file, whose secrets are on no command line and in no file."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from weft.cli import app
from weft.config import ServerConfig
from weft.errors import WeftError
from weft.serving.tenants import Keyring


def test_a_new_key_opens_the_server_that_has_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["keys", "new", "an.na", "--admin"], result_action="return_value")
    told = capsys.readouterr()
    secret = told.err.split()[-1]
    (tmp_path / "keys.toml").write_text(told.out, encoding="utf-8")
    found = Keyring(ServerConfig(keys_file=str(tmp_path / "keys.toml"))).find([secret.encode()])

    assert found is not None
    assert (found.name, found.is_admin) == ("an.na", True)
    assert secret not in told.out


def test_a_name_that_could_not_be_read_again_is_refused() -> None:
    with pytest.raises(WeftError, match="'an na'"):
        app(["keys", "new", "an na"], result_action="return_value", exit_on_error=False)


def test_a_secret_from_stdin_becomes_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("twenty letters or more\n"))
    app(["keys", "hash"], result_action="return_value")
    (tmp_path / "keys.toml").write_text(f'[anna]\nhash = "{capsys.readouterr().out.strip()}"', encoding="utf-8")

    assert Keyring(ServerConfig(keys_file=str(tmp_path / "keys.toml"))).find([b"twenty letters or more"]) is not None


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("short\n"))

    with pytest.raises(WeftError, match="5 characters"):
        app(["keys", "hash"], result_action="return_value", exit_on_error=False)
