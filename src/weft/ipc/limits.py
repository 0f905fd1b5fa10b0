"""Limits on what a request may ask of a model: ranges of sampling parameters, and prompts that fit context and memory.

Front and engine check with the same code, so a refusal reads the same wherever it is found.
"""

import math
from collections.abc import Sequence

import msgspec

from weft.errors import ContextTooLong, InsufficientMemory, InvalidRequest

MAX_LOGPROBS = 128
MAX_TEMPERATURE = 2.0  # OpenAI's limit; beyond it an answer is noise
MAX_BIASES = 4096
MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 128  # of an HTTP request: its target and headers
MAX_TEMPLATE_CHARACTERS = 1 << 20  # of a model's chat template; the longest in use have a twentieth of it
MAX_RENDERED_CHARACTERS = 16 << 20  # that a chat template may write for one prompt
# Of a body's JSON. Schemas of tools nest some thirty levels, and what walks over them recursively has a thousand frames; 16 MiB
# of "[]" would keep the event loop busy for seconds, and source code of that size has fewer.
MAX_BODY_DEPTH, MAX_BODY_BRACKETS, MAX_BODY_COMMAS = 100, 500_000, 4_000_000
MAX_MESSAGES = 10_000  # messages, input items or token-id lists of a request, and parts of one message
MAX_TOOLS, MAX_TOOL_CALLS = 2_000, 1_000  # tools of a request, and calls in one message
MAX_LABEL_CHARACTERS = 1_024  # of names, ids and labels
MAX_ENTRIES = 256  # of small objects and lists: metadata, template variables, what to include
MAX_CHOICE_TEXTS = 50_000  # of a list of texts to choose from
MAX_TOKEN_IDS = 1 << 20  # of one list
MAX_STOP_TOKENS = 1_024
MAX_BLANKS = 32  # white space at the beginning of an output; with more of it in front an open marker is answer
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 256, 256  # texts that do not occur, and the characters of one
MAX_STOPS, MAX_STOP_CHARACTERS = 32, 256  # stop strings of a request, and the characters of one: a table of 8,192 states


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one sequence: how tokens are chosen, which log-probabilities are returned, and when it ends."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: a fresh one for every request
    max_tokens: int | None = None  # None: the rest of the context; 0: the prompt is only read
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens, all but the first

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first parameter whose value is out of range."""
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p 0.0 keeps no token; use temperature 0 for greedy, or a top_p above 0", "top_p")
        _check_range("top_k", self.top_k, 0, None)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check_range("min_tokens", self.min_tokens, 0, None)
        _check_range("max_tokens", self.max_tokens, 0, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size), "logprobs")
        _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        _check_range("number of logit_bias entries", len(self.logit_bias), 0, MAX_BIASES, "logit_bias")
        for token, bias in self.logit_bias.items():
            _check_range("logit_bias token", token, 0, vocab_size - 1, "logit_bias")
            if not -math.inf <= bias <= 1000.0:  # -inf bans a token; NaN fails both comparisons
                raise InvalidRequest(f"logit_bias {bias} for token {token} must be at most 1000 and not NaN", "logit_bias")
        _check_range("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKENS, "stop_token_ids")
        for token in self.stop_token_ids:
            _check_range("stop_token_ids entry", token, 0, vocab_size - 1, "stop_token_ids")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits may have to be changed before a token is sampled."""
        return bool(self.logit_bias) or self.min_tokens > 0 or self.has_penalties


class Limits(msgspec.Struct, frozen=True):
    """The limits of a served model: vocabulary, context length, and the longest sequence that fits into memory."""

    vocab_size: int
    context_length: int
    memory_tokens: int | None = None  # the longest row, prompt and answer, that fits into memory; None: any
    memory_bytes: int = 0  # the bytes that are free for rows

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Check prompt and sampling against the limits; return the maximum answer length in tokens, or raise RequestError."""
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        sampling.check(self.vocab_size)
        room = self._context_room(len(prompt), sampling.max_tokens)  # before all of it is looked at
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            place, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < self.vocab_size)
            message = f"prompt token {token} at position {place} is outside the vocabulary of {self.vocab_size}"
            raise InvalidRequest(message, "prompt")
        return self._memory_room(len(prompt), room, sampling.max_tokens)

    def check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        """Raise InvalidRequest if a list of tokens has one that is outside the vocabulary."""
        if tokens and max(tokens) >= self.vocab_size:
            place = next(place for place, token in enumerate(tokens) if token >= self.vocab_size)
            message = f"{param}[{place}] is {tokens[place]}, and the vocabulary has {self.vocab_size} tokens; leave it out"
            raise InvalidRequest(message, f"{param}[{place}]")

    def _memory_room(self, tokens: int, room: int, wanted: int | None) -> int:
        """Return `room` cut to what fits into memory; raise InsufficientMemory if `wanted` (None: one) tokens do not fit."""
        if self.memory_tokens is None:
            return room
        total = tokens + (room if wanted is not None else 1)
        if total > self.memory_tokens:
            message = f"{total} tokens ({tokens} of the prompt) do not fit into memory: {self.memory_bytes} bytes are free for"
            message += f" requests, enough for {self.memory_tokens} tokens. Shorten it, or start the server with more --memory."
            raise InsufficientMemory(message, "messages" if wanted is None else "max_tokens")
        return min(room, self.memory_tokens - tokens)

    def _context_room(self, tokens: int, wanted: int | None) -> int:
        # Clients recognise these sentences and shorten their history: the first half must stay word for word.
        limit, room = self.context_length, self.context_length - tokens
        if room < 1 and not (room == 0 and wanted == 0):
            message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens}"
            hint = " tokens. Please reduce the length of the messages."
            raise ContextTooLong(message + hint, "messages", limit=limit, got=tokens)
        if wanted is not None and wanted > room:
            message = f"This model's maximum context length is {limit} tokens. However, you requested {tokens + wanted} tokens"
            message += f" ({tokens} in the messages, max_tokens {wanted} for the completion)."
            hint = f" Please reduce the length of the messages, or ask for at most {room}."
            raise ContextTooLong(message + hint, "max_tokens", limit=limit, got=tokens + wanted)
        return room if wanted is None else wanted


def _check_range(name: str, value: float | None, low: float, high: float | None, param: str | None = None) -> None:
    if value is None:
        return
    if math.isnan(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} {value} must be {limit}", param or name)
