"""An engine over prompts of any lengths in one forward, plain operations in place of CUDA's kernels: as alone, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from plain_prompts import PlainOperations
from test_cuda_layers import LLAMA, QWEN, PlainKernels, model_of

from driver import SMALL, Run, have_same_contents, random_prompts
from weft.engine.faults import InjectedFault
from weft.engine.prefix import RetainedCaches
from weft.engine.runner import Runner
from weft.engine.scheduler import Row
from weft.engine.sequence import Sequence
from weft.engine.warm_up import warm_up
from weft.kernels import block_product, cuda_layers, cuda_product, cuda_prompts
from weft.kernels.block_product import BLOCK, BlockProducts
from weft.kernels.ragged import RaggedLines
from weft.model import adapter as adapter_module
from weft.model import probe
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load

GROUPED = dataclasses.replace(SMALL, group_tokens=600, chunk_tokens=64, settle_first=False)
CACHED = dataclasses.replace(GROUPED, cache_bytes=1 << 30)
LENGTHS = (20, 31, 7, 90, 2, 20, 55)
PROMPTS = random_prompts(64, LENGTHS, seed=5)
TOKENS = 6
each_model = pytest.mark.parametrize("name", ["qwen3_5", "llama"])


@functools.cache
def adapter_of(name: str) -> Adapter:
    """A model on a CPU whose prompts are computed as on CUDA, in float32."""
    config = {"qwen3_5": QWEN, "llama": LLAMA}[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_product, "can_multiply", lambda *_: True)
        patch.setattr(block_product, "SIZES", (BLOCK, 2 * BLOCK))
        patch.setattr(adapter_module, "bind_blocks", lambda _: [])  # which are a CPU's own
        model = model_of(config, 16)
        cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
        loaded = LoadedModel(
            model=model, config=config, folder=Path(name), extra_tensors={}, eos_token_ids=(), context_length=512,
            vocab_size=64, weights_bytes=0,
        )  # fmt: skip
        adapter = Adapter(loaded, with_head=False, with_vision=False)
        adapter.use_ragged(cuda_prompts.bind(model, BlockProducts(PlainKernels.product), PlainOperations))
        adapter._examine(None)
    return adapter


@functools.cache
def solo(name: str) -> list[tuple[list[int], np.ndarray]]:
    found = []
    for prompt in PROMPTS:
        run = Run(adapter_of(name), keep_logits=True)
        sequence = run.submit(prompt, TOKENS)
        run.finish()
        found.append((sequence.output, run.logits_of(sequence)))
    return found


def forwards_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the chunks in every forward of prompts from now on, those of answers alone excepted."""
    solo(run.adapter.name)
    found: list[list[int]] = []
    together, alone = Adapter.prefill_together, Adapter.prefill

    def counted(adapter: Adapter, chunks: list[list[int]], *rest: Any) -> Any:
        found.append([len(chunk) for chunk in chunks])
        return together(adapter, chunks, *rest)

    def counted_alone(adapter: Adapter, tokens: list[int], *rest: Any) -> Any:
        found.append([len(tokens)])
        return alone(adapter, tokens, *rest)

    monkeypatch.setattr(Adapter, "prefill_together", counted)
    monkeypatch.setattr(Adapter, "prefill", counted_alone)
    return found


def check(run: Run, name: str, sequences: list[Sequence], numbers: list[int] | None = None) -> None:
    expected = [solo(name)[number] for number in numbers or range(len(PROMPTS))]
    for sequence, (tokens, logits) in zip(sequences, expected, strict=True):
        assert sequence.output == tokens
        assert np.array_equal(run.logits_of(sequence), logits)


@each_model
def test_the_trial_at_load_finds_that_prompts_are_exact_together_and_cut_anywhere(name: str) -> None:
    adapter = adapter_of(name)

    assert adapter.ragged is not None
    assert adapter.grouping == "exact"
    assert adapter.cuts_freely


