"""The promise, for every architecture of the zoo: a row's tokens and logits do not depend on who else runs.

Each model is a tiny random checkpoint saved to disk and brought up by the real loader. The first referee is mlx-lm's own
single-stream loop; after that our own solo run. The longer tests look at some of the zoo only, `make conformance` at all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from driver import SMALL, Clock, Run, answers, random_prompts, stock_mlx_lm
from thoroughness import ALL
from weft.config import EngineConfig
from weft.grammar.compiler import Compiler
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec, Submit
from weft.model.adapter import Adapter
from zoo import EXAMINED, HOUSED, VOCABULARY, greedy

Build = Callable[[str], Adapter]
each_architecture = pytest.mark.parametrize("name", HOUSED)
each_examined = pytest.mark.parametrize("name", EXAMINED)

SUBJECTS = random_prompts(VOCABULARY, (21, 7, 40), seed=1)
NEIGHBOURS = random_prompts(VOCABULARY, (33, 1, 60, 2, 18, 5, 27), seed=2)
TOKENS = 26 if ALL else 18  # with a window of 12, crossed more than once


# A vocabulary of the zoo's size: an end token, what can be printed, and pairs of letters.
LETTERS = ["<end>", *map(chr, range(0x21, 0x7F)), " ", "\n", *(first + second for first in "abcdef" for second in "ghijk"), "xy"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    assert len(LETTERS) == VOCABULARY
    vocabulary = {text.replace(" ", "Ġ").replace("\n", "Ċ"): number for number, text in enumerate(LETTERS)}
    merges = [[text[0], text[1]] for text in LETTERS if len(text) == 2]
    end = {"id": 0, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    bytes_as_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    written = {
        "version": "1.0",
        "added_tokens": [{**end, "normalized": False}],
        "pre_tokenizer": bytes_as_letters,
        "decoder": bytes_as_letters,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    path.write_text(json.dumps(written))
    return Compiler(path, VOCABULARY, (0,))


@pytest.fixture(scope="module")
def solo(build: Build) -> Callable[[str], list[tuple[list[int], np.ndarray]]]:
    """A function from a name to what each of SUBJECTS answers alone, with logits."""
    return functools.cache(lambda name: [_solo(build(name), prompt) for prompt in SUBJECTS])


def _solo(adapter: Adapter, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    run = Run(adapter, keep_logits=True)
    sequence = run.submit(prompt, TOKENS)
    run.finish()
    return sequence.output, run.logits_of(sequence)


Solo = Callable[[str], list[tuple[list[int], np.ndarray]]]


@each_architecture
def test_alone_equals_mlx_lm(build: Build, solo: Solo, name: str) -> None:
    model = build(name).model

    with stock_mlx_lm(model):
        expected = [greedy(model, prompt, TOKENS) for prompt in SUBJECTS]  # type: ignore[arg-type]

    for (tokens, logits), (their_tokens, their_logits) in zip(solo(name), expected, strict=True):
        assert tokens == their_tokens
        spread = float(np.std(np.array(their_logits)))
        assert np.abs(logits - np.array(their_logits)).max() < 1e-3 * spread


# As an engine is served: with a prefix cache, and boundaries that the front finds in a prompt. And in the order of a GPU, where a
# step is settled while the next one runs.
SERVED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
OVERLAPPED = dataclasses.replace(SERVED, settle_first=False)
ON_A_GPU = dataclasses.replace(OVERLAPPED, group_tokens=48)  # and prompts in one forward
SOME = ["llama", "qwen3_5", "gemma3_text", "deepseek_v3", "falcon_h1", "gpt_oss"]


@pytest.mark.parametrize(
    ("name", "others", "config"),
    [
        *((name, 1, SMALL) for name in EXAMINED),
        *((name, 3, OVERLAPPED) for name in EXAMINED),
        *((name, 7, SERVED) for name in HOUSED),
    ],
    ids=lambda value: (
        "-".join(["cached"] * bool(value.cache_bytes) + ["overlapped"] * (not value.settle_first)) or "plain"
        if isinstance(value, EngineConfig)
        else None
    ),
)
def test_neighbours_change_neither_tokens_nor_a_single_bit_of_the_logits(
    build: Build, solo: Solo, name: str, others: int, config: EngineConfig
) -> None:
    run = Run(build(name), config, keep_logits=True)
    for index, prompt in enumerate(NEIGHBOURS[:others]):
        run.submit(SUBJECTS[0][: 5 * index] + prompt, 1 + 3 * index)  # they begin alike, and leave one after the other
    greedy_choice = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (subject,) = run.engine.submit_all(Submit((900,), SUBJECTS[0], (greedy_choice,), boundaries=(4, 9, 17)))
    run.finish()

    tokens, logits = solo(name)[0]
    assert subject.output == tokens
    assert np.array_equal(run.logits_of(subject), logits)
    assert run.engine.runner.num_alone["geometry"] == 0  # rows have the shape that was read off the model at load


@each_examined
def test_joining_in_mid_stream_changes_nobody(build: Build, solo: Solo, name: str) -> None:
    run = Run(build(name), keep_logits=True)
    first = run.submit(SUBJECTS[0], TOKENS)
    while len(first.output) < 5:
        run.turn()
    second = run.submit(SUBJECTS[1], TOKENS)
    while len(second.output) < 4:
        run.turn()
    third = run.submit(SUBJECTS[2], TOKENS)
    run.finish()

    for sequence, (tokens, logits) in zip((first, second, third), solo(name), strict=True):
        assert sequence.output == tokens
        assert np.array_equal(run.logits_of(sequence), logits)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "falcon_h1"])
def test_joining_after_any_number_of_steps_changes_nobody(build: Build, solo: Solo, name: str) -> None:
    at_once = dataclasses.replace(SMALL, chunk_tokens=64, unsliced_tokens=64)  # a prompt is computed before the next step
    joined_after = set()
    for turns in range(10):
        run = Run(build(name), at_once)
        first, second = (run.submit(prompt, TOKENS) for prompt in SUBJECTS[:2])
        for _ in range(turns):
            run.turn()
        third = run.submit(SUBJECTS[2], TOKENS)
        while not third.output:
            run.turn()
        joined_after.add(len(first.output) - 1)
        run.finish()

        assert [one.output for one in (first, second, third)] == [tokens for tokens, _ in solo(name)], turns
    assert any({*range(least, least + 9)} <= joined_after for least in (0, 1))  # the first token may need no step


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, SMALL) for name in EXAMINED), *((name, ON_A_GPU) for name in (EXAMINED if ALL else SOME))],
    ids=lambda value: ("plain" if value.settle_first else "overlapped") if isinstance(value, EngineConfig) else None,
)
def test_fifty_random_joins_and_leaves_change_nobody(build: Build, solo: Solo, name: str, config: EngineConfig) -> None:
    rng = np.random.default_rng(3)
    run = Run(build(name), config)
    live, done, events = [], [], 0
    while events < 50:
        if len(live) < 6 and rng.random() < 0.6:
            which = int(rng.integers(len(SUBJECTS)))
            live.append((which, run.submit(SUBJECTS[which], int(rng.integers(2, TOKENS + 1)))))
            events += 1
        elif live and rng.random() < 0.3:
            run.engine.cancel(live[int(rng.integers(len(live)))][1])
        for _ in range(int(rng.integers(1, 4))):
            run.turn()
        left = [entry for entry in live if entry[1].is_finished]
        done += left
        events += len(left)
        live = [entry for entry in live if not entry[1].is_finished]
    run.finish()

    assert len(done) >= 15
    for which, sequence in done + live:
        assert sequence.output == solo(name)[which][0][: len(sequence.output)]
    assert sum(len(sequence.output) for _, sequence in done + live) > 100


@each_examined
def test_chunked_prefill_gives_the_tokens_of_a_whole_one(build: Build, solo: Solo, name: str) -> None:
    chunked = [tokens[:8] for tokens, _ in solo(name)]

    for chunk_tokens in (5, 4096):
        assert answers(build(name), SUBJECTS, 8, dataclasses.replace(SMALL, chunk_tokens=chunk_tokens)) == chunked


@each_examined
def test_interrupting_a_prefill_at_every_layer_changes_no_bit(build: Build, solo: Solo, name: str) -> None:
    run = Run(build(name), keep_logits=True, clock=Clock())  # time stands still: a chunk is never interrupted
    neighbour = run.submit(NEIGHBOURS[0], 40)
    while len(neighbour.output) < 2:
        run.turn()
    subject = run.submit(SUBJECTS[2], TOKENS)
    run.finish()

    tokens, logits = solo(name)[2]
    assert subject.output == tokens
    assert np.array_equal(run.logits_of(subject), logits)


@each_examined
def test_pipelined_turns_give_the_tokens_of_plain_ones(build: Build, solo: Solo, name: str) -> None:
    """Also where a step is settled while the next one runs, as on GPUs."""
    for config in (dataclasses.replace(SMALL, pipelined=False), dataclasses.replace(SMALL, settle_first=False)):
        assert answers(build(name), SUBJECTS, TOKENS, config) == [tokens for tokens, _ in solo(name)]


@each_examined
def test_a_constrained_row_is_the_same_alone_and_among_others_in_the_order_of_a_gpu(
    build: Build, compiler: Compiler, name: str
) -> None:
    spec = ConstraintSpec(GrammarSpec("regex", "([a-f][0-9]+[ ]){3}[g-z]{4,9}"))
    chosen = Sampling(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)

    def answer(config: EngineConfig, others: int) -> tuple[list[int], np.ndarray]:
        run = Run(build(name), config, keep_logits=True)
        for index, prompt in enumerate(NEIGHBOURS[:others]):
            other = compiler.constraint(ConstraintSpec(GrammarSpec("regex", "[A-Z]{20}"))) if index % 2 else None
            run.engine.submit(prompt, Sampling(temperature=0.7, seed=index, max_tokens=6 + 4 * index, ignore_eos=True), other)
        request = Submit((900,), SUBJECTS[1], (chosen,), boundaries=(3,))
        (subject,) = run.engine.submit_all(request, compiler.constraint(spec))
        run.finish()
        assert subject.finish in ("stop", "length"), subject.ending
        return subject.output, run.logits_of(subject)

    (tokens, logits), (among, its_logits) = answer(dataclasses.replace(SMALL, pipelined=False), 0), answer(ON_A_GPU, 5)
    text = "".join(map(LETTERS.__getitem__, tokens))
    assert re.fullmatch("([a-f][0-9]+[ ]){3}[g-z]{4,9}", text) or len(tokens) == 40, text
    assert among == tokens
    assert np.array_equal(its_logits, logits)


@each_examined
def test_every_other_way_of_holding_a_row_gives_the_same_tokens(build: Build, solo: Solo, name: str) -> None:
    adapter = build(name)
    kept = adapter.way

    try:
        for way in {"seam", "plain", "alone"} - adapter.refused.keys() - {kept}:
            adapter.way = way  # type: ignore[assignment]
            assert answers(adapter, SUBJECTS, 14) == [tokens[:14] for tokens, _ in solo(name)], way
    finally:
        adapter.way = kept


@each_examined
def test_at_a_constant_width_no_bit_depends_on_the_crowd(build: Build, name: str) -> None:
    exact = dataclasses.replace(SMALL, width=8)

    def logits_beside(others: int) -> np.ndarray:
        run = Run(build(name), exact, keep_logits=True)
        subject = run.submit(SUBJECTS[1], 12)
        for index, prompt in enumerate(NEIGHBOURS[:others]):
            run.submit(prompt, 2 + 3 * index)
        run.finish()
        return run.logits_of(subject)

    assert np.array_equal(logits_beside(0), logits_beside(5))


@each_examined
def test_forks_of_a_prompt_answer_as_if_each_had_computed_it(build: Build, solo: Solo, name: str) -> None:
    run = Run(build(name))
    run.submit(NEIGHBOURS[0], 12)
    forks = run.engine.submit_all(
        Submit((90, 91, 92), SUBJECTS[0], (Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),) * 3)
    )
    run.finish()

    assert [fork.output for fork in forks] == [solo(name)[0][0]] * 3
