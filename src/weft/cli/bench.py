"""`weft bench serve`: load on a running server from clients of its own, and what they saw of it.

A client is a thread with a connection for each request, as other programs have them; it notes when every piece of text came.
Figures are what clients feel, waiting included.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weft.cli.client import ServerClient
from weft.cli.models import write_columns
from weft.errors import WeftError

ASK_SECONDS = 30.0
WORDS = "dog tree boat bird house frog river stone garden window letter morning"
SYSTEM = "You are a careful helper. You look into files, say what is in them, and never guess. "


@dataclass(frozen=True)
class BenchOptions:
    """What the command line said."""

    clients: int = 8
    requests: int = 32
    prompt_tokens: int = 256
    max_tokens: int = 64
    shared_prefix: int = 0
    replay: bool = False
    model: str | None = None
    url: str | None = None
    api_key: str | None = None
    json_file: Path | None = None

    def check(self) -> None:
        """Raise WeftError naming the first that can not be."""
        for name in ("clients", "requests", "prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise WeftError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if not 0 <= self.shared_prefix < self.prompt_tokens:
            raise WeftError(f"--shared-prefix {self.shared_prefix} must be between 0 and --prompt-tokens {self.prompt_tokens}")


@dataclass
class RequestTrace:
    """One request as its client saw it; moments are seconds since the load began."""

    client: int
    start: float
    first: float | None = None  # when the first text came
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between pieces of text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Spread:
    """How a figure is spread over the requests, in seconds."""

    p50: float
    p95: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """Nothing where there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95))
        return Spread(p50, p95, ordered[-1])


@dataclass(frozen=True)
class Summary:
    """The figures of a load."""

    model: str
    clients: int
    requests: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    prefill_per_second: float  # prompt tokens computed, over the seconds in which some request was before its first token
    decode_per_second: float  # tokens of answers, over the whole time
    request_prefill_per_second: float  # the median of single requests, by the server's own clock
    request_decode_per_second: float
    first_token: Spread | None
    gap: Spread | None
    errors: dict[str, int]


class _Ids(msgspec.Struct):
    tokens: list[int]


class _BenchModel(msgspec.Struct):
    id: str


class _BenchModels(msgspec.Struct):
    data: list[_BenchModel]


def bench_serve_command(options: BenchOptions) -> int:
    """Load the server, print what was seen. Gives 1 where a request failed."""
    options.check()
    client = ServerClient(options.url, options.api_key)
    model = _model(client, options.model)
    clients = _agents(options, model) if options.replay else _crowd(options, model, _ids(client, model))
    asked, seconds = _load(options, clients)
    summary = summarised(asked, model, options.clients, seconds)
    write_columns(_table(summary))
    sys.stdout.writelines(f"{count} failed: {error}\n" for error, count in summary.errors.items())
    if options.json_file is not None:
        document = {"summary": asdict(summary), "requests": [asdict(each) for each in asked]}
        _write(options.json_file, json.dumps(document, indent=2) + "\n")
    return 1 if summary.errors else 0


Bodies = Iterator[tuple[str, dict[str, Any]]]  # a path and what is sent there, one after the other


def _crowd(options: BenchOptions, model: str, ids: list[int]) -> list[Bodies]:
    """Clients that take prompts of random tokens from one heap; each begins with the tokens that all share."""
    heap, lock = iter(range(options.requests)), threading.Lock()
    shared = random.Random("shared").choices(ids, k=options.shared_prefix)

    def bodies() -> Bodies:
        while True:
            with lock:
                number = next(heap, None)
            if number is None:
                return
            own = random.Random(f"{time.time_ns()} {number}").choices(ids, k=options.prompt_tokens - options.shared_prefix)
            yield "/v1/completions", _body(model, options) | {"prompt": shared + own}

    return [bodies() for _ in range(options.clients)]


def _agents(options: BenchOptions, model: str) -> list[Bodies]:
    """Agents, each with a conversation of its own that grows by a call and its result, or by an answer and a question."""

    def bodies(agent: int, turns: int) -> Bodies:
        told: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        told.append({"role": "user", "content": f"I am number {agent} at {time.time_ns()}. Look at the first file."})
        rng, words = random.Random(agent), WORDS.split()
        tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
        for turn in range(1, turns + 1):
            more = {"messages": list(told), "tools": tools, "tool_choice": "none"}
            yield "/v1/chat/completions", _body(model, options) | more
            content = " ".join(rng.choices(words, k=40))
            if turn % 2:
                call = {"name": "read", "arguments": json.dumps({"file": turn})}
                calls = [{"id": f"call{turn:05}", "type": "function", "function": call}]
                told.append({"role": "assistant", "content": None, "tool_calls": calls})
                told.append({"role": "tool", "tool_call_id": f"call{turn:05}", "content": content})
            else:
                told.append({"role": "assistant", "content": f"It says: {content}."})
                told.append({"role": "user", "content": f"Please look at number {turn + 1} now."})

    share, rest = divmod(options.requests, options.clients)
    return [bodies(agent, share + (agent < rest)) for agent in range(options.clients)]


def _body(model: str, options: BenchOptions) -> dict[str, Any]:
    asked = {"model": model, "max_tokens": options.max_tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}


