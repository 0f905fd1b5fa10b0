"""One line per finished request, readable by people or machines, and never forged by a client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from weft.log import RequestRecord, escape_unprintable, log_request, setup

RECORD = RequestRecord(
    request_id="abc",
    client="127.0.0.1",
    dialect="chat",
    model="tiny",
    status=200,
    finish="stop",
    prompt_tokens=120,
    completion_tokens=51,
    cached_tokens=100,
    queue_seconds=0.0124,
    prefill_seconds=0.2,
    decode_seconds=2.0,
)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """The log belongs to the process; leave it as it was found."""
    loggers = [logging.getLogger(name) for name in (None, "weft", "uvicorn.error", "uvicorn.access")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def finish(**fields: Any) -> None:
    log_request(replace(RECORD, **fields))


def test_a_text_line_has_time_level_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text")

    logging.getLogger("weft.serving.server").info("listening on %s", "here")

    line = capsys.readouterr().err
    assert line[2] == line[5] == ":"
    assert line[8:] == " INFO  listening on here\n"


def test_a_finished_request_is_one_text_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text")

    finish()

    assert capsys.readouterr().err[8:] == (
        " INFO  abc 127.0.0.1 chat tiny 200 stop prompt=120 cached=100 new=51 queue=12ms prefill=200ms decode=2000ms 25.0 tok/s\n"
    )


def test_a_finished_request_is_one_json_object_with_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup("json")

    finish()

    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line.pop("message").startswith("abc 127.0.0.1 chat tiny")
    assert line == {
        "level": "info",
        "logger": "weft.request",
        "id": "abc",
        "client": "127.0.0.1",
        "wire": "chat",
        "model": "tiny",
        "status": 200,
        "finish": "stop",
        "prompt_tokens": 120,
        "cached_tokens": 100,
        "new_tokens": 51,
        "queue_ms": 12,
        "prefill_ms": 200,
        "decode_ms": 2000,
        "tokens_per_second": 25.0,
    }


def test_a_request_that_never_reached_the_engine_has_no_counts(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text")

    finish(status=404, finish=None, prompt_tokens=None)

    assert capsys.readouterr().err[8:] == " INFO  abc 127.0.0.1 chat tiny 404 -\n"


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_answer_without_decoding_has_no_rate_to_stumble_over(capsys: pytest.CaptureFixture[str], tokens: int) -> None:
    setup("text")

    nothing = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds"), 0.0)
    finish(prompt_tokens=5, completion_tokens=tokens, **nothing)

    assert f"new={tokens} queue=0ms prefill=0ms decode=0ms 0.0 tok/s" in capsys.readouterr().err


FORGED = "tiny\n12:34:56 INFO  forged\x1b[2J\u2028\ud800"


def test_a_client_can_not_forge_a_text_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text")

    finish(model=FORGED)

    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert r"tiny\n12:34:56 INFO  forged\x1b[2J\u2028\ud800 200" in line


def test_a_client_can_not_forge_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup("json")

    finish(model=FORGED)

    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.isascii()
    assert json.loads(line)["model"] == FORGED


def test_a_traceback_can_not_forge_a_line_either(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text")

    try:
        raise ValueError("bad\n12:34:56 INFO  forged\x1b[2J")
    except ValueError:
        logging.getLogger("weft.api").exception("request abc failed")

    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR request abc failed")
    assert "    12:34:56 INFO  forged\\x1b[2J" in rest
    assert all(line.startswith("    ") for line in rest)


def test_a_traceback_is_a_field_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    setup("json")

    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("weft.api").exception("request abc failed")

    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("error", "request abc failed")
    assert line["exception"].endswith("ValueError: bad")


def test_the_level_is_ours_and_other_libraries_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text", "warning")

    finish()
    logging.getLogger("weft.api").warning("seen")
    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("seen too")

    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["seen", "too"]


def test_debug_shows_ours_alone(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text", "debug")

    logging.getLogger("weft.api").debug("seen")
    logging.getLogger("httpx").debug("chatter")

    assert capsys.readouterr().err[8:] == " DEBUG seen\n"


def test_uvicorns_errors_come_through_ours_and_its_access_log_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    setup("text")

    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.error").error("broken")
    logging.getLogger("uvicorn.access").info("GET /")

    assert capsys.readouterr().err[8:] == " ERROR broken\n"
    assert not logging.getLogger("uvicorn.access").hasHandlers()


def test_setting_up_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup("json")
    setup("text")

    finish()

    assert capsys.readouterr().err.count("\n") == 1


def test_printable_text_of_any_script_stays_as_it_is() -> None:
    assert escape_unprintable("größe 東京 😀") == "größe 東京 😀"
