"""`make serve-gpu`: a server under load on a GPU, weft and mlx_lm.server in one run, random bf16 weights of the Qwen3.5-4B shape.

Prompts have about 256 tokens of differing lengths, answers 160. Tokens a second are those of all answers, over the time from the
first request to the last token.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from bench.shapes import END_TOKEN, QWEN35_4B, TOKENIZER, random_model, with_words

PROMPT_TOKENS, ANSWER_TOKENS, LONG_TOKENS = 256, 160, 4000
NUM_LONG = 4  # prompts of LONG_TOKENS that come beside GAP_STREAMS, one after the other
GAP_STREAMS = 8
STREAMS = (1, 8, 32, 128)
READY_SECONDS, LIMIT_SECONDS = 300, 100
IN_MEMORY = Path("/dev/shm")  # eight gigabytes are written and read from there in seconds; disks differ
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "it", "was", "good", "to", "be", "there"]


@dataclass
class Measured:
    """What one load gave: seconds to each first token, gaps between tokens, tokens in all, and the wall time."""

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def p95_gap(self) -> float:
        return self.gap_at(0.95)

    def gap_at(self, share: float) -> float:
        """The gap below which so large a share of all gaps is."""
        return sorted(self.gaps)[int(len(self.gaps) * share)] if self.gaps else 0.0

    def gap_text(self) -> str:
        """The distribution of gaps, in milliseconds."""
        return ", ".join(f"p{share * 100:.0f} {self.gap_at(share) * 1e3:.1f}" for share in (0.5, 0.8, 0.9, 0.95, 0.99))


def write_model(folder: Path) -> None:
    """Write a random model in this shape, with tiny-hybrid's tokenizer."""
    loaded = random_model(QWEN35_4B, mx.bfloat16)
    weights = dict(tree_flatten(loaded.model.parameters()))
    names = sorted(weights)
    size = -(-len(names) // 8)
    for part in range(8):
        chosen = {name: weights[name] for name in names[part * size : (part + 1) * size]}
        mx.save_safetensors(str(folder / f"model-{part + 1:05}-of-00008.safetensors"), chosen, {"format": "mlx"})
    config = {**loaded.config, "eos_token_id": END_TOKEN}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (TOKENIZER / name).exists():
            (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    with_words(loaded, folder)


def prompt_of(rng: random.Random, tokens: int) -> str:
    """A text of so many words, about as many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


async def ask(port: int, body: dict[str, object], found: Measured) -> None:
    """Send one streamed completion and note when its tokens come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    began = last = time.perf_counter()
    seen = 0
    while line := await reader.readline():
        if b'"choices"' not in line:
            continue
        now = time.perf_counter()
        if seen:
            found.gaps.append(now - last)
        else:
            found.firsts.append(now - began)
        seen, last = seen + 1, now
    found.tokens += ANSWER_TOKENS if seen else 0
    writer.close()


def body_of(model: str, rng: random.Random, length: int, max_tokens: int = ANSWER_TOKENS) -> dict[str, object]:
    """Return a streamed completion of a prompt of so many words."""
    fixed = {"model": model, "temperature": 0, "stream": True, "ignore_eos": True}
    return {**fixed, "prompt": prompt_of(rng, length), "max_tokens": max_tokens}


async def load(port: int, model: str, streams: int, seed: int) -> Measured:
    """Send so many requests at once and wait for all."""
    rng, found = random.Random(seed), Measured()
    bodies = [body_of(model, rng, PROMPT_TOKENS - 40 + rng.randrange(80)) for _ in range(streams)]
    began = time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*(ask(port, body, found) for body in bodies)), LIMIT_SECONDS)
    found.seconds = time.perf_counter() - began
    return found


async def load_beside_long(port: int, model: str, seed: int) -> tuple[Measured, Measured]:
    """Send GAP_STREAMS requests, and the same while long prompts come; return what the streams had each time."""
    quiet = await load(port, model, GAP_STREAMS, seed)
    rng = random.Random(seed)
    streams = asyncio.ensure_future(load(port, model, GAP_STREAMS, seed + 1))
    for _ in range(NUM_LONG):
        await asyncio.wait_for(ask(port, body_of(model, rng, LONG_TOKENS, 1), Measured()), LIMIT_SECONDS)
    return quiet, await streams


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> float:
    """Wait until the server is healthy; returns how many seconds it took."""
    began = time.perf_counter()
    while time.perf_counter() - began < READY_SECONDS and process.poll() is None:
        try:
            asyncio.run(asyncio.wait_for(_models(port), 5))
            return time.perf_counter() - began
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            time.sleep(0.2)
    raise ValueError(f"the server on port {port} did not come up")


