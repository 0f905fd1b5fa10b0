"""`make redteam`: minutes of attacks on a real server beside eight ordinary streams of another key.

The streams are measured alone first, then beside the attacks. Every answer must be, to the letter, what it is alone; the event
loop must not stand still, gaps between tokens must not double, memory must come back, and the server must live. The attacks are a
list (ATTACKS): one more is one more function. They run in a process of their own, at the lowest priority: what they compute to
attack is not to be taken for what the server does about it. Before memory is measured the server has done ordinary work of every
kind, so that what is loaded and cached once is loaded and cached. Run as `python tests/redteam.py MINUTES [ATTACK …]`, with all
attacks or these alone, it ends with a table, and with status 1 if a promise was broken. Then every operation is fuzzed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weft.model
from lean_client import ask
from servers import Server, running
from weft.ipc.limits import MAX_BODY_BRACKETS, MAX_HEAD_BYTES

MODEL = Path(weft.model.__file__).parent / "tiny-hybrid"
ORDINARY, HOSTILE = "ordinary-key", "hostile-key"
NAME = "tiny-hybrid"
STREAMS = 8
QUIET_SECONDS = 20.0
RECOVERY_SECONDS = 15.0  # without requests, before memory is measured
WARM_ROUNDS = 3
PATIENCE_SECONDS = 60.0  # for one attack: a server that does not answer it is not alive
MAX_STALL_SECONDS = 0.1  # 99th percentile
MAX_GAP_RATIO = 2.0  # 95th percentile, beside attacks over alone
MAX_GROWTH = 0.10
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
QUESTIONS = [
    {"model": NAME, "prompt": f"{start} and", "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True}
    for start in ("Once upon a time", "The dog", "A red ball", "Lily", "Tom", "In the park", "One day", "The big house")
]
FUZZER = Path(__file__).parent.parent / ".venv-fuzz" / "bin" / "schemathesis"
GAPS, STALLS = "weft_token_gap_seconds", "weft_event_loop_stall_seconds"
# One never ends, and the others would take the model or its engine away.
UNFUZZED = ("/v1/events", "/v1/models/load", "/v1/models/unload", "/v1/replicas/renew")
# Refusals that an attack may get; any other status from 500 on is a broken promise.
POLITE = {503, 529}


@dataclass
class Target:
    """A server under attack, as an attacker sees it."""

    port: int
    folder: Path  # for models that an attack makes
    seen: Counter[str] = field(default_factory=Counter)

    async def ask(self, path: str, body: Any, *, key: str = HOSTILE) -> int:
        """Send a body, read the answer to its end, and return the status."""
        data = body if isinstance(body, bytes) else json.dumps({"model": NAME, **body}).encode()
        reply = await ask(self.port, path, data, Authorization=f"Bearer {key}")
        try:
            await reply.text()
        finally:
            reply.close()
        return reply.status

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=("127.0.0.2", 0))

    def head(self, path: str, length: int | None = None, method: str = "POST", *more: str) -> bytes:
        sized = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = (f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {HOSTILE}", sized, *more)
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


Attack = Callable[[Target], Awaitable[int | None]]  # returns the status it got, None if it got none by its nature


async def many_stop_sequences(at: Target) -> int:
    stops = [f"stop {number}" for number in range(100_000)]
    return await at.ask(MESSAGES, {"messages": HI, "max_tokens": 5, "stop_sequences": stops})


async def stops_that_are_all_alike(at: Target) -> int:
    stops = ["a" * 255 + chr(ord("b") + number) for number in range(20)]
    return await at.ask(CHAT, {"messages": HI, "max_tokens": 20, "stop": stops})


async def patterns_that_backtrack(at: Target) -> int:
    items = {"allOf": [{"type": "string", "pattern": r"^(\w+\s?)*\1$"}] * 40}
    schema = {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": HI, "max_tokens": 40, "response_format": form, "chat_template_kwargs": {"enable_thinking": False}}
    return await at.ask(CHAT, body)


async def a_book_as_a_prompt(at: Target) -> int:
    return await at.ask(CHAT, {"messages": [{"role": "user", "content": "words and more words " * 250_000}]})


async def a_book_and_gone(at: Target) -> None:
    data = json.dumps({"model": NAME, "prompt": "words and more words " * 30_000, "max_tokens": 5}).encode()
    _, writer = await at.connect()
    writer.write(at.head(COMPLETIONS, len(data)) + data)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()


async def books_to_tokenize(at: Target) -> int:
    return await at.ask("/tokenize", {"prompt": "a b c d e f " * 400_000})


async def headers_without_end(at: Target) -> int | None:
    reader, writer = await at.connect()
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
    with suppress(OSError):
        for _ in range(960):  # 60 MiB
            writer.write(b"x" * MAX_HEAD_BYTES)
            await writer.drain()
    return await _status(reader, writer)


async def silent_connections(at: Target) -> None:
    connections = [await at.connect() for _ in range(40)]
    for number, (_, writer) in enumerate(connections):
        writer.write((b"", b"G", at.head(CHAT, 1000), at.head(CHAT, 1000) + b"{")[number % 4])
    await asyncio.sleep(2)
    for _, writer in connections:
        writer.close()


async def an_endless_body(at: Target) -> int | None:
    reader, writer = await at.connect()
    writer.write(at.head(CHAT, 10**12))
    with suppress(OSError):
        for _ in range(200):
            writer.write(b"x" * 65536)
            await writer.drain()
    return await _status(reader, writer)


async def a_reader_who_does_not_read(at: Target) -> None:
    data = json.dumps(
        {"model": NAME, "prompt": "hi", "max_tokens": 300, "n": 2, "stream": True, "ignore_eos": True, "logprobs": 5}
    ).encode()
    _, writer = await at.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(at.head(COMPLETIONS, len(data)) + data)
    await asyncio.sleep(3)
    writer.close()


async def watchers_who_do_not_read(at: Target) -> None:
    watchers = [await at.connect() for _ in range(10)]
    for _, writer in watchers:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(at.head("/v1/events", 0, "GET"))
    await asyncio.sleep(5)
    for _, writer in watchers:
        writer.close()


async def ambiguous_grammars(at: Target) -> int:
    body = {"prompt": "hi", "max_tokens": 200, "guided_grammar": f'start: s\ns: s s | "a" | "b" | "{random.random()}"'}
    return await at.ask(COMPLETIONS, body)


async def masks_that_are_slow(at: Target) -> int:
    pattern = f"^([a-z]{{1,60}} ?){{1,{random.randint(20, 60)}}}$"
    schema = {
        "type": "object",
        "patternProperties": {f"^.{{1,{random.randint(200, 500)}}}$": {"type": "string", "pattern": pattern}},
    }
    return await at.ask(COMPLETIONS, {"prompt": "hi", "max_tokens": 60, "guided_json": schema})


async def a_conversation_of_thousands(at: Target) -> int:
    turns = [{"role": ("user", "assistant")[number % 2], "content": "hi"} for number in range(9_999)]
    return await at.ask(CHAT, {"messages": turns, "max_tokens": 2})


async def a_template_without_end(at: Target) -> int:
    """Load a model whose template never ends, and let it fail. By the operator's key: loading is for admins."""
    for file in MODEL.iterdir():
        with suppress(FileExistsError):
            (at.folder / file.name).symlink_to(file)
    (at.folder / "chat_template.jinja").unlink()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (at.folder / "chat_template.jinja").write_text(loop)
    status = await at.ask("/v1/models/load", {"model": str(at.folder), "force": True}, key=ORDINARY)
    await asyncio.sleep(20)
    await at.ask("/v1/models/unload", {"model": str(at.folder)}, key=ORDINARY)
    return status


