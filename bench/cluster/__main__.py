"""`python -m bench.cluster TRACE`: a trace of requests over simulated replicas, by several policies in one run.

Prints for each policy the share of prompt tokens that were cached, seconds to the first token, how evenly work was divided,
and what was moved or never ended. "one-cache" is a single replica with the sum of all caches and speeds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from bench.cluster.policies import POLICIES
from bench.cluster.simulated import Costs
from bench.cluster.simulation import Cluster, Death, Outcome, Simulation
from bench.cluster.trace import TracedRequest, made_up, multiplied, read_trace

HEADS = ("policy", "hits", "TTFT mean", "p50", "p95", "max/mean work", "moved", "unfinished", "simulated in")

ONE_CACHE = "one-cache"


def main() -> None:
    """Read the command line, run the policies, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="Mooncake's format, .jsonl or .jsonl.gz; without it one is made up")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--load", type=float, default=1.0, help="times as many requests a second")
    parser.add_argument("--copies", type=int, default=1, help="of the trace, shifted in time, with prompts of their own")
    parser.add_argument("--requests", type=int, help="only so many of them")
    parser.add_argument("--fronts", type=int, default=1, help="that get requests by turns and know nothing of each other")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until fronts hear what an engine says")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--cached-tokens", type=int, default=1_000_000, help="of each replica")
    parser.add_argument("--prefill", type=float, default=8000.0, help="prompt tokens a second of each replica")
    parser.add_argument("--step", type=float, default=0.010, help="seconds of a decode step")
    parser.add_argument("--policies", default=",".join((*POLICIES, ONE_CACHE)))
    parser.add_argument("--kill", action="append", default=[], metavar="AT:REPLICA:AWAY", help="seconds, number, seconds")
    asked = parser.parse_args()
    trace = read_trace(asked.trace) if asked.trace is not None else made_up(2000, 600.0)
    trace = multiplied(trace[: asked.requests], asked.copies)
    trace = [replace(one, at=one.at / asked.load) for one in trace]
    deaths = [Death(float(at), int(number), float(away)) for at, number, away in (text.split(":") for text in asked.kill)]
    costs = Costs(step_seconds=asked.step, token_seconds=1 / asked.prefill)
    cluster = Cluster(asked.replicas, "weft", costs, asked.rows, asked.cached_tokens, asked.fronts, delay_seconds=asked.delay)
    print(f"{len(trace)} requests in {trace[-1].at:.0f} s, {asked.replicas} replicas of {asked.cached_tokens:,} cached tokens")
    print("  ".join(f"{head:>13}" for head in HEADS))
    found = {}
    for policy in asked.policies.split(","):
        is_whole = policy == ONE_CACHE
        chosen = whole(cluster) if is_whole else replace(cluster, policy=policy)
        found[policy] = show(policy, chosen, trace, [] if is_whole else deaths)
    compare(found)


def compare(found: dict[str, Outcome]) -> None:
    """Print weft's figures over those of the others, with the bars for a load that the replicas can bear."""
    if (ours := found.get("weft")) is None:
        return
    if (one := found.get(ONE_CACHE)) is not None:
        print(f"hits over one cache's {ours.hits / one.hits:.2f} (wanted ≥ 0.9)")
    print(f"max/mean work {ours.imbalance:.2f} (wanted ≤ 1.1)")
    for name, bar in (("least-loaded", 0.85), ("round-robin", 0.45)):
        if name in found:
            print(f"TTFT over {name}'s: mean {ours.mean / found[name].mean:.2f} (wanted ≤ {bar})")


def whole(cluster: Cluster) -> Cluster:
    """Return a single replica that has the caches and speeds of all."""
    number, costs = cluster.num_replicas, cluster.costs
    faster = replace(
        costs,
        step_seconds=costs.step_seconds / number,
        row_seconds=costs.row_seconds / number**2,  # it has as many rows as all together
        chunk_seconds=costs.chunk_seconds / number,
        token_seconds=costs.token_seconds / number,
    )
    return Cluster(1, "weft", faster, cluster.max_rows * number, cluster.cached_tokens * number)


def show(name: str, cluster: Cluster, trace: list[TracedRequest], deaths: list[Death]) -> Outcome:
    """Run one policy and print its line."""
    begun = time.perf_counter()
    outcome = Simulation(cluster, deaths).run(trace)
    figures = (
        f"{outcome.hits:.1%}", f"{outcome.mean:.2f} s", f"{outcome.percentile(50):.2f} s", f"{outcome.percentile(95):.2f} s",
        f"{outcome.imbalance:.2f}", str(outcome.num_moved), str(outcome.num_unfinished), f"{time.perf_counter() - begun:.0f} s",
    )  # fmt: skip
    print("  ".join(f"{text:>13}" for text in (name, *figures)), flush=True)
    return outcome


if __name__ == "__main__":
    main()
