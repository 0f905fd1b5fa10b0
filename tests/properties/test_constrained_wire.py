"""A property over everything that can be constrained: over the wire, an answer is what was asked, or the request is a 400.

Six kinds of vocabulary (odd_vocabularies.py; `make conformance` looks at all shapes of decoders), each served by `weft serve`
with a tiny random model, are asked random requests (constrained_cases.py), dozens at a time. A case that fails prints the command
that repeats it: WEFT_WIRE_CASE is its kind of vocabulary and its number. WEFT_WIRE_CASES: how many of each kind.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from constrained_cases import Case, fault_of_refusal, make_case
from dialects import CUT, Answer, StreamFailed, read
from odd_vocabularies import KINDS, Kind, make_folder

import lean_client
from servers import Server, running
from thoroughness import ALL
from waiting import until

pytestmark = pytest.mark.xdist_group("constrained wire")  # one server for all
ONE_KIND, _, ONE_NUMBER = os.environ.get("WEFT_WIRE_CASE", "").partition(":")
LOOKED_AT = [kind for kind in KINDS if (kind.name == ONE_KIND if ONE_KIND else ALL or kind.is_in_test)]
NUM_CASES = (20_000 if ALL else 500) // len(LOOKED_AT) + 1  # of each kind
AT_ONCE = 24
SHOWN = 12
GONE = "is gone; trying again"
# So that the property is not true of nothing.
MAX_CUT, MAX_REFUSED = 0.15, 0.35


@dataclasses.dataclass
class Outcome:
    """What became of a case: what is wrong with it, if anything, and how it ended."""

    case: Case
    fault: str | None
    ended: str

    @property
    def line(self) -> str:
        body = json.dumps(self.case.body, ensure_ascii=False)
        return f"{self.case.what} {self.case.path}: {self.fault}\n    {body}\n    {self.case.repeat}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model of each kind of vocabulary, named after it."""
    folder = tmp_path_factory.mktemp("wire")
    models = [str(make_folder(kind, folder / kind.name)) for kind in LOOKED_AT]
    settings = {"WEFT_CACHE": str(folder / "cache"), "OPENBLAS_NUM_THREADS": "1"}
    with running(folder / "log", *models, ready=False, environment=settings) as server:
        until(lambda: server.get("/health").status_code == 200 or GONE in server.log.read_text(), server.log.read_text)
        assert GONE not in server.log.read_text(), f"not loaded: {server.log.read_text()}"
        yield server


@pytest.mark.parametrize("kind", LOOKED_AT, ids=lambda kind: kind.name)
def test_every_answer_is_what_was_asked_or_the_request_is_a_400(kind: Kind, server: Server) -> None:
    outcomes = asyncio.run(_ask_all(server, [make_case(kind, number) for number in _numbers()]))
    assert server.is_up()

    ended = collections.Counter(outcome.ended for outcome in outcomes)
    faults = [outcome for outcome in outcomes if outcome.fault]
    if path := os.environ.get("WEFT_WIRE_REPORT"):
        lines = [
            json.dumps([one.case.number, one.case.what + one.case.path, one.fault, one.case.body], ensure_ascii=False)
            for one in faults
        ]
        Path(path, kind.name).write_text("\n".join(lines))
    if faults:
        shown = "\n".join(outcome.line for outcome in faults[:SHOWN])
        pytest.fail(f"{len(faults)} of {len(outcomes)} ({dict(ended)})\n{shown}", pytrace=False)
    if len(outcomes) > 1:
        assert ended["cut"] <= MAX_CUT * len(outcomes)
        assert ended["refused"] + ended["told invalid"] <= MAX_REFUSED * len(outcomes)


def _numbers() -> range:
    if ONE_NUMBER:
        return range(int(ONE_NUMBER), int(ONE_NUMBER) + 1)
    return range(int(os.environ.get("WEFT_WIRE_CASES", NUM_CASES)))


async def _ask_all(server: Server, cases: list[Case]) -> list[Outcome]:
    gate, port = asyncio.Semaphore(AT_ONCE), server.port
    names = {Path(one["id"]).name: one["id"] for one in server.get("/v1/models").json()["data"]}

    async def ask(case: Case) -> Outcome:
        async with gate, asyncio.timeout(120):
            return await _ask(port, case, names[case.kind.name])

    return await asyncio.gather(*map(ask, cases))


def _ended(answers: list[Answer]) -> str:
    if any(one.finish in CUT for one in answers):
        return "cut"
    return "told invalid" if any(one.is_told_valid is False for one in answers) else "answered"


async def _ask(port: int, case: Case, model: str) -> Outcome:
    reply = await lean_client.ask(port, case.path, {"model": model, **case.body})
    try:
        if reply.status == 200:
            answers = read(case.path, await reply.text(), is_streamed=case.body["stream"])
            return Outcome(case, case.fault(answers), _ended(answers))
        message = await reply.text()
        fault = fault_of_refusal(case, message) if reply.status == 400 else f"status {reply.status}: {message[:300]}"
        return Outcome(case, fault, "refused")
    except (StreamFailed, KeyError, ValueError) as error:
        return Outcome(case, f"{type(error).__name__}: {error}", "failed")
    finally:
        reply.close()