async def brackets_and_commas(at: Target) -> int:
    bodies = (
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b'{"a":[' + b"[]," * MAX_BODY_BRACKETS + b"1]}",
        b'{"prompt":[' + b"1," * 5 * 10**6 + b"1]}",
    )
    return await at.ask(COMPLETIONS, random.choice(bodies))


async def a_flood_of_choices(at: Target) -> int:
    body = {"prompt": "hi", "max_tokens": 4, "n": 128, "priority": 100, "session_id": str(random.random())}
    return await at.ask(COMPLETIONS, body)


async def looking_at_others(at: Target) -> int:
    """Ask for what belongs to the other key, and for what only an admin may do."""
    for path, body in (("/v1/cache/clear", {}), ("/v1/models/unload", {}), ("/v1/models/load", {"model": "/etc"})):
        if await at.ask(path, body) == 200:
            return 599  # it must not be
    return await at.ask("/v1/requests/any/cancel", {})


async def what_is_not_http(at: Target) -> int | None:
    reader, writer = await at.connect()
    writer.write(random.randbytes(2000) + b"\r\n\r\n")
    return await _status(reader, writer)


async def a_half_closed_client(at: Target) -> int | None:
    data = json.dumps({"model": NAME, "prompt": "hi", "max_tokens": 3}).encode()
    reader, writer = await at.connect()
    writer.write(at.head(COMPLETIONS, len(data)) + data)
    writer.write_eof()
    return await _status(reader, writer)


