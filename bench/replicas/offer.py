"""What a pool costs: the same streams over one fake engine, eight replicas, and eight over TCP."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

from bench.front import ask
from bench.replicas.crowd import show
from bench.replicas.servers import STEP_SECONDS, fake_gate, fake_server

REPLICAS, STREAMS, TOKENS, WORDS = 8, 64, 200, 50
ROUNDS = 3


def offer() -> None:
    """Print tokens a second of each way, as a share of what the engines offer, and the time to the first event."""
    print(f"{STREAMS} streams of {TOKENS} tokens, fake engines that offer {STREAMS / STEP_SECONDS:,.0f} tokens/s")
    one, first = measure({})
    print(f"          one engine: {one:.2f} of the offer, first event after {first * 1e3:.1f} ms")
    here, first_here = measure({"replicas": REPLICAS, "force": True})
    with ExitStack() as stack:
        addresses = [stack.enter_context(fake_gate()) for _ in range(REPLICAS)]
        over_tcp, first_tcp = measure({"engines": tuple(addresses)})
    show(f"{REPLICAS} replicas over the offer", f"{here:.2f}", "≥ 0.95", is_met=here >= 0.95)
    show(f"{REPLICAS} over TCP over {REPLICAS} replicas here", f"{over_tcp / here:.2f}", "≥ 0.95", is_met=over_tcp >= 0.95 * here)
    later, later_tcp = first_here - first, first_tcp - first
    show(
        "one lone stream's first event later than with one engine",
        f"{later * 1e3:.1f} ms, over TCP {later_tcp * 1e3:.1f} ms",
        "≤ 2 ms",
        is_met=max(later, later_tcp) <= 0.002,
    )


def measure(settings: dict[str, Any]) -> tuple[float, float]:
    """Return the share of the offer that a crowd gets, and the seconds to a lone stream's first event; medians."""
    with fake_server(settings) as server:
        if settings:
            server.wait_replicas(REPLICAS)
        ask(server.url, REPLICAS, 20, WORDS)
        told = [ask(server.url, STREAMS, TOKENS, WORDS) for _ in range(ROUNDS)]
        time.sleep(STEP_SECONDS)
        firsts = [ask(server.url, 1, 2, WORDS)["streams"][0]["first"] for _ in range(5 * ROUNDS)]
    rates = [TOKENS / one["seconds"] * STEP_SECONDS for one in told]
    return statistics.median(rates), statistics.median(firsts)
