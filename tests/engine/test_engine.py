"""What the loop owes every request: an end, an error of its own, memory given back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from driver import SMALL, Run, adapter_for, answers, random_prompts
from weft.engine.host import Host
from weft.errors import ContextTooLong, InvalidRequest
from weft.grammar.grammar_cache import GrammarCache
from weft.ipc.limits import Sampling
from weft.ipc.messages import Cancel, EngineEvents, Submit
from weft.model.adapter import Adapter


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


PROMPTS = random_prompts(128, (9, 30, 4, 17, 25, 2, 12, 40), seed=5)


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(adapter: Adapter) -> None:
    free = answers(adapter, [PROMPTS[0]], 12)[0]
    run = Run(adapter)
    sequence = run.submit(PROMPTS[0], 12, stop_token_ids=(free[4],))
    run.finish()

    assert sequence.output == free[: free.index(free[4])]
    assert sequence.finish == "stop"


def test_min_tokens_holds_the_stop_token_back(adapter: Adapter) -> None:
    free = answers(adapter, [PROMPTS[0]], 12)[0]
    run = Run(adapter)
    sequence = run.submit(PROMPTS[0], 12, stop_token_ids=(free[0],), min_tokens=6)
    run.finish()

    assert len(sequence.output) >= 6
    assert free[0] not in sequence.output[:6]


def test_the_models_own_end_token_stops_unless_ignored(adapter: Adapter) -> None:
    free = answers(adapter, [PROMPTS[1]], 8)[0]
    ending = copy.copy(adapter)
    ending.eos_token_ids = frozenset({free[3]})
    run = Run(ending)
    stopping, ignoring = run.submit(PROMPTS[1], 8, ignore_eos=False), run.submit(PROMPTS[1], 8, ignore_eos=True)
    run.finish()

    assert stopping.output == free[: free.index(free[3])]
    assert stopping.finish == "stop"
    assert ignoring.output == free
    assert ignoring.finish == "length"


def test_more_requests_than_rows_all_get_their_answers(adapter: Adapter) -> None:
    alone = [answers(adapter, [prompt], 6)[0] for prompt in PROMPTS]

    together = answers(adapter, PROMPTS * 3, 6, dataclasses.replace(SMALL, max_rows=3))

    assert together == alone * 3


def test_cancelling_frees_the_row_before_the_next_step(adapter: Adapter) -> None:
    run = Run(adapter)
    doomed, kept = run.submit(PROMPTS[0], 100), run.submit(PROMPTS[2], 10)
    while not (doomed.output and kept.output):
        run.turn()
    run.engine.cancel(doomed)
    run.turn()

    assert len(run.engine.runner.pool.rows) == 1
    run.finish()
    assert doomed.finish == "cancelled"
    assert kept.output == answers(adapter, [PROMPTS[2]], 10)[0]


def test_cancelling_inside_a_prompt_takes_effect_within_a_chunk(adapter: Adapter) -> None:
    run = Run(adapter)
    talking = run.submit(PROMPTS[2], 30)
    while len(talking.output) < 2:
        run.turn()
    doomed = run.submit([1] * 500, 10)
    run.turn()
    computed = doomed.num_computed
    run.engine.cancel(doomed)
    run.turn()

    assert doomed not in run.engine.scheduler.running
    assert doomed.num_computed - computed <= SMALL.chunk_tokens
    assert doomed.memory is None
    run.finish()


def test_a_waiting_request_can_be_cancelled(adapter: Adapter) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, max_rows=1))
    first, second = run.submit(PROMPTS[0], 5), run.submit(PROMPTS[1], 5)
    run.turn()
    run.engine.cancel(second)
    run.finish()

    assert (first.finish, second.finish) == ("length", "cancelled")
    assert second.output == []


@pytest.mark.parametrize("moment", ["waiting", "prefill", "decode", "finished"])
def test_cancelling_twice_is_cancelling_once(adapter: Adapter, moment: str) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, max_rows=1 if moment == "waiting" else 8, cache_bytes=1 << 20))
    neighbour = run.submit(PROMPTS[2], 20)
    while len(neighbour.output) < 2:
        run.turn()
    doomed = run.submit(PROMPTS[1], 4)
    is_there = {
        "waiting": lambda: doomed in run.engine.scheduler.waiting,
        "prefill": lambda: 0 < doomed.num_computed < len(PROMPTS[1]) - 1,
        "decode": lambda: len(doomed.output) == 2,
        "finished": lambda: doomed.is_finished,
    }[moment]
    while not is_there():
        run.turn()
    for _ in range(2):
        run.engine.cancel(doomed)
    run.turn()
    run.engine.cancel(doomed)  # its row is released by now
    run.engine.runner.release(doomed)
    run.finish()

    ends = [event.finish for event in run.engine.take_events() if event.sequence == doomed.id and event.finish is not None]
    assert ends == ["length" if moment == "finished" else "cancelled"]
    assert neighbour.output == answers(adapter, [PROMPTS[2]], 20)[0]
    assert not any(node.pins for node in run.engine.prefix.tree.nodes())  # type: ignore[union-attr]


def test_a_cancel_message_that_comes_twice_ends_its_request_once(adapter: Adapter) -> None:
    messages: list[Submit | Cancel] = [
        Submit((7,), PROMPTS[0], (Sampling(max_tokens=9),)),
        Cancel((7,)),
        Cancel((7,)),
        Cancel((8,)),
    ]
    sent: list[EngineEvents] = []
    channel = SimpleNamespace(receive=lambda _: [messages.pop(0)] if messages else [], send=sent.append)
    host = Host(Run(adapter).engine, SimpleNamespace(cache=GrammarCache()), channel, has_canary=False)  # type: ignore[arg-type]
    while messages or not host.engine.idle:
        host.receive()
        host.engine.turn()
        host.send_events()

    assert [event.finish for message in sent for event in message.tokens if event.finish is not None] == ["cancelled"]
    assert host.live == {}


def test_every_request_ends_in_exactly_one_finish_event(adapter: Adapter) -> None:
    run = Run(adapter)
    sequences = [run.submit(prompt, 4) for prompt in PROMPTS]
    run.engine.cancel(sequences[3])
    run.finish()

    ends = [event.sequence for event in run.engine.take_events() if event.finish is not None]
    assert sorted(ends) == [sequence.id for sequence in sequences]


def test_a_step_hands_on_one_token_of_each_row_and_copies_no_answer(adapter: Adapter) -> None:
    run = Run(adapter)
    rows = [run.submit(prompt, 30) for prompt in PROMPTS[:3]]
    answers_before = [row.output for row in rows]
    told: dict[int, list[int | None]] = {row.id: [] for row in rows}
    while not run.engine.idle:
        run.turn()
        events = run.engine.take_events()
        assert len({event.sequence for event in events}) == len(events)
        for event in events:
            told[event.sequence].append(event.token)

    assert all(row.output is before for row, before in zip(rows, answers_before, strict=True))
    assert [told[row.id] for row in rows] == [row.output for row in rows]


def test_a_row_whose_logits_are_not_numbers_fails_alone(adapter: Adapter) -> None:
    healthy = answers(adapter, [PROMPTS[1]], 10)[0]
    run = Run(adapter)
    sick, well = run.submit(PROMPTS[0], 10), run.submit(PROMPTS[1], 10)
    while len(sick.output) < 2:
        run.turn()
    slab, slot = sick.memory.state.slab, sick.memory.state.slot
    values = next(iter(slab.layers.values())).values
    values[slot] = mx.full(values.shape[1:], float("nan"))
    run.finish()

    assert sick.finish == "error"
    assert sick.error is not None
    assert "not finite" in sick.error
    assert well.output == healthy


def test_the_next_tenant_of_a_poisoned_slot_is_not_poisoned(adapter: Adapter) -> None:
    healthy = answers(adapter, [PROMPTS[2]], 10)[0]
    run = Run(adapter, dataclasses.replace(SMALL, width=8))  # slabs have all their slots from the start
    sick, witness = run.submit(PROMPTS[0], 60), run.submit(PROMPTS[3], 14)
    while not witness.output:
        run.turn()
    slab, slot = sick.memory.state.slab, sick.memory.state.slot
    for held in slab.layers.values():
        for array in (held.keys, held.values):
            array[slot] = mx.full(array.shape[1:], float("nan"))
    while not sick.is_finished:
        run.turn()
    run.turn()
    tenant = run.submit(PROMPTS[2], 10)
    while not (tenant.output or tenant.is_finished):
        run.turn()
    assert tenant.error is None
    placed = (tenant.memory.state.slab, tenant.memory.state.slot)
    run.finish()

    assert placed == (slab, slot)
    assert tenant.output == healthy
    assert witness.finish == "length"


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, ["prompt", "empty"]),
        ([5, 128], {}, ["prompt token 128", "position 1", "128"]),
        ([5, -1], {}, ["prompt token -1"]),
        ([1] * 5000, {}, ["5000", "maximum context length is 4096"]),
        ([1] * 10, {"max_tokens": 10**9}, ["max_tokens 1000000000", "context"]),
        ([1], {"max_tokens": -1}, ["max_tokens -1"]),
        ([1], {"temperature": float("nan")}, ["temperature nan"]),
        ([1], {"temperature": -0.1}, ["temperature -0.1"]),
        ([1], {"temperature": float("inf")}, ["temperature inf"]),
        ([1], {"top_p": 0.0}, ["top_p 0.0"]),
        ([1], {"top_p": 1.5}, ["top_p 1.5"]),
        ([1], {"top_k": -1}, ["top_k -1"]),
        ([1], {"min_p": 2.0}, ["min_p 2.0"]),
        ([1], {"repetition_penalty": 0.0}, ["repetition_penalty 0.0"]),
        ([1], {"presence_penalty": float("nan")}, ["presence_penalty nan"]),
        ([1], {"frequency_penalty": 1e9}, ["frequency_penalty"]),
        ([1], {"logit_bias": {128: 1.0}}, ["logit_bias token 128"]),
        ([1], {"logit_bias": {1: float("nan")}}, ["logit_bias nan"]),
        ([1], {"stop_token_ids": (500,)}, ["stop_token_ids entry 500"]),
        ([1], {"logprobs": 129}, ["logprobs 129"]),
        ([1], {"min_tokens": 5, "max_tokens": 3}, ["min_tokens 5"]),
        ([1], {"seed": 2**70}, ["seed"]),
    ],
)
def test_bad_input_is_named_and_costs_nobody_else(
    adapter: Adapter, prompt: list[int], sampling: dict[str, object], words: list[str]
) -> None:
    run = Run(adapter)
    neighbour = run.submit(PROMPTS[0], 3)

    with pytest.raises((InvalidRequest, ContextTooLong)) as caught:
        run.engine.submit(prompt, Sampling(**sampling))  # type: ignore[arg-type]

    for word in words:
        assert word in str(caught.value)
    assert caught.value.param
    run.finish()
    assert len(neighbour.output) == 3


def test_max_tokens_defaults_to_the_rest_of_the_context(adapter: Adapter) -> None:
    run = Run(adapter)
    sequence = run.engine.submit([1] * 10, Sampling(temperature=0.0))

    assert sequence.max_tokens == adapter.context_length - 10


def test_timings_are_in_order(adapter: Adapter) -> None:
    run = Run(adapter)
    sequence = run.submit(PROMPTS[0], 3)
    run.finish()

    times = sequence.timings
    assert times.submitted <= times.admitted <= times.first_token <= times.finished  # type: ignore[operator]


def test_a_row_that_joins_holds_back_no_token_of_another(adapter: Adapter) -> None:
    run = Run(adapter, dataclasses.replace(SMALL, cache_bytes=1 << 24))
    run.submit(PROMPTS[0], 2)
    run.finish()
    talking = run.submit(PROMPTS[2], 30)
    while len(talking.output) < 2:
        run.turn()

    joining = run.submit(PROMPTS[0], 2)
    told = []
    while not joining.is_finished:
        before = len(talking.output)
        run.turn()
        told.append(len(talking.output) - before)

    assert set(told) == {1}
