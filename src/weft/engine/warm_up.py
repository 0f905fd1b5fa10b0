"""On a CUDA device: compute what requests will need once before the first one comes, so that none waits for it.

There a kernel is compiled or loaded when it is first used, and compiled functions are traced for every number of rows.
"""

from dataclasses import replace

import msgspec

from weft.config import EngineConfig
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.model.adapter import Adapter

SHORTEST = 4  # tokens of a prompt
KINDS = (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=1), Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=1))


def warm_up(adapter: Adapter, config: EngineConfig) -> int:
    """Compute prompts of many lengths, and steps with every number of rows up to the most; returns how many steps there were."""
    engine = Engine(adapter, replace(config, cache_bytes=0, speculate=(), gap_factor=1e6))  # prompts first, so that all rows meet
    lengths = [length for power in range(20) for length in (SHORTEST << power, (SHORTEST << power) * 3 // 2)]
    lengths = [length for length in lengths if length <= min(config.chunk_tokens, adapter.context_length // 2)] or [1]
    for row in range(config.max_rows):  # they end one after the other
        tokens = 3 * config.max_rows + row  # the first ones step while the last ones' prompts are computed
        engine.submit([1] * lengths[row % len(lengths)], with_tokens(KINDS[row % len(KINDS)], tokens))
    for length in lengths[config.max_rows :]:
        engine.submit([1] * length, with_tokens(KINDS[0], 1))
    steps = 0
    while not engine.idle:
        engine.turn()
        engine.take_events()
        engine.take_prompt_events()
        steps += 1
    return steps


def with_tokens(sampling: Sampling, max_tokens: int) -> Sampling:
    """Return these sampling parameters for an answer of exactly so many tokens."""
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, ignore_eos=True)
