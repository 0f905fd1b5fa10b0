"""`make bench-gpu`, drafts: what a GPU's steps with several tokens per row cost and give, random weights, one run.

A model with random weights has nothing to guess, so the answer is a script: whatever the model says, the token at a position is
the script's, and a draft token is right with a chance of 0.85. All that an engine does otherwise is done and timed.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from bench.shapes import random_model
from weft.config import DRAFT_SOURCES, EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.engine.runner import Step
from weft.engine.sequence import Line, Sequence
from weft.engine.speculation import Draft
from weft.ipc.limits import Sampling
from weft.memory.paged_views import make_batches
from weft.memory.slabs import RowState
from weft.memory.views import StepSpan
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel

ACCEPTANCE = 0.85
TOKENS = 128
PROMPT = list(range(1, 300))


def scripted_token(sequence: Sequence, position: int) -> int:
    """The token of a sequence at a position, whatever the model says."""
    return (position * 7919 + sequence.id * 104729) % 50_000


@dataclass(frozen=True)
class Copying:
    """What says of a row that its drafts are worth asking for in a crowd too."""

    is_following: bool = True


@dataclass
class ScriptedDrafts:
    """Drafts of the scripted answer, each token right with a chance of ACCEPTANCE."""

    chance: random.Random
    length: int
    name: str = "lookup"

    def draft(self, sequence: Sequence, count: int) -> Draft:
        places = range(sequence.num_tokens, sequence.num_tokens + min(count, self.length))
        right = [scripted_token(sequence, place) for place in places]
        return Draft(self.name, tuple(token if self.chance.random() < ACCEPTANCE else token + 1 for token in right))


def engine_for(adapter: Adapter, length: int) -> Engine:
    """An engine whose answers are scripted, with drafts of `length` tokens; 0: without."""
    config = EngineConfig.resolve(EngineSettings(model=""), "cuda", is_row_invariant=False)
    engine = Engine(adapter, dataclasses.replace(config, speculate=DRAFT_SOURCES if length else ()))
    if length:
        engine.speculation.sources = [ScriptedDrafts(random.Random(length), length)]
    sample = engine.runner.sample

    def scripted(step: Step, allowed: object) -> None:
        sample(step, allowed)  # type: ignore[arg-type]
        assert step.sampled is not None
        lines = [(line.sequence if isinstance(line, Line) else line, line.num_tokens - 1) for line in step.lines]
        tokens = mx.array([scripted_token(*line) for line in lines], mx.int32)
        waiting = mx.where(step.sampled.tokens < 0, 0, tokens)  # for the step, as what is sampled does
        step.sampled = dataclasses.replace(step.sampled, tokens=waiting)

    engine.runner.sample = scripted  # type: ignore[method-assign]
    return engine


def seconds_of(engine: Engine, rows: int) -> float:
    """How long the rows take for TOKENS tokens each, from the end of their prompts on."""
    sequences = [engine.submit([row + 1, *PROMPT], Sampling(max_tokens=TOKENS, ignore_eos=True)) for row in range(rows)]
    for sequence in sequences:
        sequence.drafting.lookup = Copying()  # type: ignore[assignment]
    while not all(one.is_prefilled for one in sequences):
        engine.turn()
    start = time.perf_counter()
    while not engine.idle:
        engine.turn()
    return time.perf_counter() - start


def speed(name: str, adapter: Adapter, rounds: int = 5) -> None:
    """Tokens a second with drafts of 1, 3 and 7 tokens over those without, for 1 and 8 rows."""
    for rows in (1, 8):
        engines = {length: engine_for(adapter, length) for length in (0, 1, 3, 7)}
        times: dict[int, list[float]] = {length: [] for length in engines}
        for _ in range(rounds + 1):
            for length, engine in engines.items():
                times[length].append(seconds_of(engine, rows))
        plain = statistics.median(times[0][1:])
        print(f"{name}: {rows} rows without drafts {plain / TOKENS * 1e3:.2f} ms a token")
        for length in (1, 3, 7):
            found, drafts = statistics.median(times[length][1:]), engines[length].speculation
            taken = sum(drafts.accepted.values()) / max(1, sum(drafts.drafted.values()))
            print(f"{name}: {rows} rows, drafts of {length}: {plain / found:.2f} × ({taken:.2f} accepted)", flush=True)


def bits(name: str, adapter: Adapter) -> None:
    """How far the logits of four tokens in one step are from those of four steps, for the same rows; 0: bit-equal."""
    fed = [[(5 + 7 * row + 3 * step) % 1000 for step in range(4)] for row in range(4)]

    def logits(tokens: int) -> np.ndarray:
        pool, states = adapter.make_pool(slab_tokens=4096, max_rows=4, constant_shapes=True), [RowState() for _ in fed]
        for row, state in enumerate(states):
            caches = adapter.prefilled_caches([row + 1, *PROMPT[: 60 + 9 * row]])
            pool.allocate(state, adapter.contents(caches), 61 + 9 * row)
        found: list[list[np.ndarray]] = [[] for _ in fed]
        for start in range(0, 4, tokens):
            (batch,) = make_batches(pool, states, seam=True, width=None, span=StepSpan(tokens))
            rows = [states.index(state) for state in batch.rows if state is not None]
            own = adapter.decode(mx.array([fed[row][start : start + tokens] for row in rows]), batch)
            batch.keep([tokens] * len(states))
            for row, of_row in zip(rows, np.array(own.astype(mx.float32)), strict=True):
                found[row].append(of_row)
        return np.stack([np.concatenate(row) for row in found])

    one, four = logits(1), logits(4)
    worst = float(np.abs(one - four).max())
    found = "have the bits of" if worst == 0 else f"are {worst / one.std():.2g} of the spread from"
    print(f"{name}: four tokens in a step {found} four steps")


def report(name: str, loaded: LoadedModel) -> None:
    """All figures of one model."""
    adapter = Adapter(loaded)
    print(f"{name}: {adapter.way} way, {adapter.step_tokens} tokens a step, {adapter.unverified or 'verified'}")
    bits(name, adapter)
    if adapter.step_tokens > 1:
        speed(name, adapter)


if __name__ == "__main__":
    from bench.shapes import LLAMA_1B, QWEN35_4B

    print(f"mlx {mx.__version__} on {mx.device_info()['device_name']}")
    report("qwen3.5 4B shape", random_model(QWEN35_4B, mx.bfloat16))
    report("llama 1B shape", random_model(LLAMA_1B, mx.bfloat16))
    for layers, dtype in ((8, mx.float32), (8, mx.bfloat16)):
        bits(f"qwen3.5 shape, {layers} layers, {dtype}", Adapter(random_model(QWEN35_4B, dtype, layers=layers)))
