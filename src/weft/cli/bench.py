"""`weft bench serve`: send load to a running server from client threads and report throughput, latencies and errors."""

import itertools
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weft.cli import ApiKey, ChosenModel, Switch, Url, write_columns, writing
from weft.cli.client import ServerClient, choose_model, read_delta
from weft.errors import WeftError

ASK_SECONDS = 30.0
WORDS = "dog tree boat bird house frog river stone garden window letter morning"
SYSTEM = "You are a careful helper. You look into files, say what is in them, and never guess. "

bench_command = App(name="bench", help="How fast a running server is, from outside.")

Bodies = Iterator[tuple[str, dict[str, Any]]]  # one client's requests: a path, and the body that is sent there


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Command-line options of `weft bench serve`; the string under each field is the help text of its flag."""

    clients: int = 8
    """How many ask at the same time."""
    requests: int = 32
    """How many requests there are in all."""
    prompt_tokens: int = 256
    """The length of each prompt; agents have their own."""
    max_tokens: int = 64
    """The length of each answer; it is not ended before, but agents' may be."""
    shared_prefix: int = 0
    """So many tokens at the beginning are the same in all prompts."""
    replay: Switch = False
    """Ask as agents do."""
    model: ChosenModel = None
    url: Url = None
    api_key: ApiKey = None
    json_file: Annotated[Path | None, Parameter(name="--json")] = None
    """Write all figures, those of every request too, to this file."""

    def check(self) -> None:
        for name in ("clients", "requests", "prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise WeftError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if not 0 <= self.shared_prefix < self.prompt_tokens:
            raise WeftError(f"--shared-prefix {self.shared_prefix} must be between 0 and --prompt-tokens {self.prompt_tokens}")

    def body(self, model: str) -> dict[str, Any]:
        sampling = {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": model, **sampling, "stream": True, "stream_options": {"include_usage": True}}


@dataclass
class RequestTrace:
    """Client-side times (seconds since the load began) of one request, and the server's token counts and timings for it."""

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


@bench_command.command(name="serve")
def bench_serve_command(options: Annotated[BenchOptions, Parameter(name="*")] = BenchOptions()) -> int:  # noqa: B008 - frozen
    """Load a running server from several clients at once and say what they saw: speeds, waits, gaps, errors.

    Prompts are of random tokens, so that nothing of them is known before. With
    --replay each client is an agent: its requests are the turns of one growing
    conversation with tool calls and their results. Status 1 where a request failed.

    For example:
      weft bench serve
      weft bench serve --clients 32 --requests 200 --shared-prefix 128
      weft bench serve --replay --clients 4 --requests 80 --json load.json
    """
    options.check()
    client = ServerClient(options.url, options.api_key)
    listed = client.models(ASK_SECONDS)
    model = options.model or choose_model(listed, None).id
    clients = _agent_clients(options, model) if options.replay else _random_clients(options, model, client)
    traces, seconds = _run_load(options, clients)
    summary = summarize(traces, model, options.clients, seconds)
    write_columns(_table(summary))
    sys.stdout.writelines(f"{count} failed: {error}\n" for error, count in summary["errors"].items())
    if options.json_file is not None:
        document = {"summary": summary, "requests": [asdict(trace) for trace in traces]}
        with writing(options.json_file):
            options.json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        sys.stderr.write(f"{options.json_file} is written\n")
    return 1 if summary["errors"] else 0


def _random_clients(options: BenchOptions, model: str, client: ServerClient) -> list[Bodies]:
    """Return one request iterator per client: random-token prompts after a common prefix, `options.requests` in all."""
    words = {"model": model, "prompt": f" {WORDS}", "add_special_tokens": False}
    ids = client.fetch("/tokenize", dict[str, Any], ASK_SECONDS, words)["tokens"]  # ordinary ones: prompts of an exact length
    numbers = iter(range(options.requests))  # all clients take from it; taking one is atomic
    shared = random.Random("shared").choices(ids, k=options.shared_prefix)

    def bodies() -> Bodies:
        for number in numbers:
            own = random.Random(f"{time.time_ns()} {number}").choices(ids, k=options.prompt_tokens - options.shared_prefix)
            yield "/v1/completions", options.body(model) | {"prompt": shared + own}

    return [bodies() for _ in range(options.clients)]


def _agent_clients(options: BenchOptions, model: str) -> list[Bodies]:
    """Return one iterator of chat requests per client: the successive turns of a growing conversation with tool calls."""

    def bodies(agent: int, turns: int) -> Bodies:
        first = {"role": "user", "content": f"I am number {agent} at {time.time_ns()}. Look at the first file."}
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, first]
        rng, words = random.Random(agent), WORDS.split()
        tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
        for turn in range(1, turns + 1):
            yield "/v1/chat/completions", options.body(model) | {"messages": [*messages], "tools": tools, "tool_choice": "none"}
            content = " ".join(rng.choices(words, k=40))
            if turn % 2:
                call = {"name": "read", "arguments": json.dumps({"file": turn})}
                calls = [{"id": f"call{turn:05}", "type": "function", "function": call}]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages.append({"role": "tool", "tool_call_id": f"call{turn:05}", "content": content})
            else:
                messages.append({"role": "assistant", "content": f"It says: {content}."})
                messages.append({"role": "user", "content": f"Please look at number {turn + 1} now."})

    share, rest = divmod(options.requests, options.clients)
    return [bodies(agent, share + (agent < rest)) for agent in range(options.clients)]


def _run_load(options: BenchOptions, clients: list[Bodies]) -> tuple[list[RequestTrace], float]:
    """Send all clients' requests, one thread per client, with a progress bar; return the traces and the elapsed seconds."""
    pieces = TextColumn("{task.fields[pieces]} pieces of text")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), pieces, TimeElapsedColumn())
    traces: list[RequestTrace] = []
    start = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as bars, ThreadPoolExecutor(len(clients)) as pool:
        bar = bars.add_task("requests", total=options.requests, pieces=0)
        count = itertools.count(1)

        def run(number: int, bodies: Bodies) -> None:
            client = ServerClient(options.url, options.api_key)
            for path, body in bodies:
                trace = RequestTrace(number, time.perf_counter() - start)
                _run_request(client.stream(path, body), trace, start, lambda: bars.update(bar, pieces=next(count)))
                traces.append(trace)
                bars.advance(bar)
                if trace.error is not None and options.replay:
                    return  # the next turn would repeat this one's messages

        list(pool.map(run, itertools.count(), clients))  # raises what a client raised
    return traces, time.perf_counter() - start


