"""Refuses texts that have more tokens than a model's context before they are tokenised whole.

Two bounds from below on a text's tokens. By bytes: no token is longer than the vocabulary's longest, and a normaliser shrinks a
text by no more than a known factor. By parts: a suspiciously long text is counted part by part, until the context is exceeded.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.errors import ContextTooLong, RequestCancelled
from weft.text.tokenizer import Tokenizer

USUAL_CHARACTERS = 8  # of a token, at most, in what people send; texts with more for each token of the context are counted first
PART_CHARACTERS = 1 << 16
CUT_TOKENS = 16  # by so many tokens, at most, a cut changes how the text around it is divided
# The factor by which a normaliser shrinks a text at most: a Hangul syllable has three letters, a mathematical letter four bytes.
SHRINKAGE = {"NFC": 3, "NFD": 1, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1}


class LengthBound:
    """What is known of a tokenizer: the most bytes of text that one of its tokens can stand for; None if that is not bounded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        shrinkage = _shrinkage(_state(tokenizer.inner.normalizer))
        keeps_all = tokenizer.bytes_of.is_byte_complete and _keeps_all(_state(tokenizer.inner.pre_tokenizer))
        longest = max((len(text.encode()) for text in tokenizer.inner.get_vocab()), default=1)
        is_bounded = shrinkage is not None and keeps_all and not tokenizer.swallows_space
        self.max_token_bytes = longest * shrinkage if is_bounded and shrinkage is not None else None

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that this text surely has."""
        return self.least_tokens_of(len(text))  # a character has a byte or more

    def least_tokens_of(self, num_bytes: int) -> int:
        """Return a number of tokens that a text of so many bytes surely has."""
        return 0 if self.max_token_bytes is None else -(-num_bytes // self.max_token_bytes)


def _state(step: Any) -> Any:
    """Return the settings of a part of a tokenizer as the JSON that the library makes of it; Any: it is foreign."""
    return None if step is None else json.loads(step.__getstate__())


def _keeps_all(step: Any) -> bool:
    """Return whether a pre-tokenizer surely drops nothing of a text."""
    match step:
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return all(map(_keeps_all, steps))
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case None | {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
    return False


def _shrinkage(step: Any) -> int | None:
    """Return by which factor a normaliser may shrink a text, None if by any; Any: the library's JSON."""
    match step:
        case None:
            return 1
        case {"type": "Sequence", "normalizers": [*steps]}:
            factors = [_shrinkage(one) for one in steps]
            product = 1
            for factor in factors:
                product *= factor or 1
            return None if None in factors else product
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": str(name)}:
            return SHRINKAGE.get(name)
    return None


@dataclass(frozen=True)
class LengthCheck:
    """The check of one request's texts against its model's context; it ends early when nobody waits for the answer any more."""

    tokenizer: Tokenizer
    bound: LengthBound
    context_length: int
    is_wanted: Callable[[], bool] = lambda: True

    def check(self, text: str) -> None:
        """Raise ContextTooLong if a text surely has more tokens than the context, RequestCancelled if nobody waits for it."""
        self.check_wanted()
        if (least := self.bound.least_tokens(text)) > self.context_length:
            raise _too_long(least, self.context_length)
        if len(text) > USUAL_CHARACTERS * self.context_length:
            self._count_parts(text)

    def check_bytes(self, num_bytes: int) -> None:
        """Raise ContextTooLong if a prompt with so many bytes or more surely has more tokens than the context."""
        self.check_wanted()
        if (least := self.bound.least_tokens_of(num_bytes)) > self.context_length:
            raise _too_long(least, self.context_length)

    def check_wanted(self) -> None:
        if not self.is_wanted():
            raise RequestCancelled("the client left before its prompt was read")

    def _count_parts(self, text: str) -> None:
        least = 0
        for start in range(0, len(text), PART_CHARACTERS):
            self.check_wanted()
            part = self.tokenizer.encode(text[start : start + PART_CHARACTERS], add_special_tokens=False)
            least += max(0, len(part) - CUT_TOKENS)
            if least > self.context_length:
                raise _too_long(least, self.context_length)


def _too_long(least: int, limit: int) -> ContextTooLong:
    # Clients recognise this sentence and shorten their history, as they do that of `Limits`.
    message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {least} tokens or more."
    return ContextTooLong(f"{message} Please reduce the length of the messages.", "messages", limit=limit, got=least)