@pytest.mark.parametrize("config", [GROUPED, CACHED], ids=["plain", "cached"])
@each_model
def test_prompts_of_different_lengths_that_come_together_have_their_own_bits(
    name: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(adapter_of(name), config, keep_logits=True)
    forwards = forwards_of(run, monkeypatch)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, name, sequences)
    assert len(forwards) <= 4
    assert len({*forwards[0]}) > 2


@each_model
def test_beside_a_row_that_decodes_they_are_computed_in_slices_and_have_their_own_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(GROUPED, group_tokens_beside=600)
    run = Run(adapter_of(name), config, keep_logits=True)
    neighbour = run.submit(PROMPTS[2], 60)
    while len(neighbour.output) < 2:
        run.turn()
    forwards, before = forwards_of(run, monkeypatch), len(neighbour.output)
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    while not any(sequence.output for sequence in sequences):
        run.turn()
    steps = len(neighbour.output) - before
    run.finish()

    check(run, name, sequences)
    assert sum(forwards[0]) > config.chunk_tokens
    assert steps >= 2  # it went on meanwhile


@each_model
def test_one_that_leaves_amid_a_forward_costs_the_others_nothing(name: str) -> None:
    run = Run(adapter_of(name), dataclasses.replace(CACHED, group_tokens_beside=600), keep_logits=True)
    run.submit(PROMPTS[2], 40)
    for _ in range(4):
        run.turn()
    leaving, *staying = [run.submit(PROMPTS[number], TOKENS) for number in (3, 0, 1)]
    while not leaving.is_amid_chunk:
        run.turn()
    run.turn()
    run.engine.cancel(leaving)
    again = run.submit(PROMPTS[3], TOKENS)
    run.finish()

    check(run, name, [*staying, again], [0, 1, 3])


@each_model
def test_a_prompt_that_continues_from_the_cache_has_its_own_bits_beside_new_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(adapter_of(name), CACHED, keep_logits=True)
    run.submit([*PROMPTS[3][:48], 1, 2, 3], 2)
    run.finish()
    forwards = forwards_of(run, monkeypatch)
    sequences = [run.submit(PROMPTS[number], TOKENS) for number in (3, 1, 6)]
    run.finish()

    check(run, name, sequences, [3, 1, 6])
    assert sequences[0].timings.cached_tokens > 0
    assert len(forwards[0]) > 1


def test_a_forward_that_does_not_find_what_the_model_finds_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("llama")
    ragged = adapter.ragged
    assert ragged is not None

    class Wrong(PlainOperations):
        @staticmethod
        def attend(queries: Any, *rest: Any) -> Any:
            return PlainOperations.attend(queries[::-1], *rest)

    monkeypatch.setattr(ragged, "operations", Wrong)
    assert "logits differ" in (probe.ragged_problem(adapter) or "")
    monkeypatch.setattr(ragged, "operations", None)
    assert "AttributeError" in (probe.ragged_problem(adapter) or "")
    monkeypatch.setattr(ragged, "operations", PlainOperations)
    assert probe.ragged_problem(adapter) is None


def test_log_probabilities_of_a_prompt_are_those_of_its_own_tokens() -> None:
    run = Run(adapter_of("llama"), GROUPED)
    sequences = [run.submit(prompt, 2, prompt_logprobs=0) for prompt in (PROMPTS[0], PROMPTS[1])]
    run.finish()

    assert [len(one.prompt_logprobs) for one in sequences] == [len(PROMPTS[0]) - 1, len(PROMPTS[1]) - 1]
    assert [one.token for one in sequences[0].prompt_logprobs] == PROMPTS[0][1:]


