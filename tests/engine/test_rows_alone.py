"""A row that can not join the batch decodes alone: its answer is the same, and an operator can see it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from driver import Run, adapter_for, answers, random_prompts
from weft.engine.host import Host
from weft.engine.sequence import Sequence
from weft.grammar.grammar_cache import GrammarCache
from weft.ipc.limits import Sampling
from weft.ipc.messages import EngineEvents, EngineStatus, Submit
from weft.model.adapter import Adapter
from weft.model.saved_state import LayerCaches

TOKENS = 12
PROMPTS = random_prompts(128, (9, 30, 17, 22), seed=6)


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


@pytest.fixture(scope="module")
def unlike_zeros(checkpoint: Callable[[str], Path]) -> Adapter:
    """A model whose first token is not computed as if there were states of zeros before it."""
    return adapter_for(checkpoint("recurrent_gemma"))


def in_half_precision(caches: LayerCaches) -> LayerCaches:
    for cache in caches:
        if type(cache) is KVCache:
            cache.keys, cache.values = cache.keys.astype(mx.float16), cache.values.astype(mx.float16)
    return caches


def greedy(adapter: Adapter, caches: LayerCaches, token: int) -> list[int]:
    """The answer of a row that decodes on these caches, with nobody beside it."""
    answer: list[int] = []
    for _ in range(TOKENS):
        token = int(mx.argmax(adapter.decode_alone(mx.array([[token]]), caches)))
        answer.append(token)
    return answer


def turn_until_prefilled(run: Run, sequence: Sequence) -> None:
    while not sequence.is_prefilled:
        run.turn()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_rows_of_another_geometry_answer_as_alone_and_are_counted_and_logged_once(
    adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rows among four have keys and values of another dtype."""
    wrong, right = PROMPTS[:2], PROMPTS[2:]
    run = Run(adapter)
    sequences = [run.submit(prompt, TOKENS) for prompt in wrong]
    for sequence in sequences:
        turn_until_prefilled(run, sequence)
        memory: Any = sequence.memory
        in_half_precision(memory.own)
    neighbours = [run.submit(prompt, TOKENS) for prompt in right]
    run.finish()

    alone = [greedy(adapter, in_half_precision(adapter.prefilled_caches(prompt[:-1], 16)), prompt[-1]) for prompt in wrong]
    assert [sequence.output for sequence in sequences] == alone
    assert [sequence.output for sequence in neighbours] == answers(adapter, right, TOKENS)
    assert run.engine.runner.num_alone == {"model": 0, "short": 0, "geometry": 2}
    (line,) = warnings(caplog)
    assert line.endswith("layer 2 (FullAttention): keys are (1, 2, 8, 16) float16 instead of (1, 2, 8, 16) float32 (dtype)")


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "mamba2", "longcat_flash_ngram"])
@pytest.mark.parametrize("way", ["fused", "layers"])
def test_prompts_of_one_token_are_in_the_batch_from_the_start_and_answer_as_alone(
    checkpoint: Callable[[str], Path], name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_for(checkpoint(name))
    if way == "layers":
        monkeypatch.setattr(adapter, "fused", None)
    run = Run(adapter)
    neighbour = run.submit(PROMPTS[0], 2 * TOKENS)
    turn_until_prefilled(run, neighbour)
    sequences = [run.submit([5 + number % 3], TOKENS) for number in range(6)]
    run.finish()

    assert [one.output for one in sequences] == [greedy(adapter, adapter.new_caches(1), one.prompt[0]) for one in sequences]
    assert [neighbour.output] == answers(adapter, PROMPTS[:1], 2 * TOKENS)
    assert run.engine.runner.num_alone == {"model": 0, "short": 0, "geometry": 0}


def test_a_prompt_of_one_token_may_join_the_batch_later_and_is_no_line_in_the_log(
    unlike_zeros: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(unlike_zeros)
    sequence = run.submit(PROMPTS[0][:1], TOKENS)
    while len(sequence.output) < 4:
        run.turn()
    has_joined = len(run.engine.runner.pool.rows) == 1
    run.finish()

    assert has_joined
    assert sequence.output == greedy(unlike_zeros, unlike_zeros.new_caches(1), sequence.prompt[0])
    assert run.engine.runner.num_alone == {"model": 0, "short": 1, "geometry": 0}
    assert warnings(caplog) == []


def test_a_model_that_is_decoded_row_by_row_is_logged_at_load_and_its_rows_are_counted(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_for(checkpoint("llama4"))
    (line,) = warnings(caplog)
    run = Run(adapter)
    for prompt in PROMPTS:
        run.submit(prompt, 3)
    run.finish()

    assert line.startswith("llama4 decodes each row alone")
    assert "layer 2 keeps its memory in a ChunkedKVCache" in line
    assert len(warnings(caplog)) == 1
    assert run.engine.runner.num_alone == {"model": 4, "short": 0, "geometry": 0}


class Channel:
    """The channel to a front that sends one request."""

    def __init__(self, request: Submit) -> None:
        self.requests = [request]
        self.statuses: list[EngineStatus] = []

    def receive(self, _seconds: float) -> list[Submit]:
        requests, self.requests = self.requests, []
        return requests

    def send(self, message: EngineEvents) -> None:
        if message.status is not None:
            self.statuses.append(message.status)


def test_the_front_is_sent_how_many_rows_decoded_alone(unlike_zeros: Adapter) -> None:
    channel = Channel(Submit((0,), PROMPTS[0][:1], (Sampling(temperature=0.0, max_tokens=3),)))
    host = Host(Run(unlike_zeros).engine, SimpleNamespace(cache=GrammarCache()), channel, has_canary=False)  # type: ignore[arg-type]
    host.receive()
    while host.live:
        host.engine.turn()
        host.send_events()

    assert channel.statuses[-1].alone == {"model": 0, "short": 1, "geometry": 0}
