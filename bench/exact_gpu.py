"""`make exact-gpu`: on a GPU, a row's logits are bit-equal alone and in any crowd when every step has one width."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from bench.shapes import QWEN35_4B, random_model
from weft.config import EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load


def logits_of(adapter: Adapter, config: EngineConfig, subject: list[int], crowd: list[list[int]], tokens: int) -> np.ndarray:
    """(tokens, V) the subject's logits while `crowd` joins and leaves around it."""
    engine = Engine(adapter, config)
    waiting = list(crowd)
    sequence = engine.submit(subject, Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    found = []
    while not sequence.is_finished:
        if waiting and len(engine.scheduler.running) < config.max_rows and len(found) % 2 == 0:
            prompt = waiting.pop()
            engine.submit(prompt, Sampling(temperature=0.0, max_tokens=3 + len(prompt) % 9, ignore_eos=True))
        engine.turn()
        step = engine.order.pending
        if step is not None and sequence in step.sequences:
            found.append(np.array(step.logits[step.sequences.index(sequence)].astype(mx.float32)))
    return np.stack(found[:tokens])


def show(name: str, loaded: LoadedModel, tokens: int) -> bool:
    """Compare alone with three crowds; print what was found."""
    adapter = Adapter(loaded)
    print(f"{name}: {adapter.way} way, refused {adapter.refused}")
    rng = random.Random(0)
    vocab = loaded.vocab_size - 1
    prompts = [[rng.randrange(vocab) for _ in range(rng.choice([2, 9, 60, 200]))] for _ in range(40)]
    same = True
    for label, config in _configs():
        alone = logits_of(adapter, config, prompts[0], [], tokens)
        for others in (1, 7, 30):
            crowd = logits_of(adapter, config, prompts[0], prompts[1 : 1 + others], tokens)
            equal = np.array_equal(alone, crowd)
            same &= equal or label != "exact"
            worst = float(np.abs(alone - crowd).max())
            print(
                f"{name:14} {label:8} beside {others:2}: {'bit-equal' if equal else f'differs by {worst:.3g}'}",
                flush=True,
            )
    return same


def _configs() -> list[tuple[str, EngineConfig]]:
    exact = EngineConfig.resolve(EngineSettings(model="", exact=True), "cuda", is_row_invariant=False)
    return [("exact", exact), ("variable", dataclasses.replace(exact, width=None))]


def main() -> None:
    """Run both models; the exit status says whether exact mode was exact."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    print(f"mlx {mx.__version__} on {mx.device_info()['device_name'] if hasattr(mx, 'device_info') else 'GPU'}")
    shipped = Path(__file__).parent.parent / "src" / "weft" / "model" / "tiny-hybrid"
    good = show("tiny-hybrid", load(shipped), 40)
    good &= show("qwen3.5 shape", random_model(QWEN35_4B, mx.bfloat16, layers=8), 24)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