def test_warming_up_computes_prompts_alone_and_together_from_their_start_and_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    lines_of = RaggedLines.__init__

    def noted(lines: RaggedLines, chunks: list[list[int]], starts: list[int], *rest: Any) -> None:
        seen.append(([len(chunk) for chunk in chunks], list(starts)))
        lines_of(lines, chunks, starts, *rest)

    monkeypatch.setattr(RaggedLines, "__init__", noted)
    warm_up(adapter_of("qwen3_5"), dataclasses.replace(CACHED, max_rows=4))

    assert ([3], [0]) in seen  # a prompt's last token is decoded
    assert any(len(counts) > 1 and not any(starts) and len({*counts}) > 1 for counts, starts in seen)
    assert any(len(counts) > 1 and all(starts) for counts, starts in seen)
    assert any(len(counts) == 1 and starts[0] for counts, starts in seen)
    assert len(seen) < 30


def test_the_caches_of_a_row_computed_in_company_are_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(RetainedCaches, "keep", lambda _, node, *__: kept.append(node.length))
    run = Run(adapter_of("qwen3_5"), CACHED)
    for number in (0, 1):  # their states are parts of one array
        run.submit(PROMPTS[number], 2)
    run.finish()
    assert kept == []

    run.submit(PROMPTS[6], 2)
    run.finish()
    assert kept == [len(PROMPTS[6]) - 1]
    positional = Run(adapter_of("llama"), CACHED)
    for number in (0, 1):
        positional.submit(PROMPTS[number], 2)
    positional.finish()
    assert len(kept) == 3


def test_a_chunk_for_which_the_cache_has_no_room_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = Runner.save

    def noted(runner: Runner, row: Row) -> Any:
        saved.append(row.count)
        return save(runner, row)

    monkeypatch.setattr(Runner, "save", noted)
    adapter = adapter_of("qwen3_5")
    run = Run(adapter, dataclasses.replace(CACHED, cache_bytes=adapter.row_bytes(20)))
    for number in range(4):
        run.submit(PROMPTS[number], 2)
    run.finish()

    assert len(saved) == 1


@pytest.mark.parametrize("is_behind", [True, False])
def test_the_time_of_a_slice_begins_behind_the_step_beside_it(is_behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(adapter_of("qwen3_5"), dataclasses.replace(GROUPED, slices_behind_step=is_behind))
    neighbour = run.submit(PROMPTS[2], 60)
    while len(neighbour.output) < 2:
        run.turn()
    seen: list[str] = []
    wait, cut = Runner.wait, Runner._slice

    def noted_wait(runner: Runner, step: Any) -> None:
        seen.append("step")
        wait(runner, step)

    def noted_slice(runner: Runner, *rest: Any) -> None:
        seen.append("slice")
        cut(runner, *rest)

    monkeypatch.setattr(Runner, "wait", noted_wait)
    monkeypatch.setattr(Runner, "_slice", noted_slice)
    before = run.engine.scheduler.step_seconds
    run.submit(PROMPTS[3], 2)
    run.finish()

    assert "slice" in seen
    assert all((one == "step") == is_behind for one in seen[: seen.index("slice")])
    assert ("step" in seen) == is_behind
    assert run.engine.scheduler.step_seconds != before


def test_slices_follow_steps_that_become_longer_while_prompts_come() -> None:
    scheduler = Run(adapter_of("llama"), GROUPED).engine.scheduler
    scheduler.step_seconds = 0.005
    for _ in range(20):
        scheduler.measure_busy_step(0.030)
    assert 0.025 < scheduler.step_seconds <= 0.030

    scheduler.measure_busy_step(10.0)  # something else took long
    assert scheduler.step_seconds < 0.050


def test_a_step_beside_a_slice_and_the_slice_have_the_time_of_quiet_steps() -> None:
    config = dataclasses.replace(GROUPED, gap_factor=1.0)
    scheduler = Run(adapter_of("llama"), config).engine.scheduler
    for _ in range(60):
        scheduler.measure_step(0.004, 8)
    for _ in range(60):
        scheduler.measure_busy_step(0.006, 8)  # its host builds it while nothing is computed

    assert scheduler.step_seconds == pytest.approx(0.004, rel=0.01)
    assert 0.006 + scheduler._slice_seconds(None) == pytest.approx(2 * 0.004, rel=0.02)
    for _ in range(60):
        scheduler.measure_busy_step(0.016, 100)  # rows that nobody has seen quiet
    assert 0.016 + scheduler._slice_seconds(None) == pytest.approx(2 * 0.014, rel=0.02)
    scheduler.busy_seconds = 1.0
    assert scheduler._slice_seconds(None) > 0


def test_a_forward_s_layers_are_built_as_they_are_asked_for() -> None:
    adapter = adapter_of("qwen3_5")
    chunk = adapter.prefill_together([PROMPTS[0]], [adapter.new_caches(32)], [0])
    layers = len(adapter.model.layers)  # type: ignore[attr-defined]

    assert chunk.num_waiting == layers
    assert chunk.advance()
    assert chunk.num_waiting == layers - 1
    assert chunk.advance(is_ahead=True)
    assert chunk.num_waiting == layers - 3  # the one behind it was started
    assert chunk.advance(is_ahead=True) == (layers > 3)
    chunk.finish()
    assert chunk.is_done
    assert not chunk.num_waiting


@each_model
@pytest.mark.parametrize("is_ahead", [True, False])
def test_prompts_in_slices_have_their_bits_with_and_without_a_layer_ahead(name: str, is_ahead: bool) -> None:
    config = dataclasses.replace(GROUPED, group_tokens_beside=600, slices_behind_step=is_ahead)
    run = Run(adapter_of(name), config, keep_logits=True)
    neighbour = run.submit(PROMPTS[2], 60)
    while len(neighbour.output) < 2:
        run.turn()
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS]
    run.finish()

    check(run, name, sequences)


