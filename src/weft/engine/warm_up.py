"""On a CUDA device: compute what requests will need once before the first one comes, so that none waits for it.

There a kernel is compiled or loaded when it is first used. Which ones are used depends on the number of rows, and in models
without a forward over ragged rows on the length of a prompt.
"""

from dataclasses import replace

import msgspec

from weft.config import EngineConfig
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter

ROWS = (1, 3, 9, 17, 33, 65)  # in a step: the product's kernels change behind 2, 8, 16, 32 and 64 lines
SHORTEST = 4  # tokens of a prompt
TOGETHER = (5, 40, 300, 9, 70)  # tokens of prompts that come at once
BEYOND = (9, 40)  # tokens of such prompts beyond those of one chunk
STEPS = 3
REPLAYED = 6  # tokens
KINDS = (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=1), Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=1))


def warm_up(adapter: Adapter, config: EngineConfig) -> None:
    """Compute prompts, alone and together, and steps with few and with many rows, of one and of several tokens."""
    engine = Engine(adapter, replace(config, cache_bytes=0, speculate=()))
    longest = min(config.chunk_tokens, adapter.context_length // 2)
    if adapter.ragged is None:
        warm_up_lengths(engine, longest)
    else:
        warm_up_ragged(Engine(adapter, replace(config, speculate=())), longest)
    for rows in sorted({min(rows, config.max_rows) for rows in ROWS}):
        samplings = tuple(with_tokens(KINDS[row % len(KINDS)], STEPS) for row in range(rows))
        engine.submit_all(Submit(tuple(range(rows)), [1] * SHORTEST, samplings))
        finish(engine)
        replayed = tuple(with_tokens(KINDS[0], REPLAYED + STEPS) for _ in range(rows))  # several tokens of a row in one step
        engine.submit_all(Submit(tuple(range(rows)), [1] * SHORTEST, replayed, emitted=((1,) * REPLAYED,) * rows))
        finish(engine)


def warm_up_lengths(engine: Engine, longest: int) -> None:
    """Compute prompts of many lengths, each of which may need other kernels."""
    for length in (length for power in range(20) for length in (SHORTEST << power, (SHORTEST << power) * 3 // 2)):
        if length <= longest:
            engine.submit([1] * length, with_tokens(KINDS[0], 1))
            finish(engine)


def warm_up_ragged(engine: Engine, longest: int) -> None:
    """Compute prompts of one chunk and of more, each alone and several together, new and, where there is a cache, cached ones."""
    beyond = [longest + more for more in BEYOND if longest + more < engine.adapter.context_length]
    for lengths in ([SHORTEST], beyond[:1], [min(length, longest) for length in TOGETHER], beyond):
        for _ in range(2):  # the second time what was computed is cached
            for number, length in enumerate(lengths):
                engine.submit([2 + number] * length, with_tokens(KINDS[0], 2))
            finish(engine)
    engine.submit([1] * SHORTEST, with_tokens(msgspec.structs.replace(KINDS[0], prompt_logprobs=0), 1))
    finish(engine)


def with_tokens(sampling: Sampling, max_tokens: int) -> Sampling:
    """Return these sampling parameters for an answer of exactly so many tokens."""
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, ignore_eos=True)


def finish(engine: Engine) -> None:
    """Run the engine until nothing is left to do, and drop what it emits."""
    while not engine.idle:
        engine.turn()
        engine.take_events()
        engine.take_prompt_events()
