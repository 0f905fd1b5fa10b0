"""The pages for users are at one with the code: parameters, metrics, error codes, flags and links."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft.api import problems
from weft.cli import app
from weft.metrics import Metrics

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["quickstart.md", "parameters.md", "operations.md", "troubleshooting.md", "agents.md", "api.md", "../README.md"]
OWN = PAGES[:4]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parameters_page", DOCS / "parameters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def series() -> set[str]:
    """Every name that Prometheus would have of us."""
    kinds = re.findall(r"^# TYPE (weft_\w+) (\w+)$", Metrics().render().decode(), re.MULTILINE)
    return {name + end for name, kind in kinds for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}


def test_the_page_of_parameters_is_as_the_schemas_have_it() -> None:
    written = (DOCS / "parameters.md").read_text(encoding="utf-8")

    assert written == generator().page(), "run `python docs/parameters.py`"


def test_a_parameter_without_words_is_noticed() -> None:
    module = generator()
    del module.WORDS["seed"]

    with pytest.raises(ValueError, match="lacks \\['seed'\\]"):
        module.page()


def test_every_metric_on_the_board_is_one_of_ours() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    named = {name for panel in board["panels"] for each in panel["targets"] for name in re.findall(r"weft_\w+", each["expr"])}

    assert named <= series()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_operations_lists_every_metric() -> None:
    table = (DOCS / "operations.md").read_text(encoding="utf-8").split("## Metrics")[1]
    listed = set(re.findall(r"`(weft_\w+)`", table))

    assert listed == {re.sub("_(bucket|sum|count)$", "", name) for name in series()}


def test_troubleshooting_has_every_error_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in Path(problems.__file__).parent.rglob("*.py"))
    raised = set(re.findall(r'BorderError\(\s*\d+, "(\w+)"', source)) | {code for _, _, code, _ in problems._TABLE if code}

    assert "invalid_api_key" in raised
    assert {code for code in raised if f"`{code}`" not in page} == set()


@pytest.mark.parametrize("page", OWN)
def test_every_flag_that_a_page_names_is_there(page: str) -> None:
    flags = set(re.findall(r"--([a-z][a-z-]+)", app.generate_completion(prog_name="weft", shell="bash")))
    others = {"constraint", "force-reinstall", "no-deps", "help", "user", "unit"}  # pip's, everybody's, journalctl's

    assert set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", (DOCS / page).read_text(encoding="utf-8"))) - flags <= others


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    path = DOCS / page
    for target, _, place in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", path.read_text(encoding="utf-8")):
        goal = (path.parent / target).resolve() if target else path.resolve()
        assert goal.exists(), target
        if place:
            heads = re.findall(r"^#+ (.*)$", goal.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, (target, place)
