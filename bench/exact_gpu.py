"""`make exact-gpu`: on a GPU, a row's logits are bit-equal alone, in any crowd and from the prefix cache.

Under `--exact` everywhere; as served, where weft has products of its own (CUDA), also where prompts are computed together.
Each without and with a grammar, which tokens are sampled under; in chunks: the subject's prompt is cut, where it may be.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.shapes import QWEN35_4B, random_model, with_words
from weft.config import EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load

# Without drafts: each step has one line of logits to compare.
EXACT = EngineConfig.resolve(EngineSettings(model="", exact=True, speculate=()), "cuda", is_row_invariant=False)
CONFIGS = {
    "exact": EXACT,
    "exact, cached": dataclasses.replace(EXACT, cache_bytes=1 << 30),
    "as served": dataclasses.replace(EXACT, width=None, cache_bytes=1 << 30, max_rows=128),
}
SMALL_CHUNK = 48  # tokens: less than what the subject shares with a cached prompt, and than what it does not
CROWD_LENGTHS = (3, 17, 64, 255, 256, 300, 700)  # of prompts that are computed together with the subject's
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 9, "maxLength": 20}, "minItems": 9, "maxItems": 9}


def logits_of(
    adapter: Adapter,
    config: EngineConfig,
    subject: list[int],
    crowd: list[list[int]],
    tokens: int,
    constraint: Constraint | None = None,
) -> np.ndarray:
    """(tokens, V) the subject's logits while `crowd` joins and leaves around it; with a cache, some begin as it does."""
    engine = Engine(adapter, config)
    if crowd and config.cache_bytes:
        engine.submit(subject[: len(subject) * 2 // 3] + crowd[0], Sampling(max_tokens=2, ignore_eos=True))
        engine.submit(subject, Sampling(max_tokens=2, ignore_eos=True))
        while not engine.idle:
            engine.turn()
    waiting = list(crowd)
    sequence = engine.submit(subject, Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True), constraint)
    found = []
    while not sequence.is_finished:
        if waiting and len(engine.scheduler.running) < config.max_rows and len(found) % 2 == 0:
            for prompt in [waiting.pop() for _ in range(1 + len(waiting) // 8)]:  # all come within the answer
                engine.submit(prompt, Sampling(temperature=0.0, max_tokens=3 + len(prompt) % 9, ignore_eos=True))
        engine.turn()
        step = engine.order.pending
        if step is not None and sequence in step.sequences:
            found.append(np.array(step.logits[step.sequences.index(sequence)].astype(mx.float32)))
    assert not crowd or not config.cache_bytes or sequence.timings.cached_tokens > 0
    return np.stack(found[:tokens])


def logits_together(
    adapter: Adapter, config: EngineConfig, subject: list[int], crowd: list[list[int]], tokens: int
) -> np.ndarray:
    """(tokens, V) the subject's logits where its prompt comes at once with others of other lengths."""
    engine, half = Engine(adapter, config), len(crowd) // 2
    for prompt in crowd[:half]:
        engine.submit(prompt, Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    sequence = engine.submit(subject, Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    for prompt in crowd[half:]:
        engine.submit(prompt, Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    found = []
    while not sequence.is_finished:
        engine.turn()
        step = engine.order.pending
        if step is not None and sequence in step.sequences:
            found.append(np.array(step.logits[step.sequences.index(sequence)].astype(mx.float32)))
    return np.stack(found[:tokens])


def show_together(name: str, adapter: Adapter, tokens: int) -> bool:
    """Compare prompts alone with the same ones in forwards with others of other lengths; returns whether promised bits are equal.

    Where prompts are cut freely, also in other chunks than alone.
    """
    is_ragged = adapter.ragged is not None
    print(
        f"{name}: prompts together {adapter.grouping}, of any lengths {is_ragged}, cut freely {adapter.cuts_freely}", flush=True
    )
    rng, same, served = random.Random(1), True, CONFIGS["as served"]
    crowd = [[rng.randrange(adapter.vocab_size - 1) for _ in range(rng.choice(CROWD_LENGTHS))] for _ in range(24)]
    cases = {"at once": served} | (
        {"in small chunks": dataclasses.replace(served, chunk_tokens=96)} if adapter.cuts_freely else {}
    )
    for length in (2, 40, 257, 1100):
        subject = [rng.randrange(adapter.vocab_size - 1) for _ in range(length)]
        alone = logits_together(adapter, served, subject, [], tokens)
        for label, config in cases.items():
            found = logits_together(adapter, config, subject, crowd, tokens)
            equal = np.array_equal(alone, found)
            same &= equal or not adapter.is_row_invariant
            text = "bit-equal" if equal else f"differs by {float(np.abs(alone - found).max()):.3g}"
            print(f"{name:24} {length:4} tokens with 24 other prompts {label}: {text}", flush=True)
    return same


def show(name: str, loaded: LoadedModel, tokens: int, labels: Collection[str] = tuple(CONFIGS)) -> bool:
    """Compare alone with three crowds in each configuration; print what was found, return whether exact was exact."""
    adapter = Adapter(loaded)
    print(f"{name}: {adapter.way} way, refused {adapter.refused}")
    compiler = Compiler(loaded.folder / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
    rng = random.Random(0)
    vocab = loaded.vocab_size - 1
    prompts = [[rng.randrange(vocab) for _ in range(rng.choice([2, 9, 60, 200]))] for _ in range(130)]
    prompts[0] = [rng.randrange(vocab) for _ in range(150)]
    same = True
    for label, config in ((label, CONFIGS[label]) for label in labels):
        is_promised = label != "as served" or adapter.is_row_invariant
        cuts = {"": config} | (
            {", in chunks": dataclasses.replace(config, chunk_tokens=SMALL_CHUNK)} if adapter.cuts_freely else {}
        )
        for grammar in (False, True):
            alone = logits_of(adapter, config, prompts[0], [], tokens, constraint_of(compiler) if grammar else None)
            for (cut, own), others in itertools.product(cuts.items(), (1, 7, 30, 127) if config.width is None else (1, 7, 30)):
                constraint = constraint_of(compiler) if grammar else None
                crowd = logits_of(adapter, own, prompts[0], prompts[1 : 1 + others], tokens, constraint)
                equal = np.array_equal(alone, crowd)
                same &= equal or not is_promised
                found = "bit-equal" if equal else f"differs by {float(np.abs(alone - crowd).max()):.3g}"
                print(f"{name:24} {label}{cut} beside {others:3}{', grammar' * grammar}: {found}", flush=True)
    return show_together(name, adapter, min(tokens, 8)) and same


def constraint_of(compiler: Compiler) -> Constraint:
    """A grammar for one answer: an array of texts."""
    return compiler.constraint(ConstraintSpec(GrammarSpec("json_schema", json.dumps(SCHEMA))))


def changed(loaded: LoadedModel, change: Callable[[nn.Module], object]) -> LoadedModel:
    """The same model after a change of its weights."""
    change(loaded.model)
    mx.eval(loaded.model.parameters())
    return loaded


def main() -> None:
    """Run the model of this name, or those whose names hold the text given.

    Before it `together`: only prompts together; `served`: only as served.

    The exit status says whether what is promised was bit-equal.
    """
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]', or a Mac")
    print(f"mlx {mx.__version__} on {mx.device_info()['device_name'] if hasattr(mx, 'device_info') else 'GPU'}")
    shipped = Path(__file__).parent.parent / "src" / "weft" / "model" / "tiny-hybrid"
    models: dict[str, Callable[[], LoadedModel]] = {
        "tiny-hybrid": lambda: load(shipped),
        "tiny-hybrid, float32": lambda: changed(load(shipped), lambda model: model.set_dtype(mx.float32)),
        "tiny-hybrid, 4 bits": lambda: changed(load(shipped), lambda model: nn.quantize(model, 64, 4)),
        "qwen3.5 shape": lambda: with_words(random_model(QWEN35_4B, mx.bfloat16, layers=8), folder),
        "qwen3.5 shape, 4 bits": lambda: changed(
            with_words(random_model(QWEN35_4B, mx.bfloat16, layers=8), folder), lambda model: nn.quantize(model, 64, 4)
        ),
    }
    part = sys.argv[1] if sys.argv[1:2] in (["together"], ["served"]) else None
    wanted, labels = " ".join(sys.argv[1 if part is None else 2 :]), CONFIGS if part is None else ("as served",)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        good = [
            show_together(name, Adapter(make()), 8)
            if part == "together"
            else show(name, make(), 40 if "tiny" in name else 24, labels)
            for name, make in models.items()
            if name == wanted or (wanted not in models and wanted in name)
        ]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
