"""A prompt of 32,000 tokens beside a stream: it costs the stream no turn, and memory only what its own tokens need."""

from __future__ import annotations

import copy
import dataclasses
import gc

import mlx.core as mx
import pytest

import zoo
from driver import Run, adapter_for, random_prompts
from weft.config import EngineConfig, EngineSettings
from weft.model.adapter import Adapter

TOKENS = 32_000
SERVED = EngineConfig.resolve(EngineSettings(model=""), "cpu", is_row_invariant=True)
# One layer of each kind, with one head: the prompt takes a second or two.
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
    "linear_num_value_heads": 1, "linear_num_key_heads": 1, "max_position_embeddings": 65536,
}  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    config = copy.deepcopy(zoo.ARCHITECTURES["qwen3_5"])
    config["text_config"] |= SMALL
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.ARCHITECTURES, "long", config)
        return adapter_for(zoo.make_checkpoint("long", tmp_path_factory.mktemp("long") / "model"))


def active_bytes() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_every_turn_of_a_long_prompt_gives_its_neighbour_a_token_and_memory_stays_flat(adapter: Adapter) -> None:
    """The clock moves by a second at each look, so that every slice of a chunk is one layer."""
    run = Run(adapter, dataclasses.replace(SERVED, max_rows=2))
    stream = run.submit([5, 6, 7], 2000)
    while len(stream.output) < 2:
        run.turn()
    before = active_bytes()
    mx.reset_peak_memory()
    (prompt,) = random_prompts(adapter.vocab_size, (TOKENS,))
    long = run.submit(prompt, 40)
    told, held = [], []
    while not long.is_prefilled:
        num_told, num_computed = len(stream.output), long.num_computed
        run.turn()
        told.append(len(stream.output) - num_told)
        assert long.num_computed - num_computed <= SERVED.chunk_tokens
        if long.num_computed // 8000 > num_computed // 8000:
            held.append(active_bytes() - before)
    peak = mx.get_peak_memory() - before
    run.engine.cancel(stream)
    run.finish()

    assert min(told) == 1
    assert len(told) >= 2 * (TOKENS // SERVED.chunk_tokens)  # both layers of each chunk
    assert len(long.output) == 40
    assert len(held) == 3
    assert max(held) - min(held) < 200_000
    assert max(held) < 1.1 * adapter.row_bytes(TOKENS)
    scores_of_a_chunk = 4 * SERVED.chunk_tokens * TOKENS
    assert peak < 2 * adapter.row_bytes(TOKENS) + 4 * scores_of_a_chunk  # those of the whole prompt are 250 times as many
    assert active_bytes() - before < 0.01 * adapter.row_bytes(TOKENS)
