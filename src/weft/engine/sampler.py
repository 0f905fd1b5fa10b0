"""Samples one token per line from a step's logits, in float32, in a few operations over the whole batch.

Every row has its own parameters and its own random number, made from seed and position alone (`Sequence.uniform`), so a
neighbour can not change a draw.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from weft.engine.sequence import Line, Sequence
from weft.ipc.messages import TokenLogprob
from weft.kernels import cpu, cuda_paged
from weft.kernels.primitives import ops
from weft.memory.transfer import ON_CUDA

NOT_FINITE = "the model's logits are not finite for this sequence"
NONE_LEFT = "no token is left: what the constraint allows here is forbidden by logit_bias, min_tokens, "
NONE_LEFT += "allowed_token_ids or bad_words"
PROBLEMS = ("", NONE_LEFT, NOT_FINITE)
CANDIDATES = 256  # with top_k up to this many, a row is sampled from a partition instead of a full sort


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the tokens at some positions and of the likeliest tokens there, as lazy device arrays.

    The arrays are of T positions, of which these begin at `first`: those of several rows are computed together.
    """

    chosen: mx.array  # (T,)
    top_tokens: mx.array  # (T, k)
    top_values: mx.array  # (T, k)
    count: int  # of the likeliest that are wanted, at most k
    first: int = 0

    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_tokens, self.top_values]

    def read(self, tokens: Rows[int]) -> list[TokenLogprob]:
        """Wait for the device and return one TokenLogprob per position; `tokens` are the tokens at these positions."""
        here = slice(self.first, self.first + len(tokens))
        chosen, ids, values = (np.array(array)[here].tolist() for array in self.arrays())
        return [
            TokenLogprob(token, value, self._likeliest(*top))
            for token, value, *top in zip(tokens, chosen, ids, values, strict=True)
        ]

    def _likeliest(self, tokens: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
        return tuple(sorted(zip(tokens, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[: self.count])


@dataclass(frozen=True)
class SampledTokens:
    """The tokens sampled for a step's rows, with error codes and log-probabilities, as lazy device arrays."""

    tokens: mx.array  # (B,) int32
    problems: mx.array  # (B,) by row: an index into PROBLEMS; or (B, 2), behind the tokens again, whether a logit is not finite
    logprobs: dict[int, Logprobs]  # by row

    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.problems, *(array for row in self.logprobs.values() for array in row.arrays())]

    def are_finite(self) -> NDArray[np.bool_]:
        """Return whether the rows' logits are finite, (B,); to be called when they have been read."""
        found: NDArray[np.bool_] = self._read()[1] != PROBLEMS.index(NOT_FINITE)
        return found

    def _read(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return tokens and problems; where one array has both, the host leaves the tokens alone, which a step may be reading."""
        found = np.array(self.problems)
        if found.ndim == 1:
            return np.array(self.tokens), found
        return found[:, 0], found[:, 1] * PROBLEMS.index(NOT_FINITE)

    def read(self) -> tuple[list[int], dict[int, str]]:
        """Wait for the device; return the tokens and, by row index, the error message of each row that has one.

        Raises RuntimeError if the step failed on the device.
        """
        mx.eval(self.arrays())  # sync: numpy would swallow the device's error, and read memory that nothing was written to
        tokens, problems = self._read()
        return tokens.tolist(), {row: PROBLEMS[index] for row, index in enumerate(problems.tolist()) if index}


def logprobs_of(logits: mx.array, tokens: mx.array, count: int) -> Logprobs:
    """Return log-probabilities of `tokens` (T,) and of the `count` most likely tokens under unadjusted `logits` (T, V)."""
    return Logprobs(*_logprobs(logits.astype(mx.float32), tokens, list(range(tokens.shape[0])), count), count)


def _logprobs(logits: mx.array, tokens: mx.array, lines: list[int], count: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return for some lines of `logits` (T, V) the log-probability of the line's token, the likeliest tokens, and theirs."""
    vocab_size = logits.shape[-1]
    if cpu.is_bound(logits.dtype):
        chosen, likeliest, of_likeliest = ops.logprobs(logits, tokens, lines, min(count, vocab_size))
        return chosen, likeliest, of_likeliest
    if len(lines) < logits.shape[0]:
        logits, tokens = logits[mx.array(lines)], tokens[mx.array(lines)]
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
    ranked = mx.argpartition(-values, min(count, vocab_size - 1), axis=-1) if count else tokens[:, None]
    top = ranked[:, :count]
    return chosen, top, mx.take_along_axis(values, top, axis=-1)


def _logprobs_by_row(logits: mx.array, tokens: mx.array, rows: Rows[Sequence | Line]) -> dict[int, Logprobs]:
    """Return the log-probabilities that rows ask for, by row: all are computed together, with as many tokens as one wants."""
    counts = {index: row.sampling.logprobs for index, row in enumerate(rows)}
    wanted = {index: count for index, count in counts.items() if count is not None}
    if not wanted:
        return {}
    arrays = _logprobs(logits, tokens, [*wanted], max(wanted.values()))
    return {index: Logprobs(*arrays, count, first) for first, (index, count) in enumerate(wanted.items())}


def sample(logits: mx.array, rows: Rows[Sequence | Line], allowed: mx.array | None = None) -> SampledTokens:
    """Sample one token per row of `logits` (B, V) by the row's own parameters, restricted to `allowed` (B, V) if given."""
    changes, raw = _changes(rows), logits.astype(mx.float32)
    adjusted = _adjust(raw, changes)
    if ON_CUDA and not changes and allowed is None and all(row.sampling.temperature == 0.0 for row in rows):
        tokens, problems = cuda_paged.greedy(logits)
    elif cpu.is_bound(mx.float32):
        tokens, problems = _choose(adjusted, rows, allowed)
        problems = problems if adjusted is raw else _problems(raw, adjusted, allowed)
    else:
        masked = _masked(adjusted, allowed)
        tokens, problems = mx.argmax(masked, axis=-1).astype(mx.int32), _problems(raw, adjusted, allowed)
        tokens = _draw(masked, rows, tokens)
    return SampledTokens(tokens, problems, _logprobs_by_row(raw, tokens, rows))


def _choose(logits: mx.array, rows: Rows[Sequence | Line], allowed: mx.array | None) -> tuple[mx.array, mx.array]:
    """Sample tokens on a CPU in one operation, which also finds problems."""
    samplings = [row.sampling for row in rows]
    temperatures = [sampling.temperature for sampling in samplings]
    uniform = None
    if any(temperatures):
        uniform = mx.array([row.uniform(row.num_tokens) if row.sampling.temperature else 0.0 for row in rows], mx.float32)
    top_k = [min(sampling.top_k, logits.shape[-1]) for sampling in samplings]
    top_p = [sampling.top_p for sampling in samplings]
    tokens, problems = ops.choose(logits, temperatures, [one.min_p for one in samplings], allowed, uniform, top_k, top_p)
    return tokens, problems


def _masked(logits: mx.array, allowed: mx.array | None) -> mx.array:
    return logits if allowed is None else mx.where(allowed, logits, -mx.inf)


def _problems(raw: mx.array, adjusted: mx.array, allowed: mx.array | None) -> mx.array:
    """Return by row an index into PROBLEMS: what is wrong with its logits, or with what is left of them."""
    problems = mx.where(mx.isfinite(mx.max(raw, axis=-1)), 0, 2)
    if allowed is None:
        return problems
    return mx.where(mx.max(_masked(adjusted, allowed), axis=-1) > -mx.inf, problems, mx.maximum(problems, 1))


def _kind(row: Sequence | Line, vocab_size: int) -> str:
    """Return how a row is sampled: the likeliest token, drawn of all, of candidates in their order, or of a few of these."""
    if row.sampling.temperature == 0.0:
        return "greedy"
    if 0 < row.sampling.top_k <= CANDIDATES < vocab_size:
        return "few"
    return "all" if row.sampling.top_p < 1.0 or row.sampling.top_k > 0 else "plain"


def _draw(logits: mx.array, rows: Rows[Sequence | Line], tokens: mx.array) -> mx.array:
    """Return `tokens` with those of rows drawn that have a temperature."""
    for kind in ("plain", "few", "all"):
        indices = [index for index, row in enumerate(rows) if _kind(row, logits.shape[-1]) == kind]
        if not indices:
            continue
        is_all, group = len(indices) == len(rows), [rows[index] for index in indices]
        taken = logits if is_all else logits[mx.array(indices)]
        uniform = mx.array([row.uniform(row.num_tokens) for row in group], mx.float32)
        drawn = (
            _pick(_weights(taken, group), uniform) if kind == "plain" else _draw_ranked(taken, group, uniform, few=kind == "few")
        )
        if is_all:
            return drawn
        tokens = mx.array(tokens)  # a new value; the others may still be read
        tokens[mx.array(indices)] = drawn
    return tokens


def _draw_ranked(logits: mx.array, group: Rows[Sequence | Line], uniform: mx.array, *, few: bool) -> mx.array:
    """Draw tokens for rows with top_k or top_p, from candidates ordered by falling logit, ties by token id."""
    if few:
        candidates = mx.argpartition(-logits, CANDIDATES, axis=-1)[:, :CANDIDATES]
        candidates = mx.sort(candidates, axis=-1)  # so that equal logits stand in token order below
        ranks = mx.argsort(-mx.take_along_axis(logits, candidates, axis=-1), axis=-1)
        order = mx.take_along_axis(candidates, ranks, axis=-1)
    else:
        order = mx.argsort(-logits, axis=-1)
    ranked = mx.take_along_axis(logits, order, axis=-1)
    top_k = mx.array([min(row.sampling.top_k or logits.shape[-1], logits.shape[-1]) for row in group])[:, None]
    ranked = mx.where(mx.arange(ranked.shape[-1])[None] < top_k, ranked, -mx.inf)
    weights = _weights(ranked, group)
    top_p = mx.array([row.sampling.top_p for row in group], mx.float32)[:, None]
    before = mx.cumsum(weights, axis=-1) - weights
    # The likeliest token always stays: nothing comes before it.
    weights = mx.where((before < top_p * mx.sum(weights, axis=-1, keepdims=True)) | (top_p >= 1.0), weights, 0.0)
    picked = _pick(weights, uniform)
    return mx.take_along_axis(order, picked[:, None], axis=-1)[:, 0].astype(mx.int32)


def _weights(logits: mx.array, group: Rows[Sequence | Line]) -> mx.array:
    """Return unnormalised probabilities, exp((logit − highest logit) / temperature), with those below min_p set to zero."""
    temperature = mx.array([row.sampling.temperature for row in group], mx.float32)[:, None]
    min_p = mx.array([row.sampling.min_p for row in group], mx.float32)[:, None]
    weights = mx.exp((logits - mx.max(logits, axis=-1, keepdims=True)) / temperature)
    return mx.where(weights >= min_p, weights, 0.0)  # the highest weighs 1, so this is the share of its probability


def _pick(weights: mx.array, uniform: mx.array) -> mx.array:
    """Return, per row, the first index at which the cumulative weights exceed the row's random number times their sum."""
    cumulative = mx.cumsum(weights, axis=-1)
    total = cumulative[:, -1:]
    beyond = (cumulative > uniform[:, None] * total) & (weights > 0.0)
    # A device that sums in parallel may round the sum of all above the sums at possible tokens: then the highest of them counts.
    highest = mx.argmax(mx.where(weights > 0.0, cumulative, -1.0), axis=-1)
    return mx.where(mx.any(beyond, axis=-1), mx.argmax(beyond, axis=-1), highest).astype(mx.int32)


Changes = list[tuple[tuple[int, int], tuple[float, float]]]  # of logits, by row and token: a factor and a shift


def _changes(rows: Rows[Sequence | Line]) -> Changes:
    changed = [(index, row) for index, row in enumerate(rows) if row.sampling.adjusts_logits]
    return [((index, token), change) for index, row in changed for token, change in adjustments(row).items()]


def _adjust(logits: mx.array, changes: Changes) -> mx.array:
    """Apply penalties, logit_bias and min_tokens (stop tokens to −infinity) to the rows' logits as one sparse update."""
    if not changes:
        return logits
    row_index, token_index = mx.array([place for place, _ in changes]).T
    factor, shift = mx.array([change for _, change in changes], mx.float32).T
    old = logits[row_index, token_index]
    adjusted = mx.array(logits)
    adjusted[row_index, token_index] = mx.where(old > 0, old / factor, old * factor) + shift
    return adjusted


def adjustments(row: Sequence | Line) -> dict[int, tuple[float, float]]:
    """Return the changes to one row's logits, by token: (repetition penalty factor, additive shift)."""
    sampling = row.sampling
    result: dict[int, tuple[float, float]] = {}
    if row.token_counts is not None:
        seen = {*row.prompt, *row.token_counts} if sampling.repetition_penalty != 1.0 else row.token_counts
        for token in seen:
            count = row.token_counts.get(token, 0)
            shift = -(sampling.presence_penalty * (count > 0) + sampling.frequency_penalty * count)
            result[token] = (sampling.repetition_penalty, shift)
    for token, bias in sampling.logit_bias.items():
        by, shift = result.get(token, (1.0, 0.0))
        result[token] = (by, shift + bias)
    if row.num_output < sampling.min_tokens and row.constraint is None:  # a constraint knows where a stop token is text
        for token in row.stop_ids:
            result[token] = (1.0, -float("inf"))
    return result
