"""The pages for users are at one with the code: parameters, metrics, error codes, flags and links."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from cyclopts import App

from guards import GUARDS
from weft.api import problems
from weft.api.fields import BUDGET_NAMES
from weft.cli import app
from weft.errors import UnsupportedParameter
from weft.metrics import Metrics

DOCS = Path(__file__).parent.parent / "docs"
OWN = ["quickstart.md", "parameters.md", "operations.md", "troubleshooting.md", "requirements.md"]
PAGES = [*OWN, "agents.md", "api.md", "cluster.md", "../README.md", "../CONTRIBUTING.md"]

# The rows of requirements.md: number, requirement, the tests that show it, verdict and (after a colon) its reason.
ROW = re.compile(r"^\| (R\d+) \| (.*?) \| (.*?) \| ([^|:]*?)(?:: ([^|]*))? \|$", re.MULTILINE)
# The rows of its last table: number, attack, the tests that show that it is closed, guards.
ATTACK = re.compile(r"^\| (H\d+) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py): ([\w.]+)`")
# Verdict → whether it needs tests, and whether it needs a reason. TODO(…): the tests in brackets are being written.
VERDICTS = {
    "met": (True, False),
    "met by design": (True, True),
    "partly": (True, True),
    "different on purpose": (True, True),
    "unbuilt": (False, True),
    "n.a.": (False, True),
    "TODO": (False, False),
}
NOT_THERE_YET = re.compile(r"speculat|image|replica")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parameters_page", DOCS / "parameters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def have_url(command: App) -> list[bool]:
    """Of a command, or of each of its group, whether it has the flag."""
    if command.default_command is None:
        return [one for name in command if not name.startswith("-") for one in have_url(command[name])]
    return [any("--url" in argument.names for argument in command.assemble_argument_collection())]


def test_the_page_of_agents_names_the_commands_that_take_an_address() -> None:
    text = (DOCS / "agents.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"by `--url`, as by `weft (.*?), else by", text, re.DOTALL)
    named = {word.strip("`") for word in re.findall(r"`\w+|\w+`", f"`{sentence}")}

    assert named == {name for name in app if not name.startswith("-") and all(have_url(app[name]))} - {"launch"}


def series() -> set[str]:
    """Every name that Prometheus would have of us."""
    kinds = re.findall(r"^# TYPE (weft_\w+) (\w+)$", Metrics().render().decode(), re.MULTILINE)
    return {name + end for name, kind in kinds for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}


def test_the_page_of_parameters_is_as_the_schemas_have_it() -> None:
    written = (DOCS / "parameters.md").read_text(encoding="utf-8")

    assert written == generator().page(), "run `python docs/parameters.py`"


def test_the_page_marks_every_name_of_a_reasoning_budget_as_acting_where_it_acts() -> None:
    required = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "max_tokens": 9}
    page = generator()
    for dialect in (*page.DIALECTS, page.OLLAMA):
        body = {name: value for name, value in required.items() if name in dialect.kind.__struct_fields__}
        for name in BUDGET_NAMES:
            try:
                acts = dialect.rules.read({**body, name: 5}, dialect.kind)[0].thinking_token_budget == 5
            except UnsupportedParameter:
                acts = False
            assert dialect.mark(name).startswith("●" if acts else "✗"), (dialect.name, name)


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


def test_the_manifest_s_containers_have_flags_that_there_are_and_time_to_end() -> None:
    flags = set(re.findall(r"--([a-z][a-z-]+)", app.generate_completion(prog_name="weft", shell="bash")))
    parts = yaml.safe_load_all((DOCS / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8"))
    pods = [part["spec"]["template"]["spec"] for part in parts if part["kind"] in ("StatefulSet", "Deployment")]
    for pod in pods:
        given = dict(word[2:].split("=", 1) for word in pod["containers"][0]["args"] if word.startswith("--"))

        assert set(given) <= flags
        assert float(given["drain-seconds"]) < pod["terminationGracePeriodSeconds"]
        assert given["engine-key"] == pod["containers"][0]["volumeMounts"][0]["mountPath"] + "/engine.key"
    assert [pod["containers"][0]["args"][0] for pod in pods] == ["engine", "serve"]


def test_every_flag_that_an_error_names_is_there() -> None:
    flags = set(re.findall(r"--([a-z][a-z-]+)", app.generate_completion(prog_name="weft", shell="bash")))
    rooms = [Path(problems.__file__).parent, *(DOCS.parent / "src/weft" / room for room in ("serving", "text", "engine"))]
    source = "".join(path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py"))
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", source))

    assert "allowed-hosts" in named
    assert named - {"head"} <= flags  # of `ray start`


def test_the_manifest_for_kuberay_is_yaml_and_its_front_is_started_with_flags_that_there_are() -> None:
    documents = list(yaml.safe_load_all((DOCS / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")))
    groups = documents[0]["spec"]["workerGroupSpecs"]
    (front,) = [group for group in groups if group["groupName"] == "front"]
    command = front["template"]["spec"]["containers"][0]["command"][-1]
    flags = set(re.findall(r"--([a-z][a-z-]+)", app.generate_completion(prog_name="weft", shell="bash")))

    assert [document["kind"] for document in documents] == ["RayCluster", "Service", "NetworkPolicy"]
    assert {"ray", "replicas", "engine-key"} < set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", command)) <= flags


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    path = DOCS / page
    for target, _, place in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", path.read_text(encoding="utf-8")):
        goal = (path.parent / target).resolve() if target else path.resolve()
        assert goal.exists(), target
        if place:
            heads = re.findall(r"^#+ (.*)$", goal.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, (target, place)


def requirements() -> list[tuple[str, str, str, str, str]]:
    """The rows of the page; a verdict that waits for tests is TODO, whichever they are."""
    rows = ROW.findall((DOCS / "requirements.md").read_text(encoding="utf-8"))
    return [
        (number, words, shown, re.sub(r"^TODO\(.+\)$", "TODO", verdict), reason) for number, words, shown, verdict, reason in rows
    ]


@functools.cache
def names_in(path: Path) -> set[str]:
    """The names of a file's tests, read without importing it: functions, methods, and test cases made of state machines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) if name.startswith("test_"):
                names.add(name)
            case ast.ClassDef(name=name, body=body) if name.startswith("Test"):
                names |= {f"{name}.{inner.name}" for inner in body if isinstance(inner, ast.FunctionDef)}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                names.add(name)
    return names


