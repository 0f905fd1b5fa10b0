"""Engines over TCP: one that joins under load, and two fronts of which one dies. Fake engines."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from bench.replicas.crowd import ask, compare, disturbed, percentile, show
from bench.replicas.failures import asked
from bench.replicas.servers import Served, fake_gate, fake_server, free_port, until

JOIN_SECONDS, LEASE_SECONDS = 10.0, 12.0


def fronts() -> None:
    """Run both and print each figure with its bar."""
    print("fake engines over TCP")
    asyncio.run(joined())
    asyncio.run(two_fronts())


async def joined() -> None:
    """A fourth replica joins three that have 48 streams; then requests come, four a second."""
    port = free_port()
    with ExitStack() as stack:
        addresses = [stack.enter_context(fake_gate()) for _ in range(3)]
        server = stack.enter_context(fake_server({"engines": (*addresses, f"127.0.0.1:{port}")}))
        server.wait_replicas(3)
        crowd = asked(48, 1200)
        name, running = f"127.0.0.1:{port}", asyncio.create_task(disturbed(server.url, crowd, None))
        await asyncio.to_thread(until, lambda: sum(one["requests"] for one in server.replicas) >= len(crowd))
        stack.enter_context(fake_gate(port))
        await asyncio.to_thread(server.wait_replicas, 4)
        placed = await asyncio.gather(*(_placed(server, place, name) for place in range(40)))
        moved = server.model["moved"]
        told = await running
        expected = await ask(server.url, crowd)
    share, found = sum(placed) / len(placed), compare(told, expected)
    show("a replica that joins gets, of what comes in 10 s", f"{share:.2f}", "≥ 1/(2N) = 0.125", is_met=share >= 0.125)
    show("running streams stay", f"{moved} moved, {found}", "0; 0, 0, 0", is_met=not moved and found.is_clean)


async def _placed(server: Served, place: int, name: str) -> bool:
    """Ask in its turn; whether it was sent to the replica of this name."""
    await asyncio.sleep(place * JOIN_SECONDS / 40)
    body = {"prompt": [place + 500, 7, 8], "max_tokens": 30, "ignore_eos": True}
    reply = await asyncio.to_thread(server.post, "/v1/completions", body)
    return bool(reply["timings"]["replica"]["name"] == name)


async def two_fronts() -> None:
    """Two fronts share two engines; one is killed under 16 streams of each."""
    with ExitStack() as stack:
        settings = {"engines": tuple(stack.enter_context(fake_gate()) for _ in range(2))}
        one, other = (stack.enter_context(fake_server(settings)) for _ in range(2))
        for server in (one, other):
            server.wait_replicas(2)
        mine, theirs = asked(16, 900), asked(16, 900, 100)
        expected = await ask(one.url, mine)
        seconds = 0.0

        async def kill() -> None:
            nonlocal seconds
            rows = len(mine) + len(mine) // 3  # every third one has two choices
            both = asyncio.create_task(ask(other.url, theirs))
            await asyncio.to_thread(until, lambda: sum(each["rows_running"] for each in one.replicas) > rows)
            begun = time.perf_counter()
            other.process.kill()
            await asyncio.to_thread(until, lambda: sum(each["rows_running"] for each in one.replicas) <= rows)
            seconds = time.perf_counter() - begun
            await both

        told = await disturbed(one.url, mine, kill)
    found, gap = compare(told, expected), percentile([each.longest_gap for each in told], 95)
    quiet = percentile([each.longest_gap for each in expected], 95)
    figure = f"{found}, longest gap p95 {gap:.2f} s (undisturbed {quiet:.2f} s)"
    show("one of two fronts is killed: the other's streams", figure, "0, 0, 0", is_met=found.is_clean and gap <= quiet + 0.5)
    show("the engines drop its rows after", f"{seconds:.1f} s", f"≤ {LEASE_SECONDS:g} s", is_met=seconds <= LEASE_SECONDS)
