"""Layers that fail in earnest when they read one row's token: that row fails, whenever the device tells, and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import pytest

from driver import SMALL, Run, adapter_for, answers, random_prompts
from failing_layers import FAILURES, Place, failing, slow_zero, when_read
from weft.errors import InternalError
from weft.model.adapter import Adapter, Way

Where = Literal["amid the prompt", "at its end", "amid the answer"]

TOKENS = 10
GUILTY = 2
PROMPTS = random_prompts(128, [5, 21, 9, 37, 12], seed=8)
ERRORS = {
    "raise": (ValueError, "the layer can not compute this"),
    "host memory": (MemoryError, "Unable to allocate"),
    "evaluate": (RuntimeError, "LU factorization failed"),
    "evaluate late": (RuntimeError, "LU factorization failed"),
}
ORDERS: dict[str, dict[str, Any]] = {
    "settle-first": {"settle_first": True}, "overlapped": {"settle_first": False}, "plain": {"pipelined": False},
}  # fmt: skip
MODELS: list[tuple[str, Way | None, str]] = [
    ("llama", None, "settle-first"), ("llama", None, "overlapped"), ("llama", None, "plain"),
    ("qwen3_5", None, "settle-first"), ("gear", "alone", "settle-first"), ("gear", "alone", "overlapped"),
]  # fmt: skip


@dataclass
class Scene:
    """A model and an order; its undisturbed answers; a token that nobody has, and one that the guilty answer alone has."""

    adapter: Adapter
    order: str
    undisturbed: list[list[int]]
    unused: int
    late: int

    @classmethod
    def of(cls, folder: Path, way: Way | None, order: str) -> Scene:
        adapter = adapter_for(folder, way)
        undisturbed = answers(adapter, PROMPTS, TOKENS)
        answer = undisturbed[GUILTY]
        used = {token for tokens in (*PROMPTS, *undisturbed[:GUILTY], *undisturbed[GUILTY + 1 :]) for token in tokens}
        late = next(token for token in answer[3:-1] if token not in {*used, *answer[:3]})
        return cls(adapter, order, undisturbed, min({*range(128)} - used - {*answer}), late)

    def guilty(self, where: Where) -> tuple[int, list[int]]:
        """The token that fails, and a prompt that comes upon it there."""
        prompt, token = PROMPTS[GUILTY], self.unused
        prompts = {"amid the prompt": [*prompt[:4], token, *prompt[4:]], "at its end": [*prompt, token]}
        return (token, prompts[where]) if where in prompts else (self.late, prompt)

    def run(self, *expected: type[Exception]) -> Run:
        return Run(self.adapter, replace(SMALL, cache_bytes=1 << 20, **ORDERS[self.order]), expected=expected)

    def started(self, prompt: list[int], expected: type[Exception], num_tokens: int = TOKENS) -> tuple[Run, list[Any]]:
        """All prompts, this one in the place of the guilty one."""
        run = self.run(expected)
        asked = [(prompt, num_tokens) if place == GUILTY else (one, TOKENS) for place, one in enumerate(PROMPTS)]
        return run, [run.submit(*one) for one in asked]


@pytest.fixture(scope="module", params=MODELS, ids=lambda one: f"{one[0]} {one[2]}")
def scene(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Scene:
    name, way, order = request.param
    return Scene.of(checkpoint(name), way, order)


def others(answers: list[Any]) -> list[Any]:
    return [answer for place, answer in enumerate(answers) if place != GUILTY]


@pytest.mark.parametrize(
    ("what", "place", "where"),
    [
        ("raise", "first", "amid the prompt"),
        ("raise", "last", "amid the answer"),
        ("host memory", "first", "at its end"),
        ("evaluate", "first", "amid the prompt"),
        ("evaluate", "last", "at its end"),
        ("evaluate late", "last", "amid the answer"),
    ],
)
def test_exactly_the_guilty_row_fails(scene: Scene, what: str, place: Place, where: Where) -> None:
    token, prompt = scene.guilty(where)
    with failing(scene.adapter.model, token, FAILURES[what], place):
        run, rows = scene.started(prompt, ERRORS[what][0])
        run.finish()

    assert rows[GUILTY].finish == "error"
    assert ERRORS[what][1] in rows[GUILTY].error
    assert token not in rows[GUILTY].output[:-1]  # what it said before, and nothing that was made of it
    assert rows[GUILTY].output == scene.undisturbed[GUILTY][: len(rows[GUILTY].output)]
    assert others([row.output for row in rows]) == others(scene.undisturbed)
    tree = run.engine.prefix.tree
    assert tree is None or not any(scene.unused in node.tokens for node in tree.nodes())


def test_a_row_whose_last_token_fails_is_found_at_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    token, prompt = scene.guilty("at its end")
    run = scene.run(RuntimeError)
    with failing(scene.adapter.model, token, FAILURES["evaluate late"], "last"):
        innocent, guilty = run.submit(PROMPTS[0], TOKENS), run.submit(prompt, 1)  # of which no further step is planned
        run.finish()

    assert guilty.finish == "error"
    assert innocent.output == scene.undisturbed[0]
    assert sum("tried again in parts" in record.message for record in caplog.records) <= 2  # together, and alone


def test_the_error_of_a_step_that_is_given_up_meets_nobody(scene: Scene) -> None:
    token, prompt = scene.guilty("amid the answer")
    run = scene.run(ValueError, RuntimeError)
    num_doomed = 0  # steps with the token

    def fail(output: mx.array, tokens: mx.array, token: int) -> mx.array:
        nonlocal num_doomed
        if num_doomed == 1 and not run.engine.bisection.groups:  # built while the first of them is on its way
            num_doomed += 1
            raise ValueError("before the device has failed")
        if (tokens == token).any().item():
            num_doomed += 1
            output += slow_zero(1 << 22)
        return FAILURES["evaluate"](output, tokens, token)

    with failing(scene.adapter.model, token, fail, "last"):
        innocent, guilty = run.submit(PROMPTS[0], TOKENS), run.submit(prompt, TOKENS)
        run.finish()

    assert guilty.finish == "error"
    assert innocent.output == scene.undisturbed[0]


def test_a_step_that_fails_for_a_crowd_only_costs_nobody_an_answer(scene: Scene) -> None:
    def fail(output: mx.array, tokens: mx.array, _: int) -> mx.array:
        return FAILURES["evaluate"](output, mx.zeros_like(tokens), 0) if tokens.shape[0] > 2 else output

    with failing(scene.adapter.model, 0, fail, "last"):
        run, rows = scene.started(PROMPTS[GUILTY], RuntimeError)
        run.finish()

    assert [row.output for row in rows] == scene.undisturbed


@pytest.mark.parametrize("where", ["amid the prompt", "amid the answer"])
def test_a_lost_rank_ends_the_engine_and_not_the_row_that_met_it(scene: Scene, where: Where) -> None:
    token, prompt = scene.guilty(where)

    def lose() -> float:
        raise RuntimeError("[ring] connection to a peer was lost")

    with failing(scene.adapter.model, token, when_read(lose), "last"):
        run, rows = scene.started(prompt, RuntimeError)
        with pytest.raises(InternalError, match="another rank of the engine is gone"):
            run.finish()

    assert not any(row.finish == "error" for row in rows)
