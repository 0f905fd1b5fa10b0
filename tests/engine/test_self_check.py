"""The checks of `weft doctor --check` are green on a sound engine, and each finds an engine that breaks its promise."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from driver import SMALL, adapter_for, random_prompts
from weft.config import DRAFT_SOURCES
from weft.engine import runner
from weft.engine.self_check import Answer, Comparison, NotChecked, SelfCheck, Speeds, compare
from weft.model.adapter import Adapter
from weft.model.saved_state import LayerCaches, leaves
from zoo import VOCABULARY

CONFIG = dataclasses.replace(SMALL, chunk_tokens=64, speculate=DRAFT_SOURCES)
SHARED = 31


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


def check_of(adapter: Adapter, **config: Any) -> SelfCheck:
    first, second, *others = random_prompts(VOCABULARY, (50, 12, 7, 24), seed=5)
    prompts = [first, [*first[:SHARED], *second], *others]
    return SelfCheck(adapter, dataclasses.replace(CONFIG, **config), prompts, SHARED)


def with_decode(adapter: Adapter, change: Callable[[mx.array, mx.array], mx.array]) -> Adapter:
    """The same model, with a change of each step's logits by the step's tokens (B, T)."""
    changed = copy.copy(adapter)
    changed.fused = None  # so that steps are asked for here

    def decode(tokens: mx.array, batch: Any) -> mx.array:
        return change(adapter.decode(tokens, batch), tokens)

    changed.decode = decode  # type: ignore[method-assign]
    return changed


def leak(logits: mx.array, _: mx.array) -> mx.array:
    """A little of every row in all others."""
    return logits if logits.shape[0] == 1 else logits + 1e-3 * mx.mean(logits, axis=0, keepdims=True)


def found(check: SelfCheck) -> dict[str, bool]:
    return {what: run().is_equal for what, run in check.checks.items()}


def test_a_sound_engine_is_equal_in_every_way_and_promises_it(adapter: Adapter) -> None:
    comparisons = {what: run() for what, run in check_of(adapter).checks.items()}

    assert {what: str(one).partition(",")[0] for what, one in comparisons.items()} == {
        "batched": "= alone", "cached": "= cold", "chunked": "= whole", "drafted": "= plain", "resumed": "= uninterrupted",
    }  # fmt: skip
    assert all(one.is_promised for one in comparisons.values())
    assert comparisons["cached"].note == f"49 of 50 and {SHARED} of 43 prompt tokens were cached"
    accepted, drafted = (int(word) for word in comparisons["drafted"].note.split() if word.isdigit())
    assert 0 < accepted < drafted  # right ones and wrong ones


def test_an_engine_that_lets_rows_leak_into_each_other_is_found(adapter: Adapter) -> None:
    found = check_of(with_decode(adapter, leak)).check_batched()

    assert found.is_promised
    assert str(found).startswith("≠ alone: bits of logits differ from token 0 on")


def test_the_first_difference_of_all_answers_is_named() -> None:
    wanted = [Answer([1, 2, 3, 4], [b"a", b"b", b"c", b"d"])] * 2
    answers = [Answer([1, 2, 3, 5], [b"a", b"b", b"C", b"D"]), Answer([1, 2, 3, 4], [b"a", b"B", b"c", b"d"])]

    found = compare(answers, wanted, Comparison("alone", is_promised=True, note="two rows"), first=10)

    assert (found.bits_at, found.token_at) == (11, 13)
    assert str(found) == "≠ alone: bits of logits differ from token 11 on, tokens differ from token 13 on; two rows"


def test_an_engine_that_restores_other_states_than_it_saved_is_found(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = runner.restore

    def restored(*given: Any) -> LayerCaches:
        caches = restore(*given)
        for cache in leaves(caches):
            if getattr(cache, "keys", None) is not None:
                cache.keys = cache.keys * 1.01
        return caches

    monkeypatch.setattr(runner, "restore", restored)

    equal = found(check_of(adapter))

    assert [what for what, is_equal in equal.items() if not is_equal] == ["cached"]


def test_an_engine_whose_steps_of_several_tokens_are_other_ones_is_found(adapter: Adapter) -> None:
    changed = with_decode(adapter, lambda logits, tokens: logits * 1.001 if tokens.shape[1] > 1 else logits)

    assert not check_of(changed).check_drafted().is_equal
    assert check_of(changed).check_batched().is_equal


def test_what_is_not_promised_may_differ(adapter: Adapter) -> None:
    comparison = check_of(with_decode(adapter, leak), exact=False).check_batched()

    assert not comparison.is_equal
    assert not comparison.is_promised


def test_a_model_without_drafts_says_why_they_are_not_checked(adapter: Adapter) -> None:
    with pytest.raises(NotChecked, match="drafts are off"):
        check_of(adapter, speculate=()).check_drafted()
    with pytest.raises(NotChecked, match="constant width"):
        check_of(adapter, width=8).check_drafted()


def test_speeds_are_ratios_to_one_plain_row(adapter: Adapter) -> None:
    speeds = Speeds(adapter, CONFIG, [1, 2, 3])

    assert "8 rows" in speeds.measure_batch()
    assert "cached tokens" in speeds.measure_cache()
    assert "without" in speeds.measure_drafts()