def _load(options: BenchOptions, clients: list[Bodies]) -> tuple[list[RequestTrace], float]:
    """Let all clients ask, with bars on stderr; what each request saw, and how long it took in all."""
    pieces = TextColumn("{task.fields[pieces]} pieces of text")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), pieces, TimeElapsedColumn())
    seen: list[RequestTrace] = []
    start = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as bars, ThreadPoolExecutor(len(clients)) as pool:
        bar = bars.add_task("requests", total=options.requests, pieces=0)
        heard = itertools.count(1)

        def run(number: int, bodies: Bodies) -> None:
            client = ServerClient(options.url, options.api_key)
            for path, body in bodies:
                asked = RequestTrace(number, time.perf_counter() - start)
                _ask(client, path, body, asked, start, lambda: bars.update(bar, pieces=next(heard)))
                seen.append(asked)
                bars.advance(bar)
                if asked.error is not None and options.replay:
                    return  # the next turn stands on this one

        for done in [pool.submit(run, number, bodies) for number, bodies in enumerate(clients)]:
            done.result()
    return seen, time.perf_counter() - start


def _ask(
    client: ServerClient, path: str, body: dict[str, Any], asked: RequestTrace, start: float, tick: Callable[[], None]
) -> None:
    """Ask and note in `asked` what comes, and when."""
    last = 0.0
    try:
        with closing(client.stream(path, body)) as events:
            for event in events:
                now = time.perf_counter() - start
                if _has_text(event):
                    tick()
                    if asked.first is None:
                        asked.first = now
                    else:
                        asked.gaps.append(now - last)
                    last = now
                _note(event, asked)
    except WeftError as error:
        asked.error = re.sub(r"\d+", "N", str(error))  # so that those of one kind are one
    asked.end = time.perf_counter() - start


def _has_text(event: dict[str, Any]) -> bool:
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {"content": choice.get("text")}
        if delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def _note(event: dict[str, Any], asked: RequestTrace) -> None:
    if usage := event.get("usage"):
        asked.prompt_tokens, asked.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        asked.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if timings := event.get("timings"):
        asked.prefill_seconds, asked.decode_seconds = timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000


def summarised(asked: list[RequestTrace], model: str, clients: int, seconds: float) -> Summary:
    """The figures of what the clients saw."""
    good = [each for each in asked if each.error is None]
    computed = [each.prompt_tokens - each.cached_tokens for each in good]
    waits = _covered([(each.start, each.first) for each in good if each.first is not None])
    return Summary(
        model=model,
        clients=clients,
        requests=len(asked),
        seconds=seconds,
        prompt_tokens=sum(each.prompt_tokens for each in good),
        cached_tokens=sum(each.cached_tokens for each in good),
        tokens=sum(each.tokens for each in good),
        prefill_per_second=sum(computed) / waits if waits else 0.0,
        decode_per_second=sum(each.tokens for each in good) / seconds,
        request_prefill_per_second=_median(
            count / each.prefill_seconds for count, each in zip(computed, good, strict=True) if each.prefill_seconds
        ),
        request_decode_per_second=_median((each.tokens - 1) / each.decode_seconds for each in good if each.decode_seconds),
        first_token=Spread.of([each.first - each.start for each in good if each.first is not None]),
        gap=Spread.of([gap for each in good for gap in each.gaps]),
        errors=dict(Counter(each.error for each in asked if each.error is not None)),
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans."""
    seconds, reached = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def _median(values: Iterator[float]) -> float:
    spread = Spread.of(list(values))
    return spread.p50 if spread else 0.0


def _table(summary: Summary) -> list[tuple[str, ...]]:
    def shown(spread: Spread | None) -> tuple[str, ...]:
        return tuple(f"{value * 1000:.1f}" for value in asdict(spread).values()) if spread else ("-", "-", "-")

    known = f"{summary.cached_tokens / summary.prompt_tokens:.0%} known before" if summary.prompt_tokens else ""
    return [
        (summary.model, f"{summary.requests} requests", f"{summary.clients} clients", f"{summary.seconds:.1f} s"),
        ("tokens", f"{summary.prompt_tokens} prompt", f"{summary.tokens} answer", known),
        ("tok/s, all", f"{summary.prefill_per_second:.0f} prefill", f"{summary.decode_per_second:.0f} decode", ""),
        (
            "tok/s, one",
            f"{summary.request_prefill_per_second:.0f} prefill",
            f"{summary.request_decode_per_second:.0f} decode",
            "",
        ),
        ("ms", "p50", "p95", "max"),
        ("first token", *shown(summary.first_token)),
        ("token gap", *shown(summary.gap)),
    ]


def _model(client: ServerClient, wanted: str | None) -> str:
    names = [model.id for model in client.get("/v1/models", _BenchModels, ASK_SECONDS).data]
    if wanted is None and len(names) > 1:
        raise WeftError(f"the server has several models ({', '.join(names)}); choose one with --model")
    return wanted or names[0]


def _ids(client: ServerClient, model: str) -> list[int]:
    """Ids of ordinary tokens, for prompts of an exact length."""
    body = {"model": model, "prompt": f" {WORDS}", "add_special_tokens": False}
    return client.post("/tokenize", body, _Ids, ASK_SECONDS).tokens


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WeftError(f"{file} can not be written: {error.strerror}") from error
    sys.stderr.write(f"{file} is written\n")
