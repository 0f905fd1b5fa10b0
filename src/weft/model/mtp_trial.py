"""Tries an MTP head at load on the model's own greedy text, and chooses the way of reading it that agrees best with the trunk.

Files do not say whether norm weights are zero-centred, nor whether hidden states are taken before or after the final norm; a
head that is read the wrong way, or belongs to another model, agrees with hardly any token.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from weft.model.loader import LoadedModel
from weft.model.mtp_tensors import BuiltHead

if TYPE_CHECKING:
    from weft.model.mtp import MTPHead

TRIAL_ROWS, TRIAL_TOKENS = 2, 24  # two texts: one of them may run in circles
MIN_AGREEMENT = 0.2  # share of guesses; drafts of a worse head cost more than they give


def choose_reading(head: MTPHead, built: BuiltHead, loaded: LoadedModel) -> str | None:
    """Set the head to the way of reading that agrees best with the trunk; returns a reason if even that is too bad."""
    text = _own_text(loaded)
    right = loaded.model(text, cache=make_prompt_cache(loaded.model))
    choices = mx.argmax(right, axis=-1)
    found: list[tuple[float, bool, float]] = []
    for head.after_norm, shift in product(built.naming.after_norm, built.naming.shifts):
        states, logits = head.trunk(text, make_prompt_cache(loaded.model))
        if not mx.array_equal(logits, right):
            return "the model does more to its hidden states than its output layer, and its MTP head would not do that"
        built.shift_norms(shift)
        found.append((_agreement(head, text, states, choices), head.after_norm, shift))
    head.agreement, head.after_norm, shift = max(found, key=lambda one: one[0])  # the first of equals
    built.shift_norms(shift)
    if head.agreement < MIN_AGREEMENT:
        share = f"{head.agreement:.0%} of {TRIAL_ROWS * (TRIAL_TOKENS - 1)} tokens"
        return f"its MTP head guesses {share} of the model's own text, and {MIN_AGREEMENT:.0%} are needed"
    return None


def _own_text(loaded: LoadedModel) -> mx.array:
    """Return greedy texts of the model (rows, tokens), begun with tokens after which texts begin; blocks."""
    size = loaded.vocab_size
    starts = (loaded.config.get("bos_token_id"), *loaded.eos_token_ids, size // 4, size // 2)
    usable = dict.fromkeys(token for token in starts if isinstance(token, int) and 0 <= token < size)
    token = mx.array([[start] for start in list(usable)[:TRIAL_ROWS]])
    caches, text = make_prompt_cache(loaded.model), [token]
    while len(text) < TRIAL_TOKENS:
        token = mx.argmax(loaded.model(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)  # sync: a graph of all steps would hold every state
        text.append(token)
    return mx.concatenate(text, axis=1)


def _agreement(head: MTPHead, text: mx.array, states: mx.array, choices: mx.array) -> float:
    """Return the share of tokens, the first of each row left out, that the head guesses as the trunk chooses them."""
    before = mx.concatenate([mx.zeros_like(states[:, :1]), states[:, :-1]], axis=1)
    logits = head.logits(head.read(text, before, head.new_cache()))
    agrees = (mx.argmax(logits, axis=-1) == choices) & ~mx.any(mx.isnan(logits), axis=-1)
    return float(mx.mean(agrees[:, 1:].astype(mx.float32)))
