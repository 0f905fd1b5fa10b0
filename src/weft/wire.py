"""The words between text world and token world: how to sample, what came out, why it ended.

Values only, no behaviour beyond checking themselves. Knows neither mlx nor HTTP; everybody may use it.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from weft.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 128
MAX_BIASES = 4096


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence chooses its tokens and when it ends. The defaults are plain greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: a fresh one for every request
    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: and of the k likeliest

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first parameter that can not be honoured."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p 0.0 keeps no token; use temperature 0 for greedy, or a top_p above 0", "top_p")
        _within("top_k", self.top_k, 0, None)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, None)
            _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_tokens(vocab_size)

    def _check_tokens(self, vocab_size: int) -> None:
        _within("number of logit_bias entries", len(self.logit_bias), 0, MAX_BIASES, "logit_bias")
        for token, bias in self.logit_bias.items():
            _within("logit_bias token", token, 0, vocab_size - 1, "logit_bias")
            if not -math.inf <= bias <= 1000.0:  # -inf bans a token; NaN fails both comparisons
                raise InvalidRequest(f"logit_bias {bias} for token {token} must be at most 1000 and not NaN", "logit_bias")
        for token in self.stop_token_ids:
            _within("stop_token_ids entry", token, 0, vocab_size - 1, "stop_token_ids")

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log-probability of a chosen token, and of the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Timings(msgspec.Struct, kw_only=True):
    """When things happened to one sequence, in seconds of the engine's clock."""

    submitted: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


class TokenEvent(msgspec.Struct, frozen=True):
    """Engine → asker: one token of a sequence, or its end, or both."""

    sequence: int
    token: int | None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    error: str | None = None


def _within(name: str, value: float, low: float, high: float | None, param: str | None = None) -> None:
    if math.isnan(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} {value} must be {limit}", param or name)