def test_every_requirement_has_one_row_with_a_verdict() -> None:
    rows = requirements()

    assert [number for number, *_ in rows] == [f"R{number:03d}" for number in range(1, 121)]
    for number, words, shown, verdict, reason in rows:
        assert verdict in VERDICTS, (number, verdict)
        needs_tests, needs_reason = VERDICTS[verdict]
        assert bool(NAMED_TEST.search(shown)) >= needs_tests, f"{number} names no test"
        assert bool(reason) >= needs_reason, f"{number} gives no reason"
        assert verdict not in ("partly", "unbuilt") or NOT_THERE_YET.search(reason), f"{number} lacks what is not unbuilt"
        assert len(words.split()) <= 20, number


def test_every_test_that_shows_a_requirement_exists() -> None:
    root = DOCS.parent
    named = {name for _, _, shown, *_ in requirements() for name in NAMED_TEST.findall(shown)}

    assert len(named) > 100
    assert {f"{path}: {test}" for path, test in named if not (root / path).exists() or test not in names_in(root / path)} == set()


def test_every_attack_has_tests_that_exist_and_guards_whose_mutants_break_one_of_them() -> None:
    root, tests_of = DOCS.parent, {guard.name: guard.test.partition("[")[0] for guard in GUARDS}
    rows = ATTACK.findall((DOCS / "requirements.md").read_text(encoding="utf-8"))

    assert list(dict.fromkeys(number for number, *_ in rows)) == [f"H{number}" for number in range(1, 14)]
    for number, _, shown, guarded in rows:
        named, guards = NAMED_TEST.findall(shown), re.findall(r"`([\w-]+)`", guarded)
        assert all(test in names_in(root / path) for path, test in named), (number, named)
        assert set(guards) <= tests_of.keys(), number
        assert {tests_of[guard] for guard in guards} & {f"{path}::{test}" for path, test in named}, (
            f"{number} has no guard of its own"
        )


def test_the_verdicts_are_counted_right() -> None:
    page = (DOCS / "requirements.md").read_text(encoding="utf-8")
    counts = {verdict: int(count) for verdict, count in re.findall(r"^\| ([a-zA-Z. ]+) \| (\d+) \| ", page, re.MULTILINE)}

    assert {verdict: count for verdict, count in counts.items() if count} == Counter(verdict for *_, verdict, _ in requirements())
