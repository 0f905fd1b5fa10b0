"""Encodes the text that a grammar forces: llguidance asks here for its tokens.

They are those that the model's tokenizer gives in the middle of a text, and have exactly the bytes of the text: no blank is put
in front, and no reserved token is among them, because such a token means more than its text.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from weft.vocabulary import Vocabulary

NUM_CACHED, MAX_CACHED_LENGTH = 4096, 256  # texts, and characters per text: the same keys and braces are forced by every answer
NO_MODEL: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
}  # fmt: skip


class Spelling:
    """Encoder of text in the ordinary tokens of one vocabulary; `token_bytes` has b"" for a reserved token."""

    def __init__(self, vocabulary: Vocabulary, token_bytes: Sequence[bytes]) -> None:
        self._bytes_of = dict(enumerate(token_bytes))
        self._vocabulary = vocabulary
        self._encoder = _amid_text(vocabulary.inner)
        self._cached = lru_cache(NUM_CACHED)(self._spell)

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return tokens that have the bytes of `text`, without the characters that no ordinary token has."""
        return self._cached(text) if len(text) <= MAX_CACHED_LENGTH else self._spell(text)

    def can_write(self, text: str) -> bool:
        """Whether ordinary tokens have every character of `text`."""
        return self._joined(self(text)) == text.encode()

    def _spell(self, text: str) -> tuple[int, ...]:
        # Of the library's functions the one that releases the GIL.
        ids = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._joined(ids) == text.encode():
            return tuple(ids)
        ids = [part for token in ids for part in self._ordinary(token)]  # some vocabularies have a marker as a word too
        return tuple(ids if self._joined(ids) == text.encode() else self._greedy(text.encode()))

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._bytes_of.get(token, b"") for token in ids])

    def _ordinary(self, token: int) -> list[int]:
        return [token] if self._bytes_of.get(token) else self._greedy(self._vocabulary.bytes_of[token])

    def _greedy(self, data: bytes) -> list[int]:
        """Return the longest token that the bytes begin with, then the longest of the rest, and so on."""
        ids, start = list[int](), 0
        while start < len(data):
            ends = range(min(len(data), start + self._max_length), start, -1)
            end = next((end for end in ends if data[start:end] in self._token_of), None)
            if end is not None:
                ids.append(self._token_of[data[start:end]])
            start = end or start + 1
        return ids

    @cached_property
    def _token_of(self) -> dict[bytes, int]:
        return {data: token for token, data in self._bytes_of.items() if data}

    @cached_property
    def _max_length(self) -> int:
        return max(map(len, self._token_of), default=0)


def _amid_text(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer with the same model that has no added tokens and puts no blank before a text."""
    normalizer, pre_tokenizer = (_without_prefix(_state(step)) for step in (inner.normalizer, inner.pre_tokenizer))
    steps = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    made = tokenizers.Tokenizer.from_str(json.dumps(NO_MODEL | steps))
    made.model = inner.model
    return made


def _state(step: Any) -> Any:
    return None if step is None else json.loads(step.__getstate__())


def _without_prefix(step: Any) -> Any:
    """Return a tokenizer's step without the blank that it puts before a text; None if nothing else is left of the step."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Sequence"}:
            kind = "normalizers" if "normalizers" in step else "pretokenizers"
            return step | {kind: [one for one in map(_without_prefix, step[kind]) if one is not None]}
        case {"type": "Metaspace"}:
            return step | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return step | {"add_prefix_space": False}
    return step
