"""Memory stays flat: what rows held is given back, and no graph grows behind the loop."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from driver import SMALL, Run, adapter_for, random_prompts
from thoroughness import ALL

STEPS = 10_000 if ALL else 600


def _active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def test_memory_and_graph_stay_flat_while_a_row_grows(checkpoint: Callable[[str], Path]) -> None:
    run = Run(adapter_for(checkpoint("qwen3_5")), SMALL)
    rows = [run.submit(prompt, 700) for prompt in random_prompts(128, (3, 20))]
    beside: list[int] = []  # what is held apart from the rows' own slabs and tables
    while not all(row.is_finished for row in rows):
        run.turn()
        if min(len(row.output) for row in rows) in (100, 350, 600):
            beside.append(_active() - run.engine.runner.pool.bytes_held)

    assert len(beside) >= 3
    assert max(beside) - min(beside) < 100_000


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "gemma3n"])
def test_memory_returns_to_its_start_after_many_steps(checkpoint: Callable[[str], Path], name: str) -> None:
    adapter = adapter_for(checkpoint(name))
    prompts = random_prompts(adapter.vocab_size, (1, 5, 30, 60))
    rng = np.random.default_rng(1)

    def churn(steps: int) -> None:
        run = Run(adapter, SMALL)
        for step in range(steps):
            if len(run.engine.scheduler.running) < 4 and rng.random() < 0.2:
                run.submit(prompts[int(rng.integers(4))], int(rng.integers(1, 80)))
            if rng.random() < 0.01 and run.engine.scheduler.running:
                run.engine.cancel(run.engine.scheduler.running[0])
            run.turn()
            if step % 1000 == 0:
                run.engine.take_events()
        run.finish()

    churn(50)  # whatever is made once is made here
    start = _active()
    churn(STEPS)

    assert _active() <= start * 1.01


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_no_array_waits_for_the_cycle_collector(checkpoint: Callable[[str], Path], name: str) -> None:
    run = Run(adapter_for(checkpoint(name)), replace(SMALL, cache_bytes=1 << 20))

    def churn() -> None:
        rows = [run.submit(prompt, 20) for prompt in random_prompts(128, (1, 5, 30, 60))]
        for _ in range(10):
            run.turn()
        run.engine.cancel(rows[-1])
        run.finish()

    churn()  # whatever is made once is made here
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        churn()
        gc.collect()
        held = [one for one in gc.garbage if isinstance(one, mx.array)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()

    assert held == []


def test_no_step_waits_while_the_allocator_is_emptied(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps freed memory for the next step, up to a limit of its own; giving it back all the time would stall the rows."""
    calls: list[str] = []
    for name in ("clear_cache", "set_cache_limit", "synchronize"):
        monkeypatch.setattr(mx, name, lambda *_, name=name: calls.append(name))
    run = Run(adapter_for(checkpoint("qwen3_5")), replace(SMALL, cache_bytes=1 << 20))
    rows = [run.submit(prompt, 150) for prompt in random_prompts(128, (3, 20))]
    run.finish()

    assert [len(row.output) for row in rows] == [150, 150]
    assert calls == []
