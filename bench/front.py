"""What the front costs: `python -m bench.front`. HTTP over an engine that costs nothing, then over a real one.

The rivals are the engine itself, in its own words (`timings`) and in this process, in the same run. With the folder of another
checkout, `python -m bench.front FOLDER`, its front is the rival instead: both serve the same streams by turns, and the time that
each took of the processor is compared, which other work on the machine changes far less than seconds.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FAKE = ROOT / "tests" / "fake_engine.py"
SERVE_FAKE = """
import sys
from weft.api.app import make_app
from weft.cli.serve import Terminal
from weft.config import ServerConfig
from weft.serving import replicas, server
replicas.starters_here.__defaults__ = ((*{command!r}, "fake"),)
sys.exit(server.serve(ServerConfig(("fake",), port=0, **{settings!r}), Terminal(), make_app))
"""
STREAMS, TOKENS = 64, 400
CLIENTS, ANSWER = 8, 64
PAIRS = 15
# Run in a checkout's folder: its own front over its own fake engine, token by token.
SERVE_CHECKOUT = """
import sys
import bench.front as front
exec(front.SERVE_FAKE.format(command=[sys.executable, str(front.FAKE), "--token-seconds", "0.003"], settings={}))
"""
WORDS = 50
LOOK_SECONDS = 3.0  # between two looks of the page at the prefix tree


def main() -> None:
    """Print every ratio with its bar."""
    if folders := sys.argv[1:]:
        against(Path(folders[0]).resolve())
        return
    print("front: HTTP, channel, reader and frames")
    fake_engine()
    real_engine()
    watched()


def fake_engine() -> None:
    """Tokens a second through HTTP, the client on the same two cores: as fast as it goes, and token by token.

    An engine that emits at once is ahead of the front, which then sends several tokens in one event. At a pace just above
    the bar nearly every token is an event of its own: that is what a token costs.
    """
    for what, words in (("emits at once", []), ("steps every 3 ms", ["--token-seconds", "0.003"])):
        with serving([sys.executable, "-c", SERVE_FAKE.format(command=[sys.executable, str(FAKE), *words], settings={})]) as url:
            ask(url, 8, 50, WORDS)
            told = [ask(url, STREAMS, TOKENS, WORDS) for _ in range(5)]
        rates = [STREAMS * TOKENS / one["seconds"] for one in told]
        events = sum(stream["events"] for one in told for stream in one["streams"]) / (5 * STREAMS * TOKENS)
        rate = f"{statistics.median(rates):,.0f} tokens/s, wanted ≥ 15,000"
        print(f"  {STREAMS} streams, engine {what}: {rate} ({min(rates):,.0f} – {max(rates):,.0f}; {events:.2f} events a token)")


def against(other: Path) -> None:
    """Processor time of this front over that of another checkout, taking turns."""
    with serving_checkout(ROOT) as ours, serving_checkout(other) as theirs:
        for server in (ours, theirs):
            server.milliseconds_per_token()
        pairs = [(ours.milliseconds_per_token(), theirs.milliseconds_per_token()) for _ in range(PAIRS)]
    ratios = statistics.quantiles([mine / its for mine, its in pairs], n=4)
    mine, its = (1e3 * statistics.median(one) for one in zip(*pairs, strict=True))
    spread = f"(quartiles of {PAIRS} pairs {ratios[0]:.3f} – {ratios[2]:.3f}; {mine:.1f} against {its:.1f} µs a token)"
    print(f"front over {other.name}: processor time {ratios[1]:.3f}, wanted ≤ 1.03 {spread}")


@dataclass(frozen=True)
class ServedCheckout:
    """A front in a process of its own."""

    url: str
    pid: int

    def milliseconds_per_token(self) -> float:
        """Processor time for a token of streams that are served now."""
        before = self._cpu_seconds()
        ask(self.url, STREAMS, TOKENS, WORDS)
        return 1e3 * (self._cpu_seconds() - before) / (STREAMS * TOKENS)

    def _cpu_seconds(self) -> float:
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving_checkout(folder: Path) -> Iterator[ServedCheckout]:
    """The front of a checkout over its own fake engine."""
    paths = {"PYTHONPATH": os.pathsep.join(str(folder / part) for part in ("src", "."))}
    with served([sys.executable, "-c", SERVE_CHECKOUT], folder, os.environ | paths) as (url, process):
        yield ServedCheckout(url, process.pid)


def real_engine() -> None:
    """The whole server against the engine in this process, taking turns."""
    from weft import LLM, Sampling

    llm = LLM("smollm2")
    prompts = [f"{number} " + "word " * WORDS for number in range(CLIENTS)]
    chosen = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    with serving([sys.executable, "-m", "weft", "serve", "smollm2", "--port", "0", "--cache-megabytes", "0"]) as url:
        ask(url, 1, 4, WORDS)
        llm.generate(prompts[:1], Sampling(temperature=0.0, max_tokens=4))
        over = [stream["first"] * 1e3 - stream["timings"]["queue_ms"] - stream["timings"]["prompt_ms"] for stream in lone(url)]
        ours, theirs = [], []
        for _ in range(5):
            start = time.perf_counter()
            llm.generate(prompts, chosen)
            theirs.append(CLIENTS * ANSWER / (time.perf_counter() - start))
            ours.append(CLIENTS * ANSWER / ask(url, CLIENTS, ANSWER, WORDS)["seconds"])
    detail = f"(worst of {len(over)}: {max(over):.1f})"
    print(f"  first byte over the engine's own, idle: {statistics.median(over):.1f} ms, wanted ≤ 20 {detail}")
    ratio = statistics.median(ours) / statistics.median(theirs)
    detail = f"({statistics.median(ours):.0f} against {statistics.median(theirs):.0f} tokens/s)"
    print(f"  {CLIENTS} clients over the engine in process {ratio:.2f}, wanted ≥ 0.90 {detail}")


def watched() -> None:
    """Throughput while somebody has the live page open, over that while nobody has, taking turns."""
    alone, beside = [], []
    with serving([sys.executable, "-m", "weft", "serve", "smollm2", "--port", "0"]) as url:
        ask(url, CLIENTS, ANSWER, WORDS)
        for _ in range(9):
            alone.append(CLIENTS * ANSWER / ask(url, CLIENTS, ANSWER, WORDS)["seconds"])
            with watching(url):
                beside.append(CLIENTS * ANSWER / ask(url, CLIENTS, ANSWER, WORDS)["seconds"])
    ratio = statistics.median(beside) / statistics.median(alone)
    detail = f"({statistics.median(beside):.0f} against {statistics.median(alone):.0f} tokens/s)"
    print(f"  {CLIENTS} clients with the live page open over without {ratio:.2f}, wanted ≥ 0.97 {detail}")


@contextmanager
def watching(url: str) -> Iterator[None]:
    """What the live page asks for: the events, and every few seconds the tree."""
    is_over = threading.Event()

    def events() -> None:
        with urllib.request.urlopen(f"{url}/v1/events") as stream:
            while not is_over.is_set():
                stream.readline()

    def tree() -> None:
        while not is_over.wait(LOOK_SECONDS):
            urllib.request.urlopen(f"{url}/v1/cache").read()

    threads = [threading.Thread(target=one) for one in (events, tree)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def lone(url: str) -> list[dict[str, Any]]:
    """One stream at a time, ten times."""
    return [ask(url, 1, 4, WORDS)["streams"][0] for _ in range(10)]


def ask(url: str, streams: int, tokens: int, words: int) -> dict[str, Any]:
    """The client's report, from a process of its own."""
    command = [sys.executable, "-m", "bench.client", url, *map(str, (streams, tokens, words))]
    told: dict[str, Any] = json.loads(subprocess.check_output(command, cwd=ROOT))
    return told


@contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """A server that prints where it listens and that it is ready; its address."""
    with served(command, ROOT, os.environ) as (url, _):
        yield url


@contextmanager
def served(command: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that prints where it listens and that it is ready; its address and its process."""
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(command, stderr=log, cwd=folder, env=environment) as process:
        try:
            while "context" not in (said := Path(log.name).read_text()):
                assert process.poll() is None, said
                time.sleep(0.1)
            found = re.search(r"listens at (http://\S+)", said)
            assert found, said
            yield found[1], process
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