async def _status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
    """Return the status that came, None if the connection was closed without one."""
    told = b""
    with suppress(OSError):
        told = await reader.read()
    writer.close()
    found = re.findall(rb"^HTTP/1\.1 (\d+)", told, re.MULTILINE)
    return int(found[-1]) if found else None


ATTACKS: list[Attack] = [
    many_stop_sequences,
    stops_that_are_all_alike,
    patterns_that_backtrack,
    a_book_as_a_prompt,
    a_book_and_gone,
    books_to_tokenize,
    headers_without_end,
    silent_connections,
    an_endless_body,
    a_reader_who_does_not_read,
    watchers_who_do_not_read,
    ambiguous_grammars,
    masks_that_are_slow,
    a_conversation_of_thousands,
    brackets_and_commas,
    a_flood_of_choices,
    looking_at_others,
    what_is_not_http,
    a_half_closed_client,
]
ONCE: list[Attack] = [a_template_without_end]


async def attack(at: Target, seconds: float, names: list[str]) -> None:
    """Run all attacks, or those of these names, again and again, a few at a time in any order, and those of ONCE once."""
    repeated, once = ([one for one in attacks if not names or one.__name__ in names] for attacks in (ATTACKS, ONCE))
    until, turns = time.monotonic() + seconds, asyncio.Semaphore(3)

    async def run(one: Attack) -> None:
        name = one.__name__
        try:
            async with turns, asyncio.timeout(PATIENCE_SECONDS):
                status = await one(at)
        except TimeoutError:
            at.seen[f"WRONG {name}: no end within {PATIENCE_SECONDS:g} s"] += 1
        except (OSError, EOFError) as error:
            at.seen[f"{name}: cut off ({type(error).__name__})"] += 1
        else:
            is_wrong = status is not None and status >= 500 and status not in POLITE
            at.seen[f"{'WRONG ' if is_wrong else ''}{name}: {status or 'no answer'}"] += 1

    async def go_on(attacks: list[Attack], seed: int, *, is_once: bool = False) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            for one in dice.sample(attacks, len(attacks)):
                await run(one)
                if time.monotonic() >= until:
                    break
            if is_once:
                return

    await asyncio.gather(*(go_on(repeated, seed) for seed in range(3) if repeated), go_on(once, 0, is_once=True))


@dataclass
class Streams:
    """Eight ordinary streams, one after the other each: their gaps, and what differed from the answer alone."""

    port: int
    alone: dict[str, str] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._go_on(question, until) for question in QUESTIONS[:STREAMS]))

    async def _go_on(self, question: dict[str, Any], until: float) -> None:
        while time.monotonic() < until:
            try:
                text = await self._read(question)
            except (OSError, EOFError, ValueError, KeyError) as error:
                self.wrong.append(f"{question['prompt']}: {error!r}")
                continue
            self.num_answers += 1
            if text != self.alone.setdefault(question["prompt"], text):
                self.wrong.append(f"{question['prompt']}: {text!r} instead of {self.alone[question['prompt']]!r}")

    async def _read(self, question: dict[str, Any]) -> str:
        reply, text, last = await ask(self.port, COMPLETIONS, question, Authorization=f"Bearer {ORDINARY}"), "", 0.0
        async for line in reply.lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.monotonic(), json.loads(line[6:])
            if part := event["choices"][0]["text"]:
                text += part
                self.gaps += [now - last] if last else []
                last = now
        reply.close()
        return text

    def p95(self) -> float:
        return statistics.quantiles(self.gaps, n=20)[-1]


