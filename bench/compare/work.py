"""What every server is asked to do, and the figures that come of it.

A workload is a coroutine that is given a side and its seconds, and gives figures. One that has not ended by then is cut: its
figures are bounds. Knows no server by name; greedy, the same prompts and the same limits for all.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs

from bench.agent import in_words, title_request, turns
from bench.compare.client import Answer, Stream, together
from bench.compare.side import Side

PROMPTS = (24, 96, 16, 48, 128, 20, 64, 32)  # tokens of the streams' prompts, and of their answers
ANSWERS = (80, 48, 96, 64, 40, 96, 56, 72)
PREFIX, TAIL, ARRIVALS = 1000, 24, 8
LONG = {"smollm2": 2048, "tiny-hybrid": 1984}  # the second's context is 2,048, with the answer
MEANWHILE = 192  # tokens of each stream beside the long prompt
TURNS, LATE = 40, 5
SHORT_ANSWER = 24


class Failed(Exception):
    """A server did not do what was asked; one line says why."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    workload: str
    number: str
    title: str
    unit: str
    more_is_better: bool = False


METRICS = {
    "single": Metric("single", "1", "one stream", "tok/s", more_is_better=True),
    "eight": Metric("eight", "2", "8 streams, mixed lengths", "tok/s", more_is_better=True),
    "sixteen": Metric("sixteen", "2", "16 streams, mixed lengths", "tok/s", more_is_better=True),
    "arrivals_max": Metric("arrivals", "3", "8 at once on a shared 1,000-token prefix: slowest first token", "s"),
    "arrivals_median": Metric("arrivals", "3", "the same: median first token", "s"),
    "gap_p95": Metric("beside", "4", "token gap beside a 2,048-token prompt: p95", "ms"),
    "gap_max": Metric("beside", "4", "the same: longest", "ms"),
    "prompt_first": Metric("beside", "4", "the same: that prompt's own first token", "s"),
    "agent_total": Metric("agent", "5", "40 turns of an agent, with side requests", "s"),
    "agent_late": Metric("agent", "5", "the same: first token of turns 36 to 40", "s"),
    "schemas_rate": Metric("schemas", "6", "8 strict schemas beside 4 streams: valid answers", "a second", more_is_better=True),
    "schemas_right": Metric("schemas", "6", "the same: how many were right", "", more_is_better=True),
    "same": Metric("same", "7", "answers in a crowd equal to those alone", "", more_is_better=True),
    "start": Metric("start", "8", "start-up to first token", "s"),
    "memory": Metric("start", "8", "memory when idle", "MB"),
}


@dataclass(frozen=True)
class Figure:
    """One number. Of what was cut off it is a bound: at least so long, at most that rate."""

    metric: str
    value: float
    cut: bool = False
    note: str = ""
    of: int = 0  # for a count: of how many


Workload = Callable[[Side, float], Awaitable[list[Figure]]]


def answers(streams: list[Stream]) -> list[Answer]:
    """What they told; Failed where one was refused or broke."""
    told = [stream.answer() for stream in streams]
    for answer in told:
        if answer.error:
            raise Failed(answer.error)
    return told


def first(stream: Stream, answer: Answer) -> float:
    """Seconds to its first text, or to its end where there was none."""
    return (answer.moments[0] if answer.moments else stream.ended) - stream.sent


async def first_answer(side: Side, seconds: float) -> float:
    """Ask for a little, and see whether completions are there; the moment of the first text, on `time.monotonic`."""
    for side.completes in (True, False):
        stream = side.plain(side.text(12, 9001), 4)
        await together([stream], seconds)
        if stream.status != 404:
            break
    (told,) = answers([stream])
    if not told.moments:
        raise Failed(f"no text within {seconds:.0f} s")
    return time.monotonic() - (time.perf_counter() - told.moments[0])


# --- the workloads ---------------------------------------------------------------------------------------------------


async def single(side: Side, seconds: float) -> list[Figure]:
    """One stream."""
    return await _rate(side, [side.plain(side.steady("single", 0, 24), 96)], seconds, "single")


