"""The workflows can be read, and what they run is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE_TARGETS = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text().replace("$(READY)", ".venv/.ready"), re.MULTILINE))


def jobs_of(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


def commands_of(path: Path) -> list[str]:
    return [step["run"] for job in jobs_of(path).values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_has_a_runner_and_every_step_does_something(path: Path) -> None:
    for job in jobs_of(path).values():
        assert job["runs-on"]
        assert all("run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_target_of_make_that_a_workflow_names_exists(path: Path) -> None:
    named = {target for command in commands_of(path) for target in re.findall(r"\bmake ([\w./-]+)", command)}

    assert named <= MAKE_TARGETS


def test_a_mac_runs_the_tests_and_then_the_check_of_a_model_as_served_and_exact() -> None:
    (path,) = (path for path in WORKFLOWS if path.stem == "macos")
    (job,) = jobs_of(path).values()
    commands = commands_of(path)

    assert all(runner.startswith("macos-") for runner in job["strategy"]["matrix"]["runner"])
    assert "make test" in commands
    assert [re.sub(r" \|.*", "", command) for command in commands if "doctor" in command] == [
        ".venv/bin/weft doctor --check tiny-hybrid",
        ".venv/bin/weft doctor --check tiny-hybrid --exact",
    ]
    assert not any("chromium" in command for command in commands)


def test_a_check_that_fails_is_not_hidden_by_the_file_that_its_report_is_written_to() -> None:
    (path,) = (path for path in WORKFLOWS if path.stem == "macos")
    piped = [step for job in jobs_of(path).values() for step in job["steps"] if "|" in step.get("run", "")]

    assert len(piped) == 2
    assert all("pipefail" in step["shell"] for step in piped)
