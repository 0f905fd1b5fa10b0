"""`python -m bench.cluster.validate [REQUESTS]`: the simulation beside a real run of the same requests on two real replicas.

Costs of chunks and steps are fitted on the running server first, both replicas at work, since they share this machine's cores
with front and client. Then a small trace like the public ones (blocks of 64 tokens) is asked for, and simulated. Prints what
the simulation says over what was measured.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.cluster.simulated import Costs
from bench.cluster.simulation import Cluster, Simulation
from bench.cluster.trace import TracedRequest, made_up
from bench.compare.client import Stream, events
from bench.replicas.crowd import percentile
from bench.replicas.servers import Served, real_server

MODEL = ("tiny-hybrid", "--replicas", "2", "--force", "--speculate", "off", "--cache-megabytes", "256")
REPLICAS, ROWS, CHUNK_TOKENS, ROW_COST = 2, 16, 128, 0.2  # as engines on a CPU have them
BLOCK_TOKENS, SHRINK = 64, 8  # a block has 512 in the public traces
MAX_PROMPT = 1900  # of a context of 2,048
NUM_IDS, FIRST_ID = 2900, 100  # of the vocabulary
LOAD = 0.35  # share of the time in which the replicas would be busy, if they computed one thing at a time
UNCACHED_SHARE = 0.65  # of prompt tokens, in conversations such as these
SHORT_TOKENS, LONG_TOKENS = 20, 12 * CHUNK_TOKENS
SEEDS = itertools.count(10**6)


def main() -> None:
    """Fit, run, simulate, print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with real_server(*MODEL) as server:
        server.wait_replicas(REPLICAS)
        costs = fit(server)
        trace = small_trace(count, costs)
        measured = asyncio.run(run(server, trace))
    outcome = Simulation(
        Cluster(REPLICAS, "weft", costs, ROWS, 10**8, chunk_tokens=CHUNK_TOKENS, row_cost=ROW_COST, has_checkpoints=True)
    ).run(trace)
    firsts = outcome.first_token_seconds
    print(f"{count} requests in {trace[-1].at:.0f} s; {costs}")
    show("TTFT mean", statistics.mean(firsts), statistics.mean(measured.firsts))
    show("TTFT p50", percentile(firsts, 50), percentile(measured.firsts, 50))
    show("TTFT p95", percentile(firsts, 95), percentile(measured.firsts, 95))
    show("hits", outcome.hits, measured.hits)


def show(name: str, simulated: float, measured: float) -> None:
    """Print a line: simulated over measured."""
    print(f"  {name}: simulated {simulated:.4f}, measured {measured:.4f}, ratio {simulated / measured:.2f}", flush=True)


def fit(server: Served) -> Costs:
    """Return the costs of steps and chunks, from prompts of one chunk and of many, and from crowds of short and of long rows."""

    async def prompt_seconds(size: int) -> float:
        answers = await ask_all(server.url, [(prompt_of(next(SEEDS), size), 1) for _ in range(REPLICAS)])
        return statistics.mean(one.timings["prompt_ms"] / 1e3 for one in answers)

    async def step_seconds(num_rows: int, size: int) -> float:
        answers = await ask_all(server.url, [(prompt_of(next(SEEDS), size), 100) for _ in range(REPLICAS * num_rows)])
        return statistics.median(1 / one.timings["predicted_per_second"] for one in answers)

    def steps_of(num_rows: int, size: int = SHORT_TOKENS) -> float:
        return statistics.median(asyncio.run(step_seconds(num_rows, size)) for _ in range(3))

    def prompts_of(size: int) -> float:
        return statistics.median(asyncio.run(prompt_seconds(size)) for _ in range(7))

    sizes, rows = (24, 48, 72, 96, 120), (1, 2, 4, 8)
    steps_of(2)
    per_token, _ = statistics.linear_regression(sizes, [prompts_of(size) for size in sizes])
    per_row, per_step = statistics.linear_regression(rows, [steps_of(count) for count in rows])
    one, six, twelve = (prompts_of(count * CHUNK_TOKENS) for count in (1, 6, 12))  # a request has a price beside its chunks'
    early, late = (six - one) / 5, (twelve - six) / 6  # a chunk after three others, and one after 8.5, in the mean
    per_start = max(0.0, (late - early) / (CHUNK_TOKENS * 5.5 * CHUNK_TOKENS))
    chunk = early - per_start * CHUNK_TOKENS * 3 * CHUNK_TOKENS
    per_token = min(per_token, chunk / CHUNK_TOKENS)
    per_length = max(0.0, (steps_of(1, LONG_TOKENS) - steps_of(1)) / (LONG_TOKENS - SHORT_TOKENS))
    per_chunk = chunk - CHUNK_TOKENS * per_token
    return Costs(per_step, max(0.0, per_row), per_chunk, per_token, per_length, per_start, grain=1)


def small_trace(count: int, costs: Costs) -> list[TracedRequest]:
    """Return conversations like those of the public traces, an eighth as long, at a load that these replicas can bear."""
    trace = [
        replace(one, num_prompt=one.num_prompt // SHRINK, num_output=max(4, one.num_output // 16), block_tokens=BLOCK_TOKENS)
        for one in made_up(3 * count, 1.0)
        if one.num_prompt // SHRINK <= MAX_PROMPT
    ][:count]
    tokens, steps = sum(one.num_prompt for one in trace), sum(one.num_output for one in trace)
    num_chunks = UNCACHED_SHARE * tokens / CHUNK_TOKENS + count
    work = UNCACHED_SHARE * tokens * costs.token_seconds + num_chunks * costs.chunk_seconds
    work += steps * costs.step(4) / 4  # rows step together
    return [replace(one, at=one.at * work / REPLICAS / LOAD) for one in trace]


@dataclass(frozen=True)
class Answered:
    """One answer: seconds to its first text, and what the server says of it."""

    first: float
    timings: dict[str, float]
    num_prompt: int


@dataclass(frozen=True)
class Measured:
    """A real run."""

    firsts: list[float]
    hits: float


async def run(server: Served, trace: Sequence[TracedRequest]) -> Measured:
    """Ask for each request of a trace at its time."""

    async def later(request: TracedRequest) -> Answered:
        await asyncio.sleep(request.at)
        ids = [one * 2654435761 % 2**32 % NUM_IDS + FIRST_ID for one in request.prompt(1)]
        return await ask_one(server.url, ids, request.num_output)

    answers = await asyncio.gather(*map(later, trace))
    cached = sum(one.timings["cache_n"] for one in answers)
    return Measured([one.first for one in answers], cached / sum(one.num_prompt for one in answers))


async def ask_all(url: str, asked: Sequence[tuple[list[int], int]]) -> list[Answered]:
    """All at once."""
    return await asyncio.gather(*(ask_one(url, *one) for one in asked))


async def ask_one(url: str, ids: list[int], num_tokens: int) -> Answered:
    """One stream to its end."""
    stream = Stream(url, "/v1/completions", {"prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True})
    await stream.run()
    told = list(events(stream.parts))
    assert stream.status == 200, stream.parts
    first = next(moment for moment, event in told if event.get("choices"))
    timings = next(event["timings"] for _, event in reversed(told) if event.get("timings"))
    return Answered(first - stream.sent, timings, len(ids))


def prompt_of(seed: int, size: int) -> list[int]:
    """Return ids that no other seed begins with."""
    return [(seed * 977 + place * 31) % NUM_IDS + FIRST_ID for place in range(size)]


if __name__ == "__main__":
    main()
