"""What a pool costs: `python -m bench.replicas`. The same streams over one fake engine, eight replicas, and eight over TCP.

Each engine takes 20 ms for a step, whatever its rows, so that the engines' offer is known: 50 tokens a second and stream.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.front import FAKE, ROOT, SERVE_FAKE, ask, serving

GATE_OF_FAKE = """
import asyncio
from weft.config import EngineSettings
from weft.serving.gate import Gate
from weft.serving.gate_server import _run
from weft.serving.starters.here import Here
asyncio.run(_run(Gate(Here(EngineSettings(model="fake"), {command!r}), 60.0), "tcp://127.0.0.1:*", None, 0.0))
"""
REPLICAS, STREAMS, TOKENS, WORDS = 8, 64, 200, 50
STEP_SECONDS = 0.02
COMMAND = [sys.executable, str(FAKE), "--token-seconds", str(STEP_SECONDS)]


def main() -> None:
    """Print tokens a second of each way, as a share of what the engines offer, and the seconds to the first event."""
    offered = STREAMS / STEP_SECONDS
    print(f"{STREAMS} streams of {TOKENS} tokens, engines that offer {offered:,.0f} tokens/s")
    show("one engine", {})
    show(f"{REPLICAS} replicas", {"replicas": REPLICAS, "force": True})
    with ExitStack() as stack:
        addresses = [stack.enter_context(gate()) for _ in range(REPLICAS)]
        show(f"{REPLICAS} over TCP", {"engines": tuple(addresses)})


def show(name: str, settings: dict[str, Any]) -> None:
    """Serve, ask three times, print one line."""
    with serving([sys.executable, "-c", SERVE_FAKE.format(command=COMMAND, settings=settings)]) as url:
        time.sleep(2.0)  # the other replicas
        ask(url, REPLICAS, 20, WORDS)
        told = [ask(url, STREAMS, TOKENS, WORDS) for _ in range(3)]
    rates = [STREAMS * TOKENS / one["seconds"] * STEP_SECONDS / STREAMS for one in told]
    firsts = [stream["first"] for one in told for stream in one["streams"]]
    spread = f"{min(rates):.2f} – {max(rates):.2f}"
    print(
        f"  {name}: {statistics.median(rates):.2f} of the offer ({spread}); first event {statistics.median(firsts) * 1e3:.0f} ms"
    )


@contextmanager
def gate() -> Iterator[str]:
    """A gate with a fake engine in a process of its own; its address."""
    command = [sys.executable, "-c", GATE_OF_FAKE.format(command=[*COMMAND, "fake"])]
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(command, stderr=log, cwd=ROOT) as process:
        try:
            while (found := re.search(r"listens at tcp://(\S+)", Path(log.name).read_text())) is None:
                assert process.poll() is None
                time.sleep(0.05)
            yield found[1]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
