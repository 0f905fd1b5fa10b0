"""Real engines of tiny-hybrid: mixed streams to the letter of solo runs, hits through two fronts, one client beside another."""

from __future__ import annotations

import asyncio
import signal
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench.replicas.crowd import CHAT, COMPLETIONS, Asked, alone, ask, compare, disturbed, percentile, show
from bench.replicas.servers import Served, real_gate, real_server, send

MODEL = "tiny-hybrid"
WORDS = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 40}, "minItems": 3, "maxItems": 3}
STORY = "One day the dog and the cat went to the park and saw a big red bird. "
SESSIONS, TURNS = 12, 4


def real() -> None:
    """Run all of them and print each figure with its bar."""
    print(f"{MODEL}, engines that share this machine's cores")
    asyncio.run(killed())
    two_fronts()
    asyncio.run(fair())


def mixed(count: int, num_tokens: int) -> list[Asked]:
    """Streams of five kinds: plain, seeded, two choices, a schema, and reasoning with a budget."""
    hot = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.9}

    def one(place: int) -> Asked:
        match place % 5:
            case 0:
                return COMPLETIONS, {**hot, "prompt": f"There were {place} cats", "temperature": 0}
            case 1:
                return COMPLETIONS, {**hot, "prompt": f"The big house {place}", "seed": place, "frequency_penalty": 0.8}
            case 2:
                return COMPLETIONS, {**hot, "prompt": f"A red ball {place}", "seed": place, "n": 2}
            case 3:
                constrained = {"structured_outputs": {"json": WORDS}, "ignore_eos": False}
                return COMPLETIONS, {**hot, "prompt": f"List {place}:", "seed": place, **constrained}
        messages = [{"role": "user", "content": f"Marker {place}."}]
        return CHAT, {**hot, "messages": messages, "thinking_token_budget": 40, "seed": place}

    return [one(place) for place in range(count)]


async def killed() -> None:
    """One of four replicas is killed under 64 mixed streams, each of which was asked alone before."""
    crowd = mixed(64, 150)
    with real_server(MODEL, "--replicas", "4", "--force", "--max-rows", "32", "--cache-megabytes", "64") as server:
        server.wait_replicas(4)
        expected = await alone(server.url, crowd)

        async def kill() -> None:
            send(server.busiest, signal.SIGKILL)

        quiet = await ask(server.url, crowd)
        told = await disturbed(server.url, crowd, kill)
        moved = server.model["moved"]
    found = compare(told, expected)
    show("64 mixed streams over 4 replicas, one killed, to the letter of solo runs", f"{found}; {moved} moved", "0, 0, 0",
         is_met=found.is_clean)  # fmt: skip
    gap, before = (percentile([one.longest_gap for one in each], 95) for each in (told, quiet))
    show("their longest gap, p95", f"{gap:.2f} s, {before:.2f} s in the same crowd undisturbed", "≤ 0.5 s + the prefill",
         is_met=gap <= before + 0.5)  # fmt: skip


def two_fronts() -> None:
    """Conversations whose turns come through one front, and others whose turns come through two by turns."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(real_gate(MODEL, "--cache-megabytes", "64")) for _ in range(2)]
        options = ("--engines", ",".join(addresses))
        servers = [stack.enter_context(real_server(*options)) for _ in range(2)]
        for server in servers:
            server.wait_replicas(2)
        one, two = hits(servers[:1], "one"), hits(servers, "two")
    ratio = two / one
    figure = f"{ratio:.3f} ({two:.1%} against {one:.1%})"
    show("hits of conversations through two fronts over one", figure, "≥ 0.97", is_met=ratio >= 0.97)


def hits(servers: Sequence[Served], salt: str) -> float:
    """Return the share of prompt tokens that were cached; turns of all conversations come in the same order."""
    num_cached = num_prompt = 0
    for turn in range(TURNS):
        for session in range(SESSIONS):
            prompt = f"{session}. " + STORY * (6 * (turn + 1))
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
            reply = servers[(turn + session) % len(servers)].post("/v1/completions", body)
            num_cached += reply["timings"]["cache_n"]
            num_prompt += reply["usage"]["prompt_tokens"]
    return num_cached / num_prompt


async def fair() -> None:
    """One client's single request beside another's 64, over four replicas of four rows."""

    def body(place: int, session: str, num_tokens: int) -> Asked:
        prompt = f"{session} {place}. " + STORY
        return COMPLETIONS, {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "session_id": session}

    with real_server(MODEL, "--replicas", "4", "--force", "--max-rows", "4", "--cache-megabytes", "64") as server:
        server.wait_replicas(4)
        firsts = [(await ask(server.url, [body(place, "one", 8)]))[0].first for place in range(9)]
        many = asyncio.create_task(ask(server.url, [body(place, "many", 200) for place in range(64)]))
        await asyncio.sleep(1.0)
        beside = [(await ask(server.url, [body(100 + place, "one", 8)]))[0].first for place in range(3)]
        is_beside = not many.done()
        await many
    quiet, later = statistics.median(firsts[2:]), statistics.median(beside)
    figure = f"{later / quiet:.1f} ({later * 1e3:.0f} against {quiet * 1e3:.0f} ms{'' if is_beside else '; the 64 had ended'})"
    show("first text of one client's request beside another's 64, over quiet", figure, "≤ 3", is_met=later <= 3 * quiet)
