"""Warming up computes steps of few and many rows, and prompts of many lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from driver import SMALL, adapter_for
from weft.engine.runner import Runner
from weft.engine.scheduler import Plan, Row
from weft.engine.warm_up import warm_up


def test_steps_of_one_and_of_all_rows_and_prompts_of_many_lengths_are_computed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_for(checkpoint("qwen3_5"))
    adapter.decodes_like_prefill = False  # as on CUDA: tokens of a row that died are replayed in steps
    rows: set[int] = set()
    step_tokens: set[int] = set()
    lengths: set[int] = set()
    forward, prefill = Runner.forward, Runner.prefill

    def counted_forward(runner: Runner, plan: Plan, last: object) -> object:
        rows.add(len(plan.steps))
        step_tokens.add(plan.step_tokens)
        return forward(runner, plan, last)  # type: ignore[arg-type]

    def counted_prefill(runner: Runner, row: Row, *given: Any, **named: Any) -> list[Row]:
        lengths.add(row.count)
        return prefill(runner, row, *given, **named)

    monkeypatch.setattr(Runner, "forward", counted_forward)
    monkeypatch.setattr(Runner, "prefill", counted_prefill)
    warm_up(adapter, dataclasses.replace(SMALL, max_rows=6))

    assert rows >= {1, 6}
    assert 1 in step_tokens
    assert max(step_tokens) > 1
    assert len(lengths) > 4
