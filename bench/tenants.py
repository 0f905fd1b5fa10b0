"""One tenant's chat beside another's floods: `python -m bench.tenants [MODEL]`, in three minutes.

The rival is the chat's own quiet time, in the same run. What must hold on any machine is a test (tests/engine/test_fairness.py).
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
ROUNDS, TOKENS = 4, 32
MANY = 48  # requests of a flood, three times what is computed together
BEGIN_SECONDS = 2.0  # for a flood to fill all rows
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
SLOW_WORDS = {"type": "string", "pattern": "^([a-z]{1,60} ?){1,50}$"}  # their masks take milliseconds
FLOODS: dict[str, list[dict[str, Any]]] = {
    "n = 128": [{"n": 128, "prompt": f"{number}. Once upon a time"} for number in range(2)],
    "priority 100": [{"priority": 100, "prompt": f"{number}. Once upon a time"} for number in range(MANY)],
    "a session each": [{"session_id": f"s{number}", "prompt": f"{number}. Once upon a time"} for number in range(MANY)],
    "long prompts": [
        {"prompt": f"{number}. " + " ".join(f"Lily saw {number * step} birds in the big park." for step in range(120))}
        for number in range(MANY)
    ],
    "hostile grammars": [
        {
            "prompt": f"{number}. Once upon a time",
            "guided_json": {"type": "object", "patternProperties": {f"^.{{1,{300 + number}}}$": SLOW_WORDS}},
        }
        for number in range(MANY)
    ],
}
numbers = itertools.count()


def main() -> None:
    """Print every figure with its bar."""
    sys.path.insert(0, str(TESTS))
    from servers import running

    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    keys = ("--api-key", "chat=chat-secret", "--api-key", "flood=flood-secret")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", model, *keys) as server:
        measure(server.port, 1)
        print(f"{model}: a chat of one key beside floods of another, over its quiet time; medians of {ROUNDS} chats")
        for what, bodies in FLOODS.items():
            quiet = measure(server.port, ROUNDS)
            with flooded(server.port, bodies):
                beside = measure(server.port, ROUNDS)
            firsts, gaps = (later / before for later, before in zip(beside, quiet, strict=True))
            times = ", ".join(
                f"{1e3 * later:.0f} ms against {1e3 * before:.0f}" for later, before in zip(beside, quiet, strict=True)
            )
            print(f"  {what}: first text {firsts:.2f}, wanted ≤ 3; p95 gap {gaps:.2f}, wanted ≤ 2 ({times})", flush=True)


def measure(port: int, rounds: int) -> tuple[float, float]:
    """Return the median time to a chat's first text, and the 95th percentile of the gaps between its tokens; seconds."""
    chats = [chat(port) for _ in range(rounds)]
    gaps = sorted(later - earlier for moments in chats for earlier, later in itertools.pairwise(moments[1:]))
    return statistics.median(moments[1] - moments[0] for moments in chats), gaps[int(0.95 * len(gaps))]


def chat(port: int) -> list[float]:
    """Have one short answer; return when it was asked for, and when each of its pieces came."""
    text = f"{next(numbers)}. " + " ".join(f"Ben has {step} toys." for step in range(10))
    start = time.monotonic()
    with closing(asked(port, {"prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}, "chat")) as connection:
        return [start, *(time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {"))]


@contextmanager
def flooded(port: int, bodies: list[dict[str, Any]]) -> Iterator[None]:
    """Requests of the other key, far more than can be answered in the time of the block."""
    with ExitStack() as stack:
        for body in bodies:
            stack.enter_context(closing(asked(port, {**ENDLESS, **body}, "flood")))
        time.sleep(BEGIN_SECONDS)
        yield
    time.sleep(BEGIN_SECONDS)


def asked(port: int, body: dict[str, Any], key: str) -> http.client.HTTPConnection:
    """A request on its way."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"x-api-key": f"{key}-secret"})
    return connection


if __name__ == "__main__":
    main()