def ordinary_work() -> list[tuple[str, dict[str, Any]]]:
    """One request of every kind that costs memory once: chats, several at a time, tools, schemas, grammars, long prompts."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    story = "Lily saw a red ball in the park. " * 150  # most of the context
    chat = {"messages": HI, "max_tokens": 20}
    return [
        *[(CHAT, chat)] * 3,
        (CHAT, {**chat, "response_format": form}),
        (CHAT, {**chat, "response_format": {**form, "json_schema": {**form["json_schema"], "strict": True}}}),  # type: ignore[dict-item]
        (CHAT, {**chat, "tools": [tool]}),
        (CHAT, {"messages": [{"role": "user", "content": story}], "max_tokens": 20, "n": 2, "logprobs": True}),
        (COMPLETIONS, {"prompt": story, "max_tokens": 20, "n": 8, "stop": ["ball", "park"]}),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 20, "guided_grammar": 'start: "a" | "b" start'}),
        (MESSAGES, {**chat, "stop_sequences": ["x"]}),
        ("/tokenize", {"prompt": story}),
        *[(COMPLETIONS, {"prompt": f"{number} {story}", "max_tokens": 20}) for number in range(8)],
    ]


async def warm_up(at: Target) -> None:
    """Do ordinary work until all that is loaded and cached once is."""
    for _ in range(WARM_ROUNDS):
        statuses = await asyncio.gather(*(at.ask(path, body, key=ORDINARY) for path, body in ordinary_work()))
        assert set(statuses) == {200}, statuses


Histogram = dict[float, float]  # by upper bound in seconds: how many were no longer


def histogram(server: Server, name: str) -> Histogram:
    """One of the server's own histograms."""
    told = server.get("/metrics", headers={"Authorization": f"Bearer {ORDINARY}"}).text
    found = re.findall(rf'^{name}_bucket\{{.*?le="([^"]+)".*?\}} (\S+)$', told, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def quantile(before: Histogram, after: Histogram, share: float) -> float:
    """The bound below which so large a share is of what came between two looks at a histogram."""
    counts = {bound: after[bound] - before.get(bound, 0) for bound in after}
    return min(bound for bound, count in counts.items() if count >= share * max(counts.values()))


def megabytes(pid: int) -> dict[str, float]:
    """What a server has in memory, by kind of process."""
    told = subprocess.check_output(["ps", "-eo", "pid=,ppid=,rss=,args="], text=True)
    rows = [(int(one), int(parent), int(size), words) for one, parent, size, words in map(_columns, told.splitlines())]
    family = {pid}
    while more := {one for one, parent, *_ in rows if parent in family} - family:
        family |= more
    found: Counter[str] = Counter()
    for one, _, size, words in rows:
        if one in family:
            kind = re.search(r"weft\.(?:serving|engine)\.(\w+)", words)
            found["front" if one == pid else kind[1] if kind else "other"] += size
    return {kind: size / 1024 for kind, size in found.items()}


def _columns(line: str) -> list[str]:
    return line.split(None, 3)


def memory_after_rest(server: Server) -> dict[str, float]:
    """What a server has in memory after a while without requests."""
    time.sleep(RECOVERY_SECONDS)
    return megabytes(server.process.pid)


def told(memory: dict[str, float]) -> str:
    parts = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(memory.items()))
    return f"{sum(memory.values()):.0f} ({parts})"


