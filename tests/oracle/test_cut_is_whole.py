"""Chunked = whole, for every architecture: no bit depends on where a prompt is cut, or on whether a token is decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from driver import Run, random_prompts
from weft.model.adapter import Adapter
from zoo import EXAMINED, HOUSED, VOCABULARY

(PROMPT,) = random_prompts(VOCABULARY, (90,), seed=11)
CUTS = [[37], [2, 4, 64], [7, 20, 33, 35, 70], [88]]  # no chunk has one token: a model may compute it in another way
# Its compressed attention sees a prompt in blocks; nothing of it is cached, so nothing cuts its prompts.
CUT_DEPENDENT = {"deepseek_v41"}


def computed(adapter: Adapter, cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The logits of every token of the prompt, and of one more token decoded after it."""
    caches, found = adapter.new_caches(len(PROMPT)), []
    for start, end in itertools.pairwise([0, *cuts, len(PROMPT)]):
        chunk, logits = adapter.prefill(PROMPT[start:end], caches)
        chunk.finish()
        found.append(np.array(logits[0].astype(mx.float32)))
    return np.concatenate(found), np.array(adapter.decode_alone(mx.array([[5]]), caches).astype(mx.float32))


@pytest.mark.parametrize("name", HOUSED)
def test_no_cut_changes_a_bit(build: Callable[[str], Adapter], name: str) -> None:
    adapter = build(name)
    assert adapter.cuts_freely or not adapter.can_be_saved
    if name.partition(":")[0] in CUT_DEPENDENT:
        pytest.skip("nothing cuts its prompts")
    whole = computed(adapter, [])
    for cuts in CUTS if name in EXAMINED else CUTS[2:3]:
        for found, right in zip(computed(adapter, cuts), whole, strict=True):
            assert (found == right).all(), cuts


@pytest.mark.parametrize("name", HOUSED)
def test_a_decoded_token_has_the_bits_of_a_prefilled_one(build: Callable[[str], Adapter], name: str) -> None:
    adapter = build(name)
    if not adapter.decodes_like_prefill:
        pytest.skip("its emitted tokens are decoded again when a row is resumed")
    run = Run(adapter, keep_logits=True)
    sequence = run.submit(PROMPT[:40], 12)
    run.finish()
    caches = adapter.prefilled_caches(PROMPT[:39])
    chunk, logits = adapter.prefill([PROMPT[39], *sequence.output[:-1]], caches)
    chunk.finish()

    assert (run.logits_of(sequence) == np.array(logits[0].astype(mx.float32))).all()


def test_most_architectures_decode_as_they_prefill(build: Callable[[str], Adapter]) -> None:
    for name in ("llama", "qwen3_moe", "qwen3_5", "qwen3_next", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2"):
        assert build(name).decodes_like_prefill, name
    for name in ("gemma3_text", "gpt_oss", "deepseek_v3", "kimi_linear"):  # windows, and the latents of MLA
        assert not build(name).decodes_like_prefill, name
