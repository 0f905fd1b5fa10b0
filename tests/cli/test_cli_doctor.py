"""`weft doctor`: green here, and not where something is wrong."""

from __future__ import annotations

import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from cli_server import running
from rich.console import Console

from weft.cli import doctor, doctor_check
from weft.cli.client import ServerClient
from weft.cli.doctor import MODEL, SERVER_CHECKS, Finding, check_server, run_check
from weft.cli.doctor_check import check_model, judge
from weft.engine.budget import MemoryBudget
from weft.engine.self_check import Comparison
from weft.errors import WeftError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user of whom nothing is known."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WEFT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("WEFT_API_KEY", "sk-very-secret")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_fresh_install_is_well_and_the_bundle_has_no_secrets(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.doctor_command(bundle=home / "report.zip")
    *lines, last = capsys.readouterr().out.splitlines()
    with zipfile.ZipFile(home / "report.zip") as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}

    assert status == 0, lines
    assert {line.split()[0] for line in lines} <= {"ok", "slow"}
    assert [line[8:20].strip() for line in lines] == [
        "versions", "settings", "disk", "port", "device", "products", "operations", "gated delta", "memory",
        "server", "generation", "schema", "cache", "tool call",
    ]  # fmt: skip
    assert "report.zip" in last
    assert parts["report.txt"].splitlines() == lines
    assert 'api_key = ["********"]' in parts["config.toml"]
    assert "mlx-lm==" in parts["versions.txt"]
    assert f"chat {MODEL} 200 stop" in parts["log.txt"]
    assert "service-log.txt" in parts
    assert not any("very-secret" in text or "Number 7 is a dog" in text for text in parts.values())


@pytest.mark.parametrize("what", SERVER_CHECKS)
def test_a_server_that_answers_something_else_is_found_wrong(what: str) -> None:
    with running() as server:
        verdict = run_check(what, SERVER_CHECKS[what], ServerClient(server.url))

    assert (verdict.grade, verdict.what) == ("wrong", what)
    assert "--bundle" in verdict.advice


def test_a_server_that_does_not_start_is_one_verdict_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    (verdict,) = check_server(tmp_path / "log")

    assert str(verdict).startswith("wrong   server       the server ended with status 3: no luck; ")


def test_settings_that_can_not_be_are_wrong(home: Path) -> None:
    (home / "weft.toml").write_text("[serve]\nprot = 9000\n")

    verdict = doctor._check_settings()

    assert verdict.grade == "wrong"
    assert "did you mean 'port'?" in verdict.found


def test_a_full_disk_is_wrong_and_so_is_one_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._check_disk(tmp_path / "not" / "there").grade == "ok"

    monkeypatch.setattr("os.access", lambda *_: False)
    assert "can not be written" in doctor._check_disk(tmp_path).found
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda _: namedtuple("Usage", "free")(10_000))
    assert doctor._check_disk(tmp_path / "not" / "there").grade == "wrong"


def test_a_port_that_something_else_holds_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        monkeypatch.setenv("WEFT_URL", server.url)
        mine = doctor._check_port()
        monkeypatch.setenv("WEFT_URL", f"{server.url}/other")
        other = doctor._check_port()

    assert (mine.grade, mine.found) == ("ok", f"{server.url} is weft 9.9, up for 61.2 s")
    assert other.grade == "wrong"