async def _models(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    status = await reader.readline()
    writer.close()
    if b" 200 " not in status:
        raise ValueError(status)


def model_at(port: int) -> str:
    """The name under which a server has its first model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as reply:
        return str(json.load(reply)["data"][0]["id"])


def _environment() -> dict[str, str]:
    """The environment with a hub cache that is there: without one mlx_lm.server fails to list its models."""
    place = Path(os.environ.get("HF_HUB_CACHE") or Path.home() / ".cache" / "huggingface" / "hub")
    place.mkdir(parents=True, exist_ok=True)
    return dict(os.environ)


def measure(name: str, command: list[str], port: int, streams: tuple[int, ...]) -> dict[int, float]:
    """Start a server, load it with each number of streams twice, and print what the second time gave."""
    rates: dict[int, float] = {}
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log, env=_environment()) as process:
        try:
            print(f"{name}: ready after {wait_ready(port, process):.1f} s", flush=True)
            phases = [line for line in Path(log.name).read_text(errors="replace").splitlines() if " is ready after " in line]
            print(*phases, sep="\n", flush=True)
            model = model_at(port)
            for number in streams:
                for seed in (number, number + 1000):
                    found = asyncio.run(load(port, model, number, seed))
                    print(
                        f"{name}: {number} streams, {'first' if seed == number else 'second'} time: {found.rate:.0f} tok/s, "
                        f"first token {statistics.median(found.firsts) * 1e3:.0f} ms (slowest {max(found.firsts) * 1e3:.0f}), "
                        f"gaps p50 {statistics.median(found.gaps) * 1e3:.1f} p95 {found.p95_gap * 1e3:.1f} ms",
                        flush=True,
                    )
                rates[number] = found.rate
            if GAP_STREAMS in streams:
                for seed in (7, 70, 700):
                    quiet, busy = asyncio.run(load_beside_long(port, model, seed))
                    if not quiet.gaps or not busy.gaps:
                        raise ValueError(f"{GAP_STREAMS} streams had no tokens")
                    print(
                        f"{name}: p95 gap of {GAP_STREAMS} streams beside prompts of {LONG_TOKENS} tokens "
                        f"{busy.p95_gap * 1e3:.1f} ms, {busy.p95_gap / quiet.p95_gap:.2f} × quiet; gaps in ms, "
                        f"beside: {busy.gap_text()}; quiet: {quiet.gap_text()}",
                        flush=True,
                    )
        except (TimeoutError, ValueError, OSError, statistics.StatisticsError) as error:
            print(f"{name}: no answer in {LIMIT_SECONDS} s, or an error ({type(error).__name__}: {error})", flush=True)
            print(Path(log.name).read_text(errors="replace")[-4000:])
        finally:
            process.terminate()
    return rates


def main() -> None:
    """Measure weft, then mlx_lm.server, with the same load."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    chosen = tuple(int(number) for number in sys.argv[1].split(",")) if len(sys.argv) > 1 else STREAMS
    rivals = tuple(int(number) for number in sys.argv[2].split(",") if number != "0") if len(sys.argv) > 2 else STREAMS
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as place:
        folder = Path(place) / "qwen3.5-4b-shape"
        folder.mkdir()
        write_model(folder)
        mx.clear_cache()
        port = 8471
        own = [sys.executable, "-m", "weft", "serve", str(folder), "--port", str(port), "--max-rows", "128"]
        ours = measure("weft", own, port, chosen)
        rival = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port + 1)]
        theirs = measure("mlx_lm.server", rival, port + 1, rivals) if rivals else {}
        for number, rate in ours.items():
            if number in theirs:
                print(f"{number} streams: {rate / theirs[number]:.2f} times mlx_lm.server")


if __name__ == "__main__":
    main()