async def eight(side: Side, seconds: float) -> list[Figure]:
    """Eight streams of mixed lengths."""
    return await _rate(side, _mixed(side, 8, "eight"), seconds, "eight")


async def sixteen(side: Side, seconds: float) -> list[Figure]:
    """Sixteen of them."""
    return await _rate(side, _mixed(side, 16, "sixteen"), seconds, "sixteen")


def _mixed(side: Side, count: int, workload: str) -> list[Stream]:
    return [side.plain(side.steady(workload, n, PROMPTS[n % 8]), ANSWERS[(n * 3) % 8]) for n in range(count)]


async def _rate(side: Side, streams: list[Stream], seconds: float, metric: str) -> list[Figure]:
    whole = await together(streams, seconds)
    told = answers(streams)
    took = max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    tokens = sum(side.count(answer) for answer in told)
    asked = sum(stream.body["max_tokens"] for stream in streams)
    rate = (tokens if whole else asked) / took  # cut off, all would have come later than now
    return [Figure(metric, rate, not whole, f"{tokens} of {asked} tokens in {took:.1f} s")]


async def arrivals(side: Side, seconds: float) -> list[Figure]:
    """Eight prompts with a long common beginning at once, nothing of it known before."""
    prefix = side.text(PREFIX, 9005)
    streams = [side.plain(f"{prefix} {side.text(TAIL, 9050 + n)}", 8) for n in range(ARRIVALS)]
    await together(streams, seconds)
    firsts = [first(stream, answer) for stream, answer in zip(streams, answers(streams), strict=True)]
    found = {"arrivals_max": max(firsts), "arrivals_median": statistics.median(firsts)}
    return [Figure(metric, value, value >= 0.99 * seconds) for metric, value in found.items()]


async def beside(side: Side, seconds: float) -> list[Figure]:
    """Four streams while a long prompt is computed: the gaps between what their readers see in that time."""
    prompt = side.plain(side.text(LONG[side.model], 9006), 4)
    began = time.perf_counter()
    streams = [side.plain(side.steady("beside", n, 40), MEANWHILE) for n in range(4)]
    running = asyncio.create_task(together(streams, seconds))
    while not running.done() and any(len(stream.parts) < 4 for stream in streams):
        await asyncio.sleep(0.01)
    await together([prompt], seconds - (time.perf_counter() - began))
    await running
    (told,) = answers([prompt])
    until = told.moments[0] if told.moments else prompt.ended
    still = [] if told.moments else [until]  # cut off amid a gap
    found = [gap for answer in answers(streams) for gap in gaps(answer.moments + still, prompt.sent, until)]
    if not found:
        raise Failed("the streams were over before the long prompt came")
    cut, note = not told.moments, f"{len(found)} gaps in {until - prompt.sent:.1f} s"
    value = {"gap_p95": 1000 * percentile(found, 0.95), "gap_max": 1000 * max(found), "prompt_first": until - prompt.sent}
    return [Figure(metric, number, cut, note) for metric, number in value.items()]


def gaps(moments: list[float], began: float, until: float) -> list[float]:
    """The gaps between neighbouring moments, of which some part lies in that time."""
    return [b - a for a, b in pairwise(moments) if b > began and a < until]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


async def agent(side: Side, seconds: float) -> list[Figure]:
    """A conversation that grows turn by turn; beside each turn a small request with another beginning."""
    began = time.perf_counter()
    messages: list[dict[str, Any]] = []
    firsts: list[float] = []
    for new in turns(TURNS):
        messages += in_words(new)
        left = seconds - (time.perf_counter() - began)
        turn, title = side.chat(list(messages), 6), side.chat(title_request(messages), 4)
        whole = left > 0 and await together([turn, title], left)
        if not whole:
            return [Figure("agent_total", seconds, cut=True, note=f"{len(firsts)} of {TURNS} turns")]
        told, _ = answers([turn, title])
        firsts.append(first(turn, told))
    took = time.perf_counter() - began
    return [Figure("agent_total", took), Figure("agent_late", statistics.median(firsts[-LATE:]))]


