"""Chat templates and schema checks run in processes that are killed: no template and no pattern stops the front."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

import weft.model
from waiting import HANG_SECONDS, until
from weft.errors import BadModel, ServerStopping, TemplateFailed, TemplateTooCostly
from weft.ipc.limits import MAX_RENDERED_CHARACTERS, MAX_TEMPLATE_CHARACTERS
from weft.serving.child_pool import READY, ChildLimits, ChildLost, ChildPool
from weft.serving.image_worker import REPLY
from weft.serving.text_processes import NUM_CHILDREN, TextProcesses
from weft.text.codec import Codec
from weft.text.schema import find_schema_errors, json_schema_grammar
from weft.text.template import ChatTemplate
from weft.text.types import Conversation, Message

TINY_HYBRID = Path(weft.model.__file__).parent / "tiny-hybrid"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}"
TALK: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
BACKTRACKING = {"type": "string", "pattern": r"^(\w+\s?)*\1$"}
STUCK = "ab " * 40 + "!"


@pytest.fixture(scope="module")
def processes() -> Iterator[TextProcesses]:
    made = TextProcesses(ChildLimits(seconds=60, cpu_seconds=1, memory_bytes=1 << 30))
    yield made
    made.close()


def template(source: str, processes: TextProcesses) -> ChatTemplate:
    return ChatTemplate(source, {}, None, processes)


def test_a_prompt_is_the_same_as_in_this_process(processes: TextProcesses) -> None:
    talk = Conversation(
        (Message("system", "Be brief"), Message("user", "Hello"), Message("assistant", "Hi"), Message("user", "ü"))
    )

    assert Codec(TINY_HYBRID, "fold", processes).encode(talk) == Codec(TINY_HYBRID).encode(talk)


def test_an_endless_template_is_killed_and_the_next_one_is_rendered(processes: TextProcesses) -> None:
    endless = template("{% if messages[0].content == 'now' %}" + ENDLESS + "{% endif %}done", processes)

    with pytest.raises(TemplateTooCostly, match="takes more than 1 s of computing"):
        endless.render([{"role": "user", "content": "now"}])
    assert endless.render(TALK) == "done"


def test_a_template_may_not_write_without_end(processes: TextProcesses) -> None:
    with pytest.raises(TemplateTooCostly, match=f"writes more than {MAX_RENDERED_CHARACTERS} characters"):
        template(HUGE, processes).render(TALK)


def test_a_template_may_not_take_all_memory(processes: TextProcesses) -> None:
    with pytest.raises((TemplateTooCostly, TemplateFailed)):
        template("{{ messages[0].content * 10 ** 10 }}", processes).render(TALK)


def test_a_model_whose_template_is_endless_can_not_be_loaded(processes: TextProcesses, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TINY_HYBRID / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)

    with pytest.raises(TemplateTooCostly):
        Codec(tmp_path, "fold", processes)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", "broken at line 2"),
        ("a\n{{ a | shout }}", "broken at line 2"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "can not be compiled"),
        ("x" * (MAX_TEMPLATE_CHARACTERS + 1), f"at most {MAX_TEMPLATE_CHARACTERS} are taken"),
    ],
    ids=["syntax", "filter", "deep", "long"],
)
def test_a_broken_template_is_named_as_the_models_fault(processes: TextProcesses, source: str, words: str) -> None:
    with pytest.raises(BadModel, match=words):
        template(source, processes)


def test_a_template_that_refuses_is_quoted(processes: TextProcesses) -> None:
    with pytest.raises(TemplateFailed, match="refuses these messages: not like this"):
        template("{{ raise_exception('not like this') }}", processes).render(TALK)


@pytest.mark.parametrize("answer", ['{"a": 1}', '{"a": "x"}', "no json", '{"a": '])
def test_an_answer_is_checked_as_in_this_process(processes: TextProcesses, answer: str) -> None:
    spec = json_schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}, False, "schema")

    assert processes.find_schema_errors(spec, answer) == find_schema_errors(spec, answer)


def test_a_pattern_that_backtracks_costs_its_own_answer_only(processes: TextProcesses) -> None:
    patterns = {"type": "array", "items": {"allOf": [BACKTRACKING] * 40}}
    spec = json_schema_grammar(patterns, False, "schema")
    answer = "[" + ",".join(f'"{STUCK}{index}"' for index in range(100)) + "]"

    told = processes.find_schema_errors(spec, answer)

    assert len(told) == 1
    assert "was not checked" in told[0]


def test_answers_that_are_checked_for_long_hold_up_no_template() -> None:
    processes = TextProcesses(ChildLimits(seconds=20, cpu_seconds=600))
    spec = json_schema_grammar({"type": "array", "items": {"allOf": [BACKTRACKING] * 40}}, False, "schema")
    answer = "[" + ",".join(f'"{STUCK}{index}"' for index in range(1000)) + "]"

    def check() -> None:
        with suppress(ServerStopping):
            processes.find_schema_errors(spec, answer)

    threads = [threading.Thread(target=check) for _ in range(2 * NUM_CHILDREN)]
    for thread in threads:
        thread.start()
    until(lambda: processes.checks.is_busy)

    assert processes.render("{{ word }}", {"word": "hi"}) == "hi"
    assert processes.checks.is_busy
    processes.close()
    for thread in threads:
        thread.join(HANG_SECONDS)


def test_who_waits_for_an_endless_template_is_answered_when_its_model_goes() -> None:
    processes, errors = TextProcesses(ChildLimits(seconds=600, cpu_seconds=600)), []
    endless = template(ENDLESS, processes)

    def render() -> None:
        with pytest.raises(ServerStopping) as caught:
            endless.render(TALK)
        errors.append(caught.value)

    thread = threading.Thread(target=render)
    thread.start()
    until(lambda: processes.templates.is_busy)
    pids = processes.templates.pids
    processes.close()
    thread.join()

    assert len(errors) == 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("hello", "is_taken"), [(READY, True), (b"?", False)])
def test_a_child_is_given_a_job_when_it_has_said_that_it_is_ready(hello: bytes, is_taken: bool) -> None:
    first, second = REPLY.pack(hello, 0), REPLY.pack(b"=", 2) + b"ok"
    script = f"import sys; o = sys.stdout.buffer; o.write({first!r}); o.flush(); sys.stdin.read(3); o.write({second!r})"
    pool = ChildPool((sys.executable, "-c", script), ChildLimits(seconds=HANG_SECONDS), 1, "greet", start_seconds=HANG_SECONDS)

    with nullcontext() if is_taken else pytest.raises(ChildLost, match="did not start"):
        assert pool.ask(b"job", lambda *_: True) == (b"=", b"ok")
    pool.close()