def test_a_row_that_can_not_enter_the_pool_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [solo("llama")[number][0] for number in (0, 2)]
    run = Run(adapter_of("llama"), GROUPED, expected=(InjectedFault, RuntimeError))
    sequences = [run.submit(prompt, TOKENS) for prompt in PROMPTS[:3]]
    allocate = type(run.engine.runner.pool).allocate_all

    def failing(pool: Any, new: Any, upcoming: Any = ()) -> None:
        if any(one.length == len(PROMPTS[1]) - 1 for one in new):
            raise RuntimeError("no room for that row")
        allocate(pool, new, upcoming)

    monkeypatch.setattr(type(run.engine.runner.pool), "allocate_all", failing)
    run.finish()

    assert [one.finish for one in sequences] == ["length", "error", "length"]
    assert [one.output for one in (sequences[0], sequences[2])] == expected


def test_an_mtp_head_reads_each_prompt_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_product, "can_multiply", lambda *_: True)
    monkeypatch.setattr(block_product, "SIZES", (BLOCK,))
    monkeypatch.setattr(adapter_module, "bind_blocks", lambda _: [])
    loaded = load(Path(adapter_module.__file__).parent / "tiny-hybrid")
    loaded.model.set_dtype(mx.float32)
    cuda_layers.bind_steps(loaded.model, PlainKernels, PlainKernels)
    adapter = Adapter(loaded, with_vision=False)
    assert adapter.head is not None
    adapter.ragged = cuda_prompts.bind(loaded.model, BlockProducts(PlainKernels.product), PlainOperations)
    prompts = [[5 + n for n in range(12)], [9 * n % 4000 for n in range(19)], [3, 4, 5]]
    rows = [adapter.new_caches(len(prompt)) for prompt in prompts]
    adapter.prefill_together(prompts, rows, [0] * len(prompts)).finish()

    for prompt, row in zip(prompts, rows, strict=True):
        alone = adapter.new_caches(len(prompt))
        adapter.prefill(prompt, alone)[0].finish()
        assert have_same_contents(adapter, row, alone)
