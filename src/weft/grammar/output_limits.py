"""Tokens and texts that an answer may not have, whatever its grammar: `allowed_token_ids`, `bad_words`, a call in reasoning.

A forbidden text is found in the bytes of the answer, so also where it is spread over several tokens.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.grammar.grammar_tokens import GrammarTokens

Mask = NDArray[np.bool_]  # (V,): which tokens are allowed


class ForbiddenTexts:
    """Finds the tokens that would complete one of some texts, given the bytes before."""

    def __init__(self, texts: Iterable[str], tokenizer: GrammarTokens) -> None:
        words = {text.encode() for text in texts if text}
        self.longest = max(map(len, words), default=0)
        self.whole = {token for word in words for token in tokenizer.index.containing(word)}
        found: dict[bytes, set[int]] = {}
        for word in words:
            for begun in range(1, len(word)):
                found.setdefault(word[:begun], set()).update(tokenizer.index.beginning_with(word[begun:]))
        self._rest = {begun: np.array(sorted(tokens), np.int64) for begun, tokens in found.items()}  # by bytes already there

    def begun(self, data: bytes) -> bytes:
        """Return the longest end of `data` with which a text begins."""
        lengths = range(min(len(data), self.longest - 1), 0, -1)
        return next((data[-length:] for length in lengths if data[-length:] in self._rest), b"")

    def completing(self, tail: bytes) -> list[NDArray[np.int64]]:
        """Return the tokens that would complete a text of which a part ends `tail`."""
        ends = (tail[start:] for start in range(max(0, len(tail) - self.longest + 1), len(tail)))
        return [self._rest[end] for end in ends if end in self._rest]

    def after(self, tail: bytes) -> tuple[int, ...]:
        """Return the tokens that would complete a text right after the bytes `tail`."""
        return tuple(self.whole.union(*(found.tolist() for found in self.completing(tail))))


class OutputLimits:
    """Which tokens an answer may have: those of a list, if there is one, and none that completes a forbidden text.

    Reserved tokens, such as a model's own end, are no text. The state of an answer is the beginning of a text that ends it.
    """

    def __init__(self, allowed: Sequence[int] | None, texts: Sequence[str], tokenizer: GrammarTokens) -> None:
        self._tokenizer = tokenizer
        self._texts = ForbiddenTexts(texts, tokenizer)
        self._listed = np.ones(tokenizer.vocab_size, bool)
        if allowed is not None:
            self._listed[:] = False
            self._listed[list(allowed)] = True
        self._reserved = [token for token in tokenizer.reserved if token < tokenizer.vocab_size]
        self._quiet = self._without([np.array(sorted(self._texts.whole), np.int64)], self._listed)

    def after(self, begun: bytes, token: int) -> bytes:
        """Return the state after a token."""
        if not self._texts.longest or token in self._tokenizer.reserved:
            return begun
        return self._texts.begun(begun + self._tokenizer.decode_bytes([token]))

    def mask(self, begun: bytes) -> Mask:
        """Return the mask (V,) of the tokens that may come next; it is not to be changed."""
        return self._without(self._texts.completing(begun), self._quiet) if begun else self._quiet

    def _without(self, found: Iterable[NDArray[np.int64]], mask: Mask) -> Mask:
        left = mask.copy()
        for tokens in found:
            left[tokens] = False
        left[self._reserved] = self._listed[self._reserved]
        return left
