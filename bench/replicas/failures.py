"""Deaths, stops, poison and upgrades under streams of fake engines, whose steps take as long as a small machine allows."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field

from bench.replicas.crowd import COMPLETIONS, Asked, ask, compare, disturbed, percentile, show
from bench.replicas.servers import Served, fake_server, send, until

POISON = 666
PLAIN = {"temperature": 0, "ignore_eos": True}
DRAIN_SECONDS = 1.0


def asked(count: int, num_tokens: int, first: int = 0) -> list[Asked]:
    """Streams of three kinds: plain, seeded, and of two choices; their prompts are all different."""
    kinds = ({}, {"seed": 5, "temperature": 0.9}, {"n": 2})
    return [
        (COMPLETIONS, {**PLAIN, "prompt": [first + place + 1, 50, 60], "max_tokens": num_tokens, **kinds[place % 3]})
        for place in range(count)
    ]


def failures() -> None:
    """Run all of them and print each figure with its bar."""
    print("fake engines, steps of 20 ms")
    for scene in (killed, stopped, poisoned, upgraded):
        asyncio.run(scene())


async def killed() -> None:
    """One of four replicas is killed under 48 streams that run and 16 that have just come."""
    running, late = asked(48, 300), asked(16, 300, 100)
    with fake_server({"replicas": 4, "force": True}) as server:
        server.wait_replicas(4)
        expected = await ask(server.url, running + late)

        async def kill() -> None:
            send(server.busiest, signal.SIGKILL)

        told = await disturbed(server.url, running, kill, late)
        moved = server.model["moved"]
    gaps, quiet = [one.longest_gap for one in told], percentile([one.longest_gap for one in expected], 95)
    found = compare(told, expected)
    show("64 streams over 4 replicas, one killed", f"{found}; {moved} moved", "0, 0, 0", is_met=found.is_clean)
    gap, first = percentile(sorted(gaps)[-16:], 95), max(one.first for one in told[len(running) :])
    figure = f"{gap:.2f} s (undisturbed {quiet:.2f} s), first event of those that had just come ≤ {first:.2f} s"
    show("its streams' longest gap, p95", figure, "≤ 0.5 s + the prefill", is_met=gap <= 0.5)


async def stopped() -> None:
    """One of four replicas is stopped under 64 streams, and woken when they have gone elsewhere."""
    crowd = asked(64, 500)
    with fake_server({"replicas": 4, "force": True}) as server:
        server.wait_replicas(4)
        expected = await ask(server.url, crowd)
        victim, seconds = server.busiest, 0.0

        async def stop() -> None:
            nonlocal victim, seconds
            victim = server.busiest
            send(victim, signal.SIGSTOP)
            seconds = await asyncio.to_thread(until, lambda: not server.replica(victim["name"])["requests"])
            send(victim, signal.SIGCONT)

        told = await disturbed(server.url, crowd, stop)
        server.wait_replicas(4)
        again = asyncio.create_task(ask(server.url, asked(32, 100, 200)))
        await asyncio.to_thread(until, lambda: server.replica(victim["name"])["requests"] or again.done())
        serves_again = not again.done()
        await again
        restarts = sum(one["engine_restarts"] for one in server.replicas)
    show("a stopped replica's rows are elsewhere after", f"{seconds:.1f} s", "≤ 3 s", is_met=seconds <= 3.0)
    found = compare(told, expected)
    figure = f"{found}; {restarts} restarts, it serves again: {'yes' if serves_again else 'no'}"
    show("and when it wakes", figure, "0, 0, 0, yes", is_met=found.is_clean and serves_again)


@dataclass
class Watched:
    """How many replicas were not ready at once, at the most, while somebody looked."""

    server: Served
    most_down: int = 0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    async def look(self) -> None:
        while True:
            replicas = await asyncio.to_thread(lambda: self.server.replicas)
            self.most_down = max(self.most_down, sum(one["status"] != "ready" for one in replicas))


async def poisoned() -> None:
    """A request that ends every engine which computes it, beside 63 others, some of which have just come."""
    running, late = asked(48, 500), asked(15, 300, 100)
    with fake_server({"replicas": 4, "force": True}, "--poison", str(POISON)) as server:
        server.wait_replicas(4)
        expected = await ask(server.url, running + late)
        watched = Watched(server)
        poison: Asked = (COMPLETIONS, {**PLAIN, "prompt": [1, POISON], "max_tokens": 40})

        async def look() -> None:
            watched.task = asyncio.create_task(watched.look())

        *told, bad = await disturbed(server.url, running, look, [*late, poison])
        assert watched.task is not None
        watched.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watched.task
        deaths = sum(one["engine_restarts"] for one in server.replicas)
    found = compare(told, expected)
    show("a poison request beside 63 others", f"its own end an error: {'yes' if bad.error else 'no'}; others {found}",
         "yes; 0, 0, 0", is_met=bool(bad.error) and found.is_clean)  # fmt: skip
    figure = f"{deaths} deaths, at most {watched.most_down} replica down at once"
    show("what it costs", figure, "≤ 3 deaths, never two at once", is_met=deaths <= 3 and watched.most_down <= 1)


async def upgraded() -> None:
    """Three replicas are renewed one after the other under 32 streams."""
    crowd = asked(32, 900)
    with fake_server({"replicas": 3, "force": True, "drain_seconds": DRAIN_SECONDS}) as server:
        server.wait_replicas(3)
        expected = await ask(server.url, crowd)
        before, left = [one["engine_pid"] for one in server.replicas], []

        def renew(name: str) -> None:
            pid, begun = server.replica(name)["engine_pid"], time.perf_counter()
            server.post("/v1/replicas/renew", {"replica": name})
            until(lambda: server.replica(name)["engine_pid"] != pid)
            left.append(time.perf_counter() - begun)
            server.wait_replicas(3)

        async def renew_all() -> None:
            for replica in server.replicas:
                await asyncio.to_thread(renew, replica["name"])

        told = await disturbed(server.url, crowd, renew_all)
        moved, after = server.model["moved"], [one["engine_pid"] for one in server.replicas]
    found, longest = compare(told, expected), max(left)
    is_met = found.is_clean and not {*before} & {*after}
    show("rolling upgrade of 3 replicas under 32 streams", f"{found}; {moved} moved", "0, 0, 0", is_met=is_met)
    limit = DRAIN_SECONDS + 2
    show("each has left within", f"{longest:.1f} s", f"≤ drain_seconds + 2 = {limit:g} s", is_met=longest <= limit)
