"""Samples one token per line from a step's logits, in float32, in a few operations over the whole batch.

Every row has its own parameters and its own random number, made from seed and position alone (`Sequence.uniform`), so a
neighbour can not change a draw.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from weft.engine.sequence import Line, Sequence
from weft.ipc.messages import TokenLogprob

NOT_FINITE = "the model's logits are not finite for this sequence"
PROBLEMS = ("", "no token is left: what the constraint allows here is forbidden by logit_bias or min_tokens", NOT_FINITE)
CANDIDATES = 256  # with top_k up to this many, a row is sampled from a partition instead of a full sort


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the tokens at T positions and of the k most likely tokens there, as lazy device arrays."""

    chosen: mx.array  # (T,)
    top_tokens: mx.array  # (T, k)
    top_values: mx.array  # (T, k)

    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_tokens, self.top_values]

    def read(self, tokens: Rows[int]) -> list[TokenLogprob]:
        """Wait for the device and return one TokenLogprob per position; `tokens` are the tokens at these positions."""
        chosen = np.array(self.chosen).tolist()
        tops = zip(np.array(self.top_tokens).tolist(), np.array(self.top_values).tolist(), strict=True)
        ranked = [tuple(sorted(zip(*top, strict=True), key=lambda pair: (-pair[1], pair[0]))) for top in tops]
        return [TokenLogprob(token, value, top) for token, value, top in zip(tokens, chosen, ranked, strict=True)]


@dataclass(frozen=True)
class SampledTokens:
    """The tokens sampled for a step's rows, with error codes and log-probabilities, as lazy device arrays."""

    tokens: mx.array  # (B,) int32
    problems: mx.array  # (B,) by row: an index into PROBLEMS
    logprobs: dict[int, Logprobs]  # by row

    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.problems, *(array for row in self.logprobs.values() for array in row.arrays())]

    def read(self) -> tuple[list[int], dict[int, str]]:
        """Wait for the device; return the tokens and, by row index, the error message of each row that has one.

        Raises RuntimeError if the step failed on the device.
        """
        mx.eval(self.arrays())  # sync: numpy would swallow the device's error, and read memory that nothing was written to
        problems = {row: PROBLEMS[index] for row, index in enumerate(np.array(self.problems).tolist()) if index}
        return np.array(self.tokens).tolist(), problems


def logprobs_of(logits: mx.array, tokens: mx.array, count: int) -> Logprobs:
    """Return log-probabilities of `tokens` (T,) and of the `count` most likely tokens under unadjusted `logits` (T, V)."""
    logits = logits.astype(mx.float32)
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
    ranked = mx.argpartition(-values, min(count, values.shape[-1] - 1), axis=-1) if count else tokens[:, None]
    top = ranked[:, :count]
    return Logprobs(chosen, top, mx.take_along_axis(values, top, axis=-1))


def sample(logits: mx.array, rows: Rows[Sequence | Line], allowed: mx.array | None = None) -> SampledTokens:
    """Sample one token per row of `logits` (B, V) by the row's own parameters, restricted to `allowed` (B, V) if given."""
    raw = logits.astype(mx.float32)
    adjusted = _adjust(raw, rows)
    problems = mx.where(mx.isfinite(mx.max(raw, axis=-1)), 0, 2)
    if allowed is not None:
        adjusted = mx.where(allowed, adjusted, -mx.inf)
        problems = mx.where(mx.max(adjusted, axis=-1) > -mx.inf, problems, mx.maximum(problems, 1))
    greedy = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    tokens = _draw(adjusted, rows, greedy)
    wanted = ((i, row.sampling.logprobs) for i, row in enumerate(rows))
    logprobs = {i: logprobs_of(raw[i : i + 1], tokens[i : i + 1], count) for i, count in wanted if count is not None}
    return SampledTokens(tokens, problems, logprobs)


def _draw(logits: mx.array, rows: Rows[Sequence | Line], greedy: mx.array) -> mx.array:
    kinds: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.sampling.temperature > 0.0:
            is_ranked = row.sampling.top_p < 1.0 or row.sampling.top_k > 0
            is_few = 0 < row.sampling.top_k <= CANDIDATES < logits.shape[-1]
            kinds.setdefault("few" if is_few else "all" if is_ranked else "plain", []).append(index)
    tokens = greedy
    for kind, indices in kinds.items():
        group = [rows[index] for index in indices]
        taken = logits if len(indices) == len(rows) else logits[mx.array(indices)]
        drawn = _pick(_weights(taken, group), group) if kind == "plain" else _draw_ranked(taken, group, few=kind == "few")
        if len(indices) == len(rows):
            return drawn
        tokens = mx.array(tokens)  # a new value; the greedy ones may still be read
        tokens[mx.array(indices)] = drawn
    return tokens


def _draw_ranked(logits: mx.array, group: Rows[Sequence | Line], *, few: bool) -> mx.array:
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
    picked = _pick(weights, group)
    return mx.take_along_axis(order, picked[:, None], axis=-1)[:, 0].astype(mx.int32)


def _weights(logits: mx.array, group: Rows[Sequence | Line]) -> mx.array:
    """Return unnormalised probabilities, exp((logit − highest logit) / temperature), with those below min_p set to zero."""
    temperature = mx.array([row.sampling.temperature for row in group], mx.float32)[:, None]
    min_p = mx.array([row.sampling.min_p for row in group], mx.float32)[:, None]
    weights = mx.exp((logits - mx.max(logits, axis=-1, keepdims=True)) / temperature)
    return mx.where(weights >= min_p, weights, 0.0)  # the highest weighs 1, so this is the share of its probability


def _pick(weights: mx.array, group: Rows[Sequence | Line]) -> mx.array:
    """Return, per row, the first index at which the cumulative weights exceed the row's random number times their sum."""
    uniform = mx.array([row.uniform(row.num_tokens) for row in group], mx.float32)[:, None]
    cumulative = mx.cumsum(weights, axis=-1)
    total = cumulative[:, -1:]
    beyond = (cumulative > uniform * total) & (weights > 0.0)
    last = weights.shape[-1] - 1 - mx.argmax((weights > 0.0)[:, ::-1], axis=-1)
    # Rounding can leave nothing beyond the last cent of probability: then the last possible token has it.
    return mx.where(mx.any(beyond, axis=-1), mx.argmax(beyond, axis=-1), last).astype(mx.int32)


def _adjust(logits: mx.array, rows: Rows[Sequence | Line]) -> mx.array:
    """Apply penalties, logit_bias and min_tokens (stop tokens to −infinity) to the rows' logits as one sparse update."""
    changes = [((index, token), change) for index, row in enumerate(rows) for token, change in adjustments(row).items()]
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
    if row.num_output < sampling.min_tokens:
        for token in row.stop_ids:
            result[token] = (1.0, -float("inf"))
    return result
