"""The gated delta rule for prompts: token by token in an operation of weft's on a CPU, else in chunks, as large products.

mlx-lm has a kernel for it on Metal, which is left to its work, and a Python loop elsewhere; `bind` puts this one into a model.
Token by token no bit depends on where a prompt is cut, and a decode step has the bits of a prompt's token; in chunks both do.

The rule, per row and value head, with a state S of shape (V, K), a key k and a query q of K numbers, a value v of V:

    S ← S · gate                  the state fades (one gate per head, or one per key number)
    u = beta · (v − S k)          what the state does not yet answer to this key
    S ← S + u kᵀ                  now it does
    output = S q

Inside a chunk the u of all tokens solve one triangular system, so they are linear in the state before the chunk, and so
is the state after it: S' = S · carry + gain. Only this last line goes chunk by chunk; all else is done for all at once.

Letters: B rows, T tokens, N chunks, C tokens of a chunk, H key heads, G value heads per key head, K and V as above.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gated_delta as stock

from weft.kernels import cpu, cuda, modules_behind
from weft.memory.positions import current_notes, note_states
from weft.memory.transfer import ON_CUDA

# Up to so many tokens single steps cost less than a chunk's fifty operations (two EPYC cores; H200).
MAX_STEPS_ON_CPU, MAX_STEPS_ON_GPU = 4, 8


def bind(model: nn.Module) -> list[str]:
    """Replace mlx-lm's `gated_delta_update` by this one in a model's modules; returns their names."""
    known = (stock.gated_delta_update, gated_delta_update)
    holders = [module for module in modules_behind(model) if getattr(module, "gated_delta_update", None) in known]
    for module in holders:
        vars(module)["gated_delta_update"] = gated_delta_update
    return [module.__name__ for module in holders]


def gated_delta_update(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    fading: mx.array,
    writing: mx.array,
    log_rate: mx.array,
    bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Drop-in for mlx-lm's function: compute gates and betas from their projections, then apply the gated delta rule."""
    is_plain = mask is None and lower_bound is None and not allow_neg_eigval
    if ON_CUDA and is_plain and cuda.can_step(query, value, fading, state):
        by_token, keeps_states = (query, key, value, fading, writing), current_notes() is not None
        output, last, states = cuda.gated_delta_steps(by_token, log_rate, bias, state, keeps_states=keeps_states)
        note_states(last, states)
        return output, last
    if not _on_cpu() and (mx.metal.is_available() or key.shape[1] <= MAX_STEPS_ON_GPU):  # mlx-lm's steps: fewer launches
        options = {"use_kernel": use_kernel, "lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
        rule = partial(stock.gated_delta_update, A_log=log_rate, dt_bias=bias, mask=mask, **options)
        return _stock_steps(rule, (query, key, value, fading, writing), state)
    beta = mx.sigmoid(writing)
    if allow_neg_eigval:
        beta = beta * 2.0
    rate = mx.exp(log_rate.astype(mx.float32))
    if lower_bound is None:
        gate = mx.exp(-rate * nn.softplus(fading + bias))
    else:
        gate = mx.exp(lower_bound * mx.sigmoid(rate * (fading.astype(mx.float32) + bias)))
    if mask is not None:
        gate, beta = skip_tokens(gate, beta, mask)
    return gated_delta_rule(query, key, value, gate, beta, state)


def skip_tokens(gate: mx.array, beta: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
    """Set gates to 1 and betas to 0 where `mask` (B, T) is False, so that these tokens leave the state unchanged."""
    return mx.where(mask.reshape(*mask.shape, *[1] * (gate.ndim - 2)), gate, 1), mx.where(mask[..., None], beta, 0)


def gated_delta_rule(
    query: mx.array,  # (B, T, H, K)
    key: mx.array,  # (B, T, H, K), of length one at most
    value: mx.array,  # (B, T, HG, V)
    gate: mx.array,  # (B, T, HG) or (B, T, HG, K), between 0 and 1
    beta: mx.array,  # (B, T, HG), between 0 and 2
    state: mx.array | None = None,  # (B, HG, V, K)
) -> tuple[mx.array, mx.array]:
    """Apply the gated delta rule; returns outputs (B, T, HG, V) in the query's dtype and the last state in float32."""
    rows, length, heads, _ = key.shape
    groups, width = value.shape[2] // heads, value.shape[3]
    if state is None:
        state = mx.zeros((rows, heads * groups, width, key.shape[-1]))
    tokens = DeltaTokens(*(array.astype(mx.float32) for array in (query, key, value, gate, beta)))
    first = state.astype(mx.float32).reshape(rows, heads, groups, width, -1)
    takes_notes, states = current_notes() is not None, None
    if _goes_by_token():
        output, last, states = _recurrence(tokens, first)
    elif length <= MAX_STEPS_ON_CPU or takes_notes:
        output, steps = _single_steps(tokens, first)
        by_token = [one.reshape(state.shape) for one in steps]
        note_states(by_token[-1], by_token)
        return output.astype(query.dtype), by_token[-1]
    else:
        output, last = _chunks(tokens, first)
    last = last.reshape(state.shape)
    note_states(last, states)
    return output.astype(query.dtype), last


def _stock_steps(rule: Callable[..., Any], by_token: tuple[mx.array, ...], state: mx.array | None) -> tuple[mx.array, mx.array]:
    """Apply mlx-lm's own function: at once, or token by token where the states after each token are noted."""
    length = by_token[0].shape[1]
    if current_notes() is None or length == 1:
        return rule(*by_token, state=state)  # type: ignore[no-any-return]
    outputs, states = [], []
    for at in range(length):
        output, state = rule(*(array[:, at : at + 1] for array in by_token), state=state)
        outputs.append(output)
        states.append(state)
    assert state is not None
    note_states(state, states)
    return mx.concatenate(outputs, axis=1), state


class DeltaTokens(NamedTuple):
    """Arguments of the gated delta rule for some tokens, in float32: (B, T, …) as given or (N, B, H, G, C, …) in chunks."""

    query: mx.array
    key: mx.array
    value: mx.array
    gate: mx.array
    beta: mx.array

    def cut(self, size: int, heads: int, groups: int) -> Self:
        """Reshape the arguments into chunks of this size; the last one is padded with tokens that leave the state unchanged."""
        rows, length = self.key.shape[:2]
        missing = -length % size

        def chunks(array: mx.array, groups: int, filler: float = 0.0) -> mx.array:
            if missing:
                array = mx.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), constant_values=filler)
            array = array.reshape(rows, (length + missing) // size, size, heads, groups, -1)
            return array.transpose(1, 0, 3, 4, 2, 5)

        query, key, value = chunks(self.query, 1), chunks(self.key, 1), chunks(self.value, groups)
        return type(self)(query, key, value, chunks(self.gate, groups, 1.0), chunks(self.beta, groups))


def _recurrence(tokens: DeltaTokens, state: mx.array) -> cpu.Recurred:
    """Apply the gated delta rule to a state (B, H, G, V, K) in weft's own operation."""
    gate = tokens.gate if tokens.gate.ndim == 4 else tokens.gate[..., None]
    return cpu.recurrence(state.flatten(1, 2), tokens.value, tokens.key, tokens.query, gate, tokens.beta[..., None])


def _single_steps(tokens: DeltaTokens, state: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Apply the gated delta rule token by token to a state (B, H, G, V, K); returns outputs, and the state after each token."""
    rows, heads, groups, width, _ = state.shape
    outputs, states, length = [], [], tokens.key.shape[1]
    for at in range(length):  # five slices are a fifth of a decode step on a CPU: one token is not sliced
        token = tokens if length == 1 else DeltaTokens(*(array[:, at : at + 1] for array in tokens))
        key = token.key.reshape(rows, heads, 1, 1, -1)
        state = state * token.gate.reshape(rows, heads, groups, 1, -1)
        missing = token.value.reshape(rows, heads, groups, width, 1) - state @ key.swapaxes(-1, -2)
        state = state + missing * token.beta.reshape(rows, heads, groups, 1, 1) * key
        output = state @ token.query.reshape(rows, heads, 1, -1, 1)
        outputs.append(output.reshape(rows, 1, heads * groups, width))
        states.append(state)
    return mx.concatenate(outputs, axis=1), states


def _chunks(tokens: DeltaTokens, state: mx.array) -> tuple[mx.array, mx.array]:
    """Apply the gated delta rule chunk by chunk to a state (B, H, G, V, K); returns the outputs and the last state."""
    rows, heads, groups, width, _ = state.shape
    length = tokens.key.shape[1]
    chunk = tokens.cut(_chunk_size(tokens), heads, groups)
    since_start = mx.cumprod(chunk.gate, axis=-2)  # what is left at each token of the state before the chunk
    until_end = mx.cumprod(chunk.gate, axis=-2, reverse=True, inclusive=False)  # what is left of it after the chunk
    # What token i's key and its query find of the key of an earlier token j, (N, B, H, G, C, C); the first counts for j < i.
    overlap, readout = _pairs_by_head(chunk) if chunk.gate.shape[-1] == 1 else _pairs_by_number(chunk)

    # u = own − seen · Sᵀ, with the state S before the chunk
    solve = _inverse_of_one_plus(overlap * chunk.beta) * chunk.beta.swapaxes(-1, -2)
    own = solve @ chunk.value  # (N, B, H, G, C, V)
    seen = solve @ (chunk.key * since_start)  # (N, B, H, G, C, K)

    # S' = S · carry + gain
    kept = chunk.key * until_end
    whole = _patterns(kept.shape[-1]).diagonal * since_start[..., -1:, :]
    carry = mx.addmm(whole, seen.swapaxes(-1, -2), kept, alpha=-1.0)  # (N, B, H, G, K, K)
    gain = own.swapaxes(-1, -2) @ kept  # (N, B, H, G, V, K)
    states = [state]
    for chunk_carry, chunk_gain in zip(carry, gain, strict=True):
        states.append(mx.addmm(chunk_gain, states[-1], chunk_carry))

    before = mx.stack(states[:-1]).swapaxes(-1, -2)  # (N, B, H, G, K, V)
    written = mx.addmm(own, seen, before, alpha=-1.0)
    output = mx.addmm(readout @ written, chunk.query * since_start, before)  # (N, B, H, G, C, V)
    output = output.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads * groups, width)
    return output[:, :length], states[-1]


def _chunk_size(tokens: DeltaTokens) -> int:
    """Return the chunk size in tokens: 64 on a GPU or for wide keys with one gate per head, else 32; less for short prompts."""
    is_wide = tokens.key.shape[-1] >= 128 and tokens.gate.ndim == 3  # the fastest on two EPYC cores; H200: up to 4,096 tokens
    return min(64 if is_wide or not _on_cpu() else 32, 1 << (tokens.key.shape[1] - 1).bit_length())


def _pairs_by_head(chunk: DeltaTokens) -> tuple[mx.array, mx.array]:
    """Return key-key and query-key products for token pairs j ≤ i of a chunk, times the gates after j; one gate per head.

    Products of gates, not exponentials of differences: nothing overflows, nothing cancels, and a gate of zero is fine.
    """
    patterns = _patterns(chunk.key.shape[-2])
    fading = mx.cumprod(mx.maximum(chunk.gate, patterns.not_earlier), axis=-2) * patterns.not_later
    keys = chunk.key.swapaxes(-1, -2)
    return (chunk.key @ keys) * fading, (chunk.query @ keys) * fading


def _pairs_by_number(chunk: DeltaTokens) -> tuple[mx.array, mx.array]:
    """Return key-key and query-key products for token pairs of a chunk, times the gates after j; one gate per key number.

    With blocks of 1, 2, 4 … tokens every pair j < i is in two neighbouring blocks at one length only. The gates from j to the
    end of its block, and from the start of the next block to i, are two factors ≤ 1: one matrix product has all such pairs.
    """
    size = chunk.key.shape[-2]
    patterns = _patterns(size)
    overlap = mx.zeros((size, size))
    readout = (chunk.query * chunk.key).sum(axis=-1, keepdims=True) * patterns.diagonal
    for block, meets in patterns.meetings:
        gate = mx.unflatten(chunk.gate, -2, (size // block, block))
        until_meeting = mx.flatten(mx.cumprod(gate, axis=-2, reverse=True, inclusive=False), -3, -2)
        since_meeting = mx.flatten(mx.cumprod(gate, axis=-2), -3, -2)
        keys = (chunk.key * until_meeting).swapaxes(-1, -2)
        overlap = mx.where(meets, (chunk.key * since_meeting) @ keys, overlap)
        readout = mx.where(meets, (chunk.query * since_meeting) @ keys, readout)
    return overlap, readout


def _inverse_of_one_plus(lower: mx.array) -> mx.array:
    """Return the inverse of the identity plus the strictly lower triangle of `lower`.

    A GPU has no solver for it: there by products, from the inverses of diagonal blocks to those of blocks twice as long.
    Never by powers of the triangle: with similar keys they grow like binomials and drown the result.
    """
    patterns = _patterns(lower.shape[-1])
    if _on_cpu():
        return mx.linalg.tri_inv(mx.where(patterns.not_earlier, patterns.diagonal, lower))
    inverse = patterns.diagonal
    for block, meets in patterns.meetings:
        between = mx.where(meets, lower, 0)
        inverse = inverse - between if block == 1 else mx.addmm(inverse, inverse @ between, inverse, alpha=-1.0)
    return inverse


class PairPatterns(NamedTuple):
    """Constant masks over the rows i and columns j of a square matrix: diagonal, triangles, and neighbouring blocks."""

    diagonal: mx.array  # 1 where j = i, else 0
    not_later: mx.array  # 1 where j ≤ i
    not_earlier: mx.array  # 1 where j ≥ i
    meetings: tuple[tuple[int, mx.array], ...]  # per block length 1, 2, 4 …: i in an odd block and j in the one before


@cache
def _patterns(size: int) -> PairPatterns:
    index, triangle = np.arange(size), np.tri(size, dtype=np.float32)

    def meets(block: int) -> mx.array:
        return mx.array((index[:, None] // block % 2 == 1) & (index[:, None] // block == index // block + 1))

    meetings = tuple((1 << power, meets(1 << power)) for power in range((size - 1).bit_length()))
    return PairPatterns(mx.array(np.eye(size, dtype=np.float32)), mx.array(triangle), mx.array(triangle.T), meetings)


def _goes_by_token() -> bool:
    return _on_cpu() and cpu.is_bound(mx.float32)


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)
