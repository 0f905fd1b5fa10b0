"""Decode steps that are weft's own operations: which models have them, whose memory they change, and what they leave behind.

That tokens and bits are those of the layers' own code is shown at load (`model/probe.py`) and, for every architecture, by
`oracle/test_speculated_is_plain.py`, whose overlapped engines compute layer by layer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import scripted
from driver import SMALL, Run, answers, random_prompts
from weft.engine.faults import InjectedFault
from weft.engine.order import OverlappedOrder, PlainOrder, SettleFirstOrder
from weft.engine.runner import Step
from weft.kernels.fused_model import FusedModel, FusedStep, StepRows
from weft.memory.slabs import RowState, StateTable
from weft.model.adapter import Adapter
from weft.model.probe import Probe

Build = Callable[[str], Adapter]
PROMPTS = random_prompts(128, (21, 7, 40, 13, 9), seed=4)
TOKENS = 24
FUSED = ["llama", "qwen3", "qwen3_5"]


@pytest.fixture(params=FUSED)
def adapter(request: pytest.FixtureRequest, build: Build) -> Adapter:
    found = build(request.param)
    if found.fused is None:
        pytest.skip("needs weft's own operations")
    return found


def layer_by_layer(adapter: Adapter) -> Adapter:
    other = copy.copy(adapter)
    other.fused = None
    return other


def test_models_of_other_parts_are_computed_layer_by_layer(build: Build) -> None:
    if build("llama").fused is None:
        pytest.skip("needs weft's own operations")

    assert [name for name in ("qwen3_moe", "gemma3_text", "mamba2", "gpt2") if build(name).fused is not None] == []


def test_every_kind_of_row_has_the_bits_of_the_layers_own_code(adapter: Adapter) -> None:
    """With drafts and without, joining and leaving, alone in a step and beside others."""
    right = answers(adapter, PROMPTS, TOKENS)
    scripts = [scripted.always_right, scripted.always_wrong, scripted.right_then_wrong, scripted.now_and_then]
    logits, outputs = [], []
    for one in (adapter, layer_by_layer(adapter)):
        run = Run(one, keep_logits=True)
        scripted.add_drafts(run, right, scripts)
        rows = [run.submit(prompt, TOKENS - 3 * number) for number, prompt in enumerate(PROMPTS)]
        run.finish()
        outputs.append([row.output for row in rows])
        logits.append([run.logits_of(row) for row in rows])

    assert outputs[0] == outputs[1]
    assert all(np.array_equal(one, other) for one, other in zip(*logits, strict=True))


def test_rows_without_a_draft_have_one_line_beside_rows_with_one(adapter: Adapter) -> None:
    right = answers(adapter, PROMPTS, TOKENS)
    run = Run(adapter)
    scripted.add_drafts(run, right, [scripted.always_right])
    lines: list[tuple[int, int]] = []
    follow = run.engine.runner.follow

    def noted(step: Step, count: int) -> bool:
        assert step.fused is not None
        lines.append((len(step.lines), len(step.sequences) + sum(map(len, step.drafts.values()))))
        return follow(step, count)

    run.engine.runner.follow = noted  # type: ignore[method-assign]
    for prompt in PROMPTS:
        run.submit(prompt, TOKENS)
    run.finish()

    assert len(lines) > 2
    assert all(found == wanted for found, wanted in lines)
    assert any(found > 8 for found, _ in lines)


def test_a_row_that_moves_to_a_larger_slab_moves_no_recurrent_states(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(build("qwen3_5"))
    if run.adapter.fused is None:
        pytest.skip("needs weft's own operations")
    rows = [run.submit(prompt, 60) for prompt in PROMPTS[:2]]
    while not all(row.output for row in rows):
        run.turn()
    laid: list[list[RowState | None]] = []
    lay = StateTable._sources
    monkeypatch.setattr(StateTable, "_sources", lambda table, wanted: (laid.append(wanted), lay(table, wanted))[1])
    states = [row.memory.state for row in rows]
    capacities = set()
    while not any(row.is_finished for row in rows):
        capacities.add(tuple(run.engine.runner.pool.capacity_of(state) for state in states))
        run.turn()

    assert len(capacities) > 2  # both moved, one after the other
    assert laid == []


def test_a_model_is_asked_itself_as_soon_as_one_of_its_modules_is_changed(adapter: Adapter) -> None:
    norm = next(module for module, _ in adapter.fused.made_of if isinstance(module, nn.RMSNorm))  # type: ignore[union-attr]
    own = type(norm)

    class Doubling(own):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) * 2  # type: ignore[no-any-return]

    before = answers(adapter, PROMPTS[:1], TOKENS)
    norm.__class__ = Doubling
    try:
        run = Run(adapter, keep_logits=True)
        row = run.submit(PROMPTS[0], 4)
        run.finish()
        doubled = run.logits_of(row)
    finally:
        norm.__class__ = own
    run = Run(adapter, keep_logits=True)
    row = run.submit(PROMPTS[0], 4)
    run.finish()

    assert not np.array_equal(doubled, run.logits_of(row))
    assert answers(adapter, PROMPTS[:1], TOKENS) == before


def test_a_model_whose_logits_differ_is_computed_layer_by_layer(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(self: FusedModel, *given: Any, **named: Any) -> FusedStep:
        step = decode(self, *given, **named)
        return dataclasses.replace(step, logits=step.logits + 1e-6)

    decode = FusedModel.decode
    probe = Probe(adapter)
    assert probe.find_leak() is None
    assert probe.find_difference("seam") is None
    assert probe.try_fused() is not None
    monkeypatch.setattr(FusedModel, "decode", spoiled)

    assert probe.try_fused() is None


def test_a_model_whose_rows_keep_other_states_than_they_should_is_computed_layer_by_layer(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = build("qwen3_5")
    if adapter.fused is None:
        pytest.skip("needs weft's own operations")
    monkeypatch.setattr(FusedStep, "keep", lambda *_: (mx.zeros(1), []))
    probe = Probe(adapter)
    assert probe.find_leak() is None
    assert probe.find_difference("seam") is None

    assert probe.try_fused() is None


def test_memory_that_others_hold_is_not_changed(adapter: Adapter) -> None:
    run = Run(adapter)
    row = run.submit(PROMPTS[0], TOKENS)
    while len(row.output) < 3:
        run.turn()
    pool = run.engine.runner.pool
    held = [array for one in pool.slabs[0].layers.values() for array in (one.keys, one.values)] + pool.states()
    copies = [np.array(array) for array in held]
    run.finish()

    assert all(np.array_equal(np.array(array), own) for array, own in zip(held, copies, strict=True))
    assert row.output == answers(adapter, PROMPTS[:1], TOKENS)[0]


def test_memory_that_nobody_else_holds_is_changed_in_place(adapter: Adapter) -> None:
    run = Run(adapter)
    row = run.submit(PROMPTS[0], TOKENS)
    while len(row.output) < 3:
        run.turn()

    def places() -> set[int]:
        """Where the keys are."""
        held = run.engine.runner.pool.slabs[0].layers.values()
        return {np.array(one.keys, copy=False).__array_interface__["data"][0] for one in held}

    before = places()
    run.turn()

    assert places() == before


def test_what_lies_behind_a_rows_tokens_is_never_read(adapter: Adapter) -> None:
    right = answers(adapter, PROMPTS, TOKENS)
    run = Run(adapter)
    scripted.add_drafts(run, right, [scripted.right_then_wrong] * len(PROMPTS))
    keep = run.engine.runner.keep

    def spoiling(*given: Any) -> None:
        keep(*given)
        for slab in run.engine.runner.pool.slabs:
            for state in slab.occupied:
                for held in slab.layers.values():
                    for array in (held.keys, held.values):
                        array[state.slot, :, state.length :] = mx.nan

    run.engine.runner.keep = spoiling  # type: ignore[method-assign]
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    assert [row.output for row in rows] == right
    assert not any(row.is_preempted for row in rows)
    assert run.engine.speculation.counts.num_accepted > 10


def test_a_step_that_fails_when_all_states_are_written_is_undone(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    right = answers(adapter, PROMPTS, TOKENS)
    decode, strikes = FusedModel.decode, iter([False] * 4 + [True])

    def broken(self: FusedModel, rows: StepRows, tokens: mx.array, known: list[int], drafts: Any, **named: Any) -> FusedStep:
        step = decode(self, rows, tokens, known, drafts, **named)
        if next(strikes, False):
            raise InjectedFault("behind the step")
        return step

    monkeypatch.setattr(FusedModel, "decode", broken)
    run = Run(adapter)
    scripted.add_drafts(run, right, [scripted.always_right] * len(PROMPTS))
    rows = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    assert next(strikes, None) is None
    assert [row.output for row in rows] == right


def test_steps_that_overlap_are_computed_layer_by_layer(adapter: Adapter) -> None:
    def order_of(one: Adapter, **settings: bool) -> type[PlainOrder]:
        return type(Run(one, dataclasses.replace(SMALL, **settings)).engine.order)

    assert order_of(adapter) is PlainOrder
    assert order_of(adapter, settle_first=False) is OverlappedOrder
    assert not Run(adapter, dataclasses.replace(SMALL, settle_first=False)).engine.runner.has_fused_steps
    assert order_of(layer_by_layer(adapter)) is SettleFirstOrder
