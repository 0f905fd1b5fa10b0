"""`python -m bench.together [MODEL]`: sixteen prompts in one forward against one after the other, as the engine computes them."""

from __future__ import annotations

import dataclasses
import random
import sys
import time

from weft.llm import LLM

from weft.config import EngineConfig, EngineSettings  # isort: skip
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.model.adapter import Adapter

NUM_PROMPTS = 16
LENGTHS = (16, 64, 512)
GROUPS = (0, 128, 256, 512, 1024)  # tokens in one forward; 0: prompts one by one
ROUNDS = 4


def seconds_until_first_tokens(adapter: Adapter, config: EngineConfig, length: int, seed: int) -> tuple[float, float]:
    """Submit the prompts at once; return the seconds until the first one has its token, and until all have."""
    rng = random.Random(seed)
    engine = Engine(adapter, config)
    prompts = [[rng.randrange(1, adapter.vocab_size) for _ in range(length + 1)] for _ in range(NUM_PROMPTS)]
    began = time.perf_counter()
    sequences = [engine.submit(prompt, Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)) for prompt in prompts]
    first = 0.0
    while not engine.idle:
        engine.turn()
        if not first and any(sequence.output for sequence in sequences):
            first = time.perf_counter() - began
    return first, time.perf_counter() - began


def main() -> None:
    """Measure every length with every group size in turns; the best round of each counts."""
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "tiny-hybrid", speculate="off")
    adapter = llm.engine.adapter
    served = EngineConfig.resolve(EngineSettings(model=""), llm.device, is_row_invariant=adapter.is_row_invariant)
    print(f"{adapter.name} on {llm.device}, prompts together: {adapter.grouping}", flush=True)
    for length in LENGTHS:
        found: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in GROUPS}
        for round_number in range(ROUNDS):
            for tokens, times in found.items():
                config = dataclasses.replace(served, group_tokens=tokens)
                times.append(seconds_until_first_tokens(adapter, config, length, round_number))
        alone = min(last for _, last in found[0])
        for tokens, times in found.items():
            first, last = min(first for first, _ in times), min(last for _, last in times)
            label = f"{tokens} tokens in a forward" if tokens else "one after the other"
            times_found = f"first {first * 1e3:7.1f} ms, all {last * 1e3:7.1f} ms, {alone / last:.2f} ×"
            print(f"{NUM_PROMPTS} × {length:4}: {label:24} {times_found}", flush=True)


if __name__ == "__main__":
    main()