@pytest.mark.parametrize(
    ("found", "grade", "words"),
    [
        (doctor._judge_products("weft+openblas", 2, None), "ok", "sgemm"),
        (doctor._judge_products("openblas", 2, None), "slow", "C compiler"),
        (doctor._judge_products("stock", None, "much slower than it could: install it"), "slow", "install it"),
        (doctor._judge_products("none", None, None), "ok", "MLX's own"),
        (doctor._judge_gated_delta("cuda", ["mlx_lm.models.qwen3_5"]), "ok", "in chunks"),
        (doctor._judge_gated_delta("metal", []), "ok", "Metal"),
        (doctor._judge_gated_delta("cpu", []), "slow", "loop over tokens"),
        (doctor._judge_memory(MemoryBudget(lambda tokens: tokens * 1000, 40_000_000, 100_000_000), 1000, 16), "ok", "38 fit"),
        (doctor._judge_memory(MemoryBudget(lambda tokens: tokens * 1000, 40_000_000, 41_000_000), 1000, 16), "wrong", "0 fit"),
        (doctor._judge_memory(MemoryBudget(lambda tokens: tokens * 1000, 40_000_000, None), 1000, 16), "ok", "--memory"),
    ],
)
def test_each_finding_has_its_verdict(found: Finding, grade: str, words: str) -> None:
    assert found.grade == grade
    assert words in str(found)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.2", "0.32.17"])
def test_every_version_in_the_range_is_ok(version: str) -> None:
    verdict = doctor._judge_versions("found", ["mlx-lm<0.33,>=0.32.0"], {"mlx_lm": version})

    assert verdict.grade == "ok"


@pytest.mark.parametrize("installed", [{}, {"mlx-lm": "0.31.3"}, {"mlx-lm": "0.33.0"}, {"mlx-lm": "0.33.0.dev1"}])
def test_a_version_outside_the_range_is_wrong_and_the_range_is_named(installed: dict[str, str]) -> None:
    verdict = doctor._judge_versions("found", ["mlx-lm<0.33,>=0.32.0"], installed)

    assert verdict == Finding("wrong", "versions", "found", "weft needs mlx-lm<0.33,>=0.32.0: install it with pip")


def test_what_only_other_platforms_and_extras_need_is_not_asked_for() -> None:
    requirements = ["mlx>=9; sys_platform == 'os2'", 'pytest>=99; extra == "dev"', "rich>=14"]

    assert doctor._judge_versions("found", requirements, {"rich": "15.0.0"}).grade == "ok"


def test_a_bundle_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"report.zip can not be written: No such file"):
        doctor.write_bundle(tmp_path / "not" / "report.zip", [], tmp_path / "log")


def test_values_of_secret_variables_are_taken_out_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "first-one, second-one")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("SOME_KEY", "on")

    assert doctor.without_secrets("second-one got hf_abc on") == "******** got ******** on"


def test_a_model_is_checked_and_its_report_names_versions_numerics_and_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.doctor_command(check=MODEL)
    first, *lines, last = capsys.readouterr().out.splitlines()

    assert (status, first, last) == (0, f"weft doctor --check {MODEL}", "everything promised here holds")
    assert [line[8:20].strip() for line in lines] == [
        "versions", "model", "machine", "numerics", "batched", "cached", "chunked", "drafted", "resumed",
        "batch", "cache", "drafts",
    ]  # fmt: skip
    assert {line.split()[0] for line in lines} == {"ok"}
    assert all(word in lines[3] for word in ("exact;", "products", "row-invariant yes", "drafts forced, lookup, mtp"))


def test_a_promise_that_does_not_hold_is_status_1_and_what_was_not_promised_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(soft_wrap=True)
    for is_promised, status in ((True, 1), (False, 0)):
        found = judge("batched", Comparison("alone", is_promised, token_at=7, bits_at=3, note="8 rows"))
        monkeypatch.setattr(doctor_check, "examine_model", lambda *_, found=found, **__: [found])

        assert check_model(console, "any") == status
    lines = capsys.readouterr().out.splitlines()

    assert lines[1].startswith(
        "wrong   batched      ≠ alone: bits of logits differ from token 3 on, tokens differ from token 7 on"
    )
    assert lines[4].startswith("differs batched      ≠ alone")


def test_a_model_that_can_not_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor_command(check="/no/such/model") == 1

    assert "/no/such/model" in capsys.readouterr().out.splitlines()[2]
