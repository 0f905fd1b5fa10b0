"""How the server bears more than it has room for: `python -m bench.overload`, on the shipped model and smollm2, in two minutes.

The rivals are its own quiet moments, in the same run. What must hold on any machine is a test (tests/faults); the figures
here need one that has nothing else to do.
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
BURST, MAX_ROWS, MAX_QUEUE = 500, 8, 100
FLOOD = 50
ROUNDS = 9


def main() -> None:
    """Print every figure with its bar."""
    sys.path.insert(0, str(TESTS))
    from servers import running

    options = ("--max-rows", str(MAX_ROWS), "--max-queue", str(MAX_QUEUE))
    print(f"overload: tiny-hybrid, {MAX_ROWS} rows and a queue of {MAX_QUEUE}")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", "tiny-hybrid", *options) as server:
        burst(server.port, server.process.pid)
        server.wait_idle()
        flood(server.port)
    print("hostile schemas: smollm2")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", "smollm2") as server:
        schemas(server.port)


def burst(port: int, pid: int) -> None:
    """Five hundred requests at once, five times: how long /health takes meanwhile."""
    from lean_client import ask_all
    from pulse import pulse, within

    bodies = [{"prompt": f"Number {n % 25} went home.", "max_tokens": 4 + n % 25, "ignore_eos": True} for n in range(BURST)]
    for _ in range(5):
        start = time.monotonic()
        with pulse(port, pid) as healths:
            replies = ask_all(port, "/v1/completions", bodies)
        codes = [reply.status for reply, _ in replies]
        assert set(codes) == {200, 429}
        times = ", ".join(f"{share:.0%} within {1e3 * within(healths, share):.0f} ms" for share in (0.5, 0.95))
        most = f"the longest {1e3 * within(healths, 1):.0f} ms, wanted < 100"
        print(f"  {BURST} at once: {codes.count(200)} answered in {time.monotonic() - start:.1f} s; /health {times}, {most}")


def flood(port: int) -> None:
    """One client's first text beside fifty long prompts of another, over its quiet time."""
    first_text_seconds(port, 0)
    quiet = [first_text_seconds(port, 100 + number) for number in range(ROUNDS)]
    with ExitStack() as stack:
        for number in range(FLOOD):
            text = f"{number}. " + " ".join(f"Lily saw {number * step} birds in the big park." for step in range(100))
            body = {"prompt": text, "max_tokens": 400, "ignore_eos": True, "stream": True}
            stack.enter_context(closing(asked(port, body, "flood"))).getresponse()
        time.sleep(1.0)
        beside = [first_text_seconds(port, 200 + number) for number in range(ROUNDS)]
    ratio = statistics.median(beside) / statistics.median(quiet)
    detail = f"({1e3 * statistics.median(beside):.0f} ms against {1e3 * statistics.median(quiet):.0f})"
    print(f"  first text beside {FLOOD} long prompts of another key over the quiet time {ratio:.2f}, wanted ≤ 3 {detail}")


def schemas(port: int) -> None:
    """A stream's p95 token gap beside schemas that are hard to compile, over its gap without them and beside harmless ones."""
    kinds: dict[str, Callable[[int], Any]] = {
        "that are refused after a second": lambda number: {
            "type": "object", "properties": {f"p{number}_{place}": {"type": "integer"} for place in range(7_000)}
        },
        "of 10,000 branches": lambda number: {"enum": [f"branch {number}.{place} of very many" for place in range(10_000)]},
        "of two branches": lambda number: {"enum": [f"branch {number}", "another"]},
    }  # fmt: skip
    numbers = itertools.count()
    for what, schema in kinds.items():
        ratios = [gap_beside(port, schema, numbers) / gap_beside(port, None, numbers) for _ in range(5)]
        print(f"  p95 gap beside schemas {what} over the quiet gap {statistics.median(ratios):.2f}, wanted ≤ 1.5")


def gap_beside(port: int, schema: Callable[[int], Any] | None, numbers: itertools.count[int]) -> float:
    """The 95th percentile of the gaps between a stream's tokens, beside requests with these schemas; seconds.

    What the attacker sends is made before: its own work, on the server's cores, is not what is measured.
    """
    ended, hello = threading.Event(), [{"role": "user", "content": "hi"}]
    made = [] if schema is None else [schema(number) for number in itertools.islice(numbers, 40)]  # no two alike: never cached
    shapes = [{"type": "json_schema", "json_schema": {"name": "answer", "schema": one, "strict": True}} for one in made]
    bodies = [json.dumps({"messages": hello, "response_format": shape, "max_tokens": 2}).encode() for shape in shapes]

    def attack() -> None:
        for body in itertools.takewhile(lambda _: not ended.is_set(), bodies):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                connection.request("POST", "/v1/chat/completions", body)
                connection.getresponse().read()

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        with closing(asked(port, body, "stream")) as connection:
            moments = [time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {")]
    finally:
        ended.set()
        attacker.join()
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(moments))
    return gaps[int(0.95 * len(gaps))]


def asked(port: int, body: dict[str, Any], key: str) -> http.client.HTTPConnection:
    """A request on its way."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"x-api-key": key})
    return connection


def first_text_seconds(port: int, number: int) -> float:
    """How long the first piece of a short answer takes; the rest is read too."""
    text = f"{number}. " + " ".join(f"Ben has {number + step} toys." for step in range(20))
    start = time.monotonic()
    with closing(asked(port, {"prompt": text, "max_tokens": 8, "ignore_eos": True, "stream": True}, "short")) as connection:
        moments = [time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {")]
    return moments[0] - start


if __name__ == "__main__":
    main()
