"""What computing prompts once is worth, and what it costs where it can not help: `python -m bench.prefixes`.

Every figure is a ratio within one run: together over alone, turn 40 over turn 4, the cache on over off.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from dataclasses import replace
from typing import Any

from weft.llm import BLAS, LLM  # binds the BLAS before mlx is imported

import mlx.core as mx  # isort: skip
import numpy as np

from bench.agent import in_words, title_request, turns
from bench.front import serving
from bench.shapes import GEMMA3_SMALL, random_model
from weft.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.model.adapter import Adapter

PREFIX, TAIL, EIGHT = 1000, 24, 8
ROUNDS = 5
MEGABYTE = 2**20
ROOMY = 4096 * MEGABYTE


def main() -> None:
    """Print every ratio with its bar."""
    print(f"prefixes: prompts that begin alike; {BLAS.name} with {BLAS.threads} threads, medians of {ROUNDS} rounds")
    llms = {name: LLM(name) for name in ("tiny-hybrid", "smollm2")}
    adapters = {name: llm.engine.adapter for name, llm in llms.items()}
    adapters["gemma3 (sliding window, random weights)"] = Adapter(random_model(GEMMA3_SMALL, mx.float32))
    config = replace(llms["smollm2"].config, cache_bytes=ROOMY)
    for name, adapter in adapters.items():
        eight_at_once(name, adapter, config)
    unique_prompts(adapters["smollm2"], config)
    two_thousand_requests(adapters["tiny-hybrid"], config)
    for name in llms:
        forty_turns(name)


def agent() -> None:
    """The conversations only: `python -m bench.prefixes agent`."""
    for name in ("tiny-hybrid", "smollm2"):
        forty_turns(name)


def say(what: str, ratio: float, bar: str, detail: str = "") -> None:
    """One line of the table."""
    print(f"  {what:76} {ratio:6.3f}   wanted {bar:8} {detail}", flush=True)


def eight_at_once(name: str, adapter: Adapter, config: EngineConfig) -> None:
    """Eight prompts with a common beginning, nothing known before; the slowest first token over that of one alone."""
    rng = np.random.default_rng(0)
    ratios, shares = [], []
    for _ in range(ROUNDS):
        prefix = rng.integers(3, 1000, PREFIX).tolist()
        prompts = [prefix + rng.integers(3, 1000, TAIL).tolist() for _ in range(EIGHT)]
        alone, _ = first_tokens(adapter, config, prompts[:1])
        together, rows = first_tokens(adapter, config, prompts)
        ratios.append(max(together) / alone[0])
        computed = sum(len(row.prompt) - row.timings.cached_tokens for row in rows)
        shares.append(computed / (PREFIX + EIGHT * TAIL))
        assert sum(0 < row.timings.cached_tokens < len(row.prompt) for row in rows) >= EIGHT - 1
    say(f"{name}: slowest first token of 8 at once over one alone", statistics.median(ratios), "≤ 1.5")
    say(f"{name}: prompt tokens computed over prefix + tails", statistics.median(shares), "≤ 1.05")


def first_tokens(adapter: Adapter, config: EngineConfig, prompts: list[list[int]]) -> tuple[list[float], list[Sequence]]:
    """Seconds from submitting all to the first token of each."""
    engine = Engine(adapter, config)
    start = engine.clock()
    rows = [engine.submit(prompt, Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)) for prompt in prompts]
    while not all(row.output for row in rows):
        engine.turn()
    seconds = [(row.timings.first_token or 0.0) - start for row in rows]
    while not engine.idle:
        engine.turn()
    return seconds, rows


def unique_prompts(adapter: Adapter, config: EngineConfig) -> None:
    """The same requests, none like another, with the cache on and off in turns: tokens a second."""
    rng = np.random.default_rng(1)
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(ROUNDS):
        prompts = [rng.integers(3, 1000, 300).tolist() for _ in range(16)]
        for name, cache_bytes in (("off", 0), ("on", 64 * MEGABYTE)):
            engine = Engine(adapter, replace(config, cache_bytes=cache_bytes))
            rows = [engine.submit(prompt, Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)) for prompt in prompts]
            start = time.perf_counter()
            while not engine.idle:
                engine.turn()
            rates[name].append(sum(len(row.prompt) + len(row.output) for row in rows) / (time.perf_counter() - start))
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    detail = f"({min(ratios):.3f} – {max(ratios):.3f})"
    say("smollm2: tokens/s of unique prompts, cache on over off", statistics.median(ratios), "≥ 0.97", detail)


def two_thousand_requests(adapter: Adapter, config: EngineConfig) -> None:
    """Random requests, half of them on common trunks: bytes held over the budget, at its worst after any request."""
    rng = np.random.default_rng(2)
    budget = 24 * MEGABYTE
    engine = Engine(adapter, replace(config, cache_bytes=budget))
    tree = engine.prefix.tree
    assert tree is not None
    trunks = [rng.integers(3, 4000, length).tolist() for length in (100, 300, 700)]
    held, active, asked = 0, 0, 0
    while asked < 2000 or not engine.idle:
        while asked < 2000 and len(engine.scheduler.running) + len(engine.scheduler.waiting) < 8:
            asked += 1
            prompt = (trunks[asked % 3] if asked % 2 else []) + rng.integers(3, 4000, int(rng.integers(2, 200))).tolist()
            engine.submit(prompt, Sampling(temperature=0.0, max_tokens=int(rng.integers(1, 4)), ignore_eos=True))
        engine.turn()
        pinned = sum(node.nbytes for node in tree.nodes() if node.pins) if tree.held_bytes > budget else 0
        held = max(held, tree.held_bytes - pinned)
        active = max(active, mx.get_active_memory())
    say("tiny-hybrid: bytes kept over the budget, worst of 2,000 requests", held / budget, "≤ 1", f"({tree.num_evicted} evicted)")
    assert tree.held_bytes <= budget


def forty_turns(name: str) -> None:
    """An agent's conversation through HTTP with a side request beside every turn: first token of turn 40 over turn 4's."""
    ratios, over = [], 0
    with serving([sys.executable, "-m", "weft", "serve", name, "--port", "0"]) as url:
        for round_ in range(3):
            messages: list[dict[str, Any]] = [{"role": "system", "content": f"Round {round_}."}]
            before, seconds, news = 0, [], []
            for turn, new in enumerate(turns(40)):
                new = new if turn else new[1:]
                messages += new if takes_tools(url) else in_words(new)
                chat(url, title_request(messages), 4)
                usage, first = chat(url, messages, 2)
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                over = max(over, usage["prompt_tokens"] - cached - (usage["prompt_tokens"] - before))
                news.append(usage["prompt_tokens"] - cached)
                before = usage["prompt_tokens"]
                seconds.append(first)
            like = [turn for turn in range(1, 8) if abs(news[turn] - news[39]) <= 4]
            ratios.append(statistics.median(seconds[35::2]) / statistics.median(seconds[turn] for turn in like))
    detail = f"({before} tokens at the end; at most {over} more computed than were new, wanted ≤ 256)"
    say(f"{name}: first token of turns 36 to 40 over turns 2 to 8 with as much news", statistics.median(ratios), "≤ 1.5", detail)


def takes_tools(url: str) -> bool:
    """Whether the model served there has a place for tools in its chat template."""
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        return "tools" in json.load(reply)["data"][0]["capabilities"]


def chat(url: str, messages: list[dict[str, Any]], tokens: int) -> tuple[dict[str, Any], float]:
    """The usage, and the engine's own time to the first token."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    kind = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), kind)) as reply:
        told = json.load(reply)
    return told["usage"], told["timings"]["queue_ms"] + told["timings"]["prompt_ms"]


if __name__ == "__main__":
    agent() if sys.argv[1:] == ["agent"] else main()
