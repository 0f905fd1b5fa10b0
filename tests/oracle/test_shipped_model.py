"""The promise on the model that ships with the package: real weights, sizes at which an ordinary BLAS would differ."""

from __future__ import annotations

import numpy as np
import pytest

from driver import SMALL, Run, adapter_for, have_same_contents, random_prompts
from weft.model.adapter import Adapter
from weft.model.resolve import TINY_HYBRID

PROMPTS = random_prompts(4000, (150, 3, 60, 200, 17, 90, 1, 33), seed=4)


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_for(TINY_HYBRID)


def logits_beside(adapter: Adapter, others: int, width: int | None) -> np.ndarray:
    run = Run(adapter, type(SMALL)(max_rows=8, slab_tokens=2048, chunk_tokens=128, width=width), keep_logits=True)
    subject = run.submit(PROMPTS[0], 24)
    for index, prompt in enumerate(PROMPTS[1 : 1 + others]):
        run.submit(prompt, 4 + 4 * index)
    run.finish()
    return run.logits_of(subject)


def test_no_bit_of_the_logits_depends_on_the_crowd(adapter: Adapter) -> None:
    alone = logits_beside(adapter, 0, None)

    for others in (1, 3, 7):
        assert np.array_equal(logits_beside(adapter, others, None), alone)


def test_at_a_constant_width_no_bit_depends_on_the_crowd_whatever_the_blas(adapter: Adapter) -> None:
    assert np.array_equal(logits_beside(adapter, 0, 8), logits_beside(adapter, 7, 8))


def test_prompts_of_any_lengths_in_one_forward_leave_what_each_leaves_alone_its_mtp_head_included(adapter: Adapter) -> None:
    assert adapter.head is not None
    begun, prompts = PROMPTS[3][:50], [PROMPTS[0], PROMPTS[1], PROMPTS[3][50:], PROMPTS[7]]
    rows = [adapter.prefilled_caches(begun) if at == 2 else adapter.new_caches(len(prompt)) for at, prompt in enumerate(prompts)]
    adapter.prefill_together(prompts, rows, [0, 0, len(begun), 0]).finish()

    for at, row in enumerate(rows):
        alone = adapter.prefilled_caches(begun) if at == 2 else adapter.new_caches(len(prompts[at]))
        adapter.prefill(prompts[at], alone)[0].finish()
        assert have_same_contents(adapter, row, alone)
