"""The list of guards fits the source; that each has a test which fails without it is shown by `make mutants`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from guards import GUARDS
from mutants import Verdict, _verdict, find_faults

ONE = GUARDS[0]


def test_every_guard_is_in_the_source_once_and_has_a_mutant_and_a_test() -> None:
    assert list(find_faults(GUARDS)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "import "}, "times in memory/slabs.py, not once"),
        ({"text": "nothing like it"}, "is 0 times"),
        ({"mutant": "            )"}, "is no Python"),
        ({"test": "tests/engine/test_engine.py::test_of_nothing"}, "there is no test"),
        ({"test": "tests/engine/test_engine.py"}, "there is no test"),
        ({}, "there are two guards of this name"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(changes: dict[str, str], words: str) -> None:
    guards = [dataclasses.replace(ONE, **changes)] if changes else [ONE, ONE]
    (fault,) = find_faults(guards)

    assert fault.startswith(ONE.name)
    assert words in fault


@pytest.mark.parametrize(
    ("status", "report", "verdict"),
    [
        (0, "", "green"),
        (1, '<failure message="AssertionError: assert 1 == 2&#10;more"/>', "red"),
        (1, '<failure message="NameError: name &#39;x&#39; is not defined"/>', "broken"),
        (1, '<error message="failed on setup with RuntimeError"/>', "broken"),
        (2, '<error message="collection failure"/>', "broken"),
        (4, None, "broken"),
        (-24, None, "hung"),
        (None, None, "hung"),
    ],
)
def test_only_a_test_that_itself_fails_is_red(tmp_path: Path, status: int | None, report: str | None, verdict: Verdict) -> None:
    path = tmp_path / "report.xml"
    if report is not None:
        path.write_text(f"<testsuite><testcase>{report}</testcase></testsuite>")

    assert _verdict(status, path, "the last line")[0] == verdict
