"""On a CUDA device: compute what requests will need once before the first one comes, so that none waits for it.

There a kernel is compiled or loaded when it is first used, and which ones are used depends on the number of rows and on the
length of a prompt.
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
STEPS = 3
REPLAYED = 6  # tokens
KINDS = (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=1), Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=1))


def warm_up(adapter: Adapter, config: EngineConfig) -> None:
    """Compute prompts of many lengths, and steps with few and with many rows, of one and of several tokens."""
    engine = Engine(adapter, replace(config, cache_bytes=0, speculate=()))
    longest = min(config.chunk_tokens, adapter.context_length // 2)
    for length in (length for power in range(20) for length in (SHORTEST << power, (SHORTEST << power) * 3 // 2)):
        if length <= longest:
            engine.submit([1] * length, with_tokens(KINDS[0], 1))
            finish(engine)
    for rows in sorted({min(rows, config.max_rows) for rows in ROWS}):
        samplings = tuple(with_tokens(KINDS[row % len(KINDS)], STEPS) for row in range(rows))
        engine.submit_all(Submit(tuple(range(rows)), [1] * SHORTEST, samplings))
        finish(engine)
        replayed = tuple(with_tokens(KINDS[0], REPLAYED + STEPS) for _ in range(rows))  # several tokens of a row in one step
        engine.submit_all(Submit(tuple(range(rows)), [1] * SHORTEST, replayed, emitted=((1,) * REPLAYED,) * rows))
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