def redteam(seconds: float, folder: Path, names: list[str]) -> list[str]:
    """Run it, print what came of it, and return the promises that were broken."""
    (folder / "model").mkdir()
    keys = ("--api-key", f"ordinary={ORDINARY}:admin", "--api-key", f"hostile={HOSTILE}")
    with running(folder / "log", "tiny-hybrid", *keys, "--cache-megabytes", "64", "--header-seconds", "2") as server:
        asyncio.run(warm_up(Target(server.port, folder)))
        quiet = Streams(server.port)
        asyncio.run(quiet.run(3.0))  # warm
        quiet.gaps.clear()
        at_first = histogram(server, GAPS)
        asyncio.run(quiet.run(QUIET_SECONDS))
        gaps, memory = histogram(server, GAPS), memory_after_rest(server)
        front_quiet, stalls = quantile(at_first, gaps, 0.95), histogram(server, STALLS)
        beside = Streams(server.port, dict(quiet.alone))
        command = [sys.executable, __file__, "attack", str(server.port), str(seconds), str(folder / "model"), *names]
        attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19))
        asyncio.run(beside.run(seconds))
        seen = json.loads(attacker.communicate(timeout=3 * PATIENCE_SECONDS)[0])
        stall, front = quantile(stalls, histogram(server, STALLS), 0.99), quantile(gaps, histogram(server, GAPS), 0.95)
        after, is_alive = memory_after_rest(server), server.process.poll() is None
        ratio = beside.p95() / quiet.p95()
        trace = "Traceback" in server.log.read_text()
    print(f"attacks in {seconds:.0f} s:")
    for what, count in sorted(seen.items()):
        print(f"  {what:60} {count:>6,}")
    print(f"  p95 token gap as the front sees it, of all keys: ≤ {front * 1e3:g} ms, quiet ≤ {front_quiet * 1e3:g}")
    promises = {
        f"p99 event-loop stall ≤ {stall * 1e3:g} ms, wanted ≤ {MAX_STALL_SECONDS * 1e3:g}": stall <= MAX_STALL_SECONDS,
        f"p95 token gap {beside.p95() * 1e3:.1f} over {quiet.p95() * 1e3:.1f} ms quiet: {ratio:.2f}, wanted ≤ 2": ratio
        <= MAX_GAP_RATIO,
        f"memory {told(memory)} → {told(after)} MB, wanted within 10 %": sum(after.values())
        <= sum(memory.values()) * (1 + MAX_GROWTH),
        f"{len(beside.wrong)} of {beside.num_answers} answers differ from those alone, wanted 0": not beside.wrong,
        f"{sum(what.startswith('WRONG') for what in seen)} kinds of wrong ends of attacks, wanted 0": "WRONG"
        not in json.dumps(seen),
        "no traceback in the log": not trace,
        "the server lives": is_alive,
    }
    for what, holds in promises.items():
        print(f"{'holds   ' if holds else 'BROKEN  '}{what}", flush=True)
    for what in beside.wrong[:5]:
        print("   ", what[:300])
    return [what for what, holds in promises.items() if not holds]


def fuzz(folder: Path) -> int:
    """Let schemathesis try every operation of /openapi.json on a fresh server; return its exit status, 0 where it is missing."""
    if not FUZZER.exists():
        print(f"schemathesis is not installed in {FUZZER.parent}: operations are not fuzzed (make redteam installs it)")
        return 0
    with running(folder / "fuzz-log", "tiny-hybrid") as server:
        command = [str(FUZZER), "run", f"{server.url}/openapi.json", "--url", server.url, "--checks", "not_a_server_error"]
        left_out = [word for path in UNFUZZED for word in ("--exclude-path", path)]
        limits = ["--max-examples", "20", "--request-timeout", "60"]
        return subprocess.run([*command, *left_out, *limits], check=False, cwd=folder).returncode


def main() -> int:
    """Attack a server that another process has started, or start one and watch it being attacked."""
    if sys.argv[1:2] == ["attack"]:
        port, seconds, folder, *names = sys.argv[2:]
        at = Target(int(port), Path(folder))
        asyncio.run(attack(at, float(seconds), names))
        print(json.dumps(at.seen))
        return 0
    minutes, names = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, sys.argv[2:]
    folder_of_run = Path(tempfile.mkdtemp(prefix="weft-redteam-"))
    broken = redteam(60 * minutes, folder_of_run, names)
    if not names and fuzz(folder_of_run):
        broken.append("schemathesis: no server error in any operation")
    verdict = "all promises hold" if not broken else f"{len(broken)} broken: " + "; ".join(broken)
    print(f"VERDICT after {minutes:g} minutes ({folder_of_run}): {verdict}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