def _run_request(stream: Generator[dict[str, Any]], trace: RequestTrace, start: float, count_piece: Callable[[], None]) -> None:
    """Read one streamed answer to its end and record in `trace` its times, token counts and error, if any."""
    moments: list[float] = []  # at which text came
    try:
        with closing(stream) as events:
            for event in events:
                if any(any(read_delta(choice)) for choice in event.get("choices", ())):
                    moments.append(time.perf_counter() - start)
                    count_piece()
                if usage := event.get("usage"):
                    trace.prompt_tokens, trace.tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    trace.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if timings := event.get("timings"):
                    trace.prefill_seconds, trace.decode_seconds = timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000
    except WeftError as error:
        trace.error = re.sub(r"\d+", "N", str(error))  # so that errors of one kind are counted as one
    trace.end = time.perf_counter() - start
    trace.first = moments[0] if moments else None
    trace.gaps = [after - before for before, after in itertools.pairwise(moments)]


def summarize(traces: list[RequestTrace], model: str, clients: int, seconds: float) -> dict[str, Any]:
    """Return throughput, latency percentiles and token counts of the successful requests, and a count of each error message."""
    good = [trace for trace in traces if trace.error is None]
    counts = {name: sum(getattr(trace, name) for trace in good) for name in ("prompt_tokens", "cached_tokens", "tokens")}
    waits = [(trace.start, trace.first) for trace in good if trace.first is not None]
    prefills = [(one.prompt_tokens - one.cached_tokens) / one.prefill_seconds for one in good if one.prefill_seconds]
    decodes = [(one.tokens - 1) / one.decode_seconds for one in good if one.decode_seconds]
    load = {"model": model, "clients": clients, "requests": len(traces), "seconds": seconds} | counts
    return load | {
        # Prompt tokens computed, over the seconds in which some request was before its first token.
        "prefill_per_second": (counts["prompt_tokens"] - counts["cached_tokens"]) / (_covered_seconds(waits) or math.inf),
        "decode_per_second": counts["tokens"] / seconds,  # over the whole time
        "request_prefill_per_second": _spread(prefills or [0.0])["p50"],  # of single requests, by the server's own clock
        "request_decode_per_second": _spread(decodes or [0.0])["p50"],
        "first_token": _spread([first - start for start, first in waits]) if waits else None,  # seconds
        "gap": _spread(gaps) if (gaps := [gap for trace in good for gap in trace.gaps]) else None,
        "errors": dict(Counter(trace.error for trace in traces if trace.error is not None)),
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p95": ordered[int(len(ordered) * 0.95)], "max": ordered[-1]}


def _covered_seconds(spans: list[tuple[float, float]]) -> float:
    seconds, reached = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def _table(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    def cells(spread: dict[str, float] | None) -> tuple[str, ...]:
        return tuple(f"{value * 1000:.1f}" for value in spread.values()) if spread else ("-", "-", "-")

    def rates(scope: str) -> tuple[str, ...]:
        return f"{summary[f'{scope}prefill_per_second']:.0f} prefill", f"{summary[f'{scope}decode_per_second']:.0f} decode", ""

    known = f"{summary['cached_tokens'] / summary['prompt_tokens']:.0%} known before" if summary["prompt_tokens"] else ""
    return [
        (summary["model"], f"{summary['requests']} requests", f"{summary['clients']} clients", f"{summary['seconds']:.1f} s"),
        ("tokens", f"{summary['prompt_tokens']} prompt", f"{summary['tokens']} answer", known),
        ("tok/s, all", *rates("")),
        ("tok/s, one", *rates("request_")),
        ("ms", "p50", "p95", "max"),
        ("first token", *cells(summary["first_token"])),
        ("token gap", *cells(summary["gap"])),
    ]