async def schemas(side: Side, seconds: float) -> list[Figure]:
    """Eight requests, each held to a schema of its own, beside four plain streams."""
    wanted = [schema(n) for n in range(8)]
    asked = [
        side.chat(
            [{"role": "user", "content": f"Reply with JSON. The marker is {marker(n)}."}],
            128,
            response_format={"type": "json_schema", "json_schema": {"name": f"shape{n}", "strict": True, "schema": shape}},
        )
        for n, shape in enumerate(wanted)
    ]
    streams = [side.plain(side.steady("schemas", n, 32), 96) for n in range(4)]
    whole = await together([*streams, *asked], seconds)
    told = [stream.answer() for stream in asked]
    right = [is_right(answer.text, shape) for answer, shape in zip(told, wanted, strict=True)]
    took = max(stream.ended for stream in asked) - min(stream.sent for stream in asked)
    wrong = [
        answer.error or f"a wrong answer: {answer.text[:60]!r}" for answer, good in zip(told, right, strict=True) if not good
    ]
    to_come = sum(not stream.whole and not stream.error for stream in asked)
    rate = Figure("schemas_rate", (sum(right) + to_come) / took, not whole)
    return [rate, Figure("schemas_right", sum(right), not whole, wrong[0] if wrong else "", len(wanted))]


def marker(number: int) -> int:
    """The number that only this request's answer may hold."""
    return 101 + 37 * number


def schema(number: int) -> dict[str, Any]:
    """A strict schema unlike the others; nothing in it is free to grow, so a valid answer is a short one."""
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "string", "enum": ["red", "green", "blue"]},
        {"type": "integer", "enum": [1, 2, 3]},
        {"type": "array", "items": {"type": "string", "enum": ["dog", "cat"]}, "minItems": 1, "maxItems": 3},
    ]
    inner = _object({"kind": kinds[number % 4], "other": kinds[(number + 1) % 4]})
    shape = {"marker": {"type": "integer", "enum": [marker(number)]}, f"field{number}": kinds[(number + 2) % 4]}
    return _object({**shape, "inner": inner} if number % 2 else {**shape, "last": kinds[(number + 3) % 4]})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def is_right(text: str, shape: dict[str, Any]) -> bool:
    """Whether this is JSON that the schema allows; a fence of backticks around it is not JSON."""
    try:
        return bool(jsonschema_rs.is_valid(shape, json.loads(text)))
    except ValueError:
        return False


async def same(side: Side, seconds: float) -> list[Figure]:
    """Short answers one after the other, then all at once: how many are what they were."""
    prompts = [side.text(6 + n * 37 % 91, 10000 + n) for n in range(side.crowd)]
    alone: list[str] = []
    deadline = time.perf_counter() + seconds * 0.75
    for prompt in prompts:
        stream = side.plain(prompt, SHORT_ANSWER)
        if not await together([stream], deadline - time.perf_counter()):
            break
        alone.append(answers([stream])[0].text)
    crowd = [side.plain(prompt, SHORT_ANSWER) for prompt in prompts]
    whole = await together(crowd, seconds / 4 + max(deadline - time.perf_counter(), 0))
    told = [stream.answer() for stream in crowd]
    if not alone or all(answer.error for answer in told):
        raise Failed(told[0].error or "not one was answered alone in time")
    equal = sum(answer.text == text and not answer.error for answer, text in zip(told, alone, strict=False))
    note = f"{side.crowd} at once, {len(alone)} of them answered alone in time"
    return [Figure("same", equal, not whole or len(alone) < len(prompts), note, len(alone))]


def memory_mb(pids: list[int]) -> float | None:
    """Megabytes of these processes, what they share counted once; None where the system does not tell."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024 if total else None


WORKLOADS: dict[str, Workload] = {
    "single": single,
    "eight": eight,
    "sixteen": sixteen,
    "arrivals": arrivals,
    "beside": beside,
    "schemas": schemas,
    "agent": agent,
    "same": same,
}
