"""Conversion of text to token ids and back, using only the model's tokenizer.json.

Decoding works on each token's exact bytes: the library's own DecodeStream waits as long as the text ends in U+FFFD and raises
on broken runs of byte tokens, while `Detokenizer` never holds back more than one character.
"""

from bisect import bisect_right
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.vocabulary import Vocabulary


class Tokenizer:
    """A model's tokenizer, loaded from tokenizer.json. Raises BadModel or UnsupportedModel if it is missing or unusable."""

    def __init__(self, folder: Path) -> None:
        self.vocabulary = Vocabulary(folder / "tokenizer.json")
        self.inner = self.vocabulary.inner
        self.special_ids = self.vocabulary.special_ids
        # Some token takes any amount of space beside it.
        self.swallows_space = any(fact.lstrip or fact.rstrip for fact in self.vocabulary.added.values())
        self.bytes_of = self.vocabulary.bytes_of

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`; special tokens such as BOS are for raw text, not for a chat template's output."""
        # Of the library's functions the one that releases the GIL: long texts are encoded in threads.
        return self.inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_with_offsets(self, text: str, offsets: Sequence[int]) -> tuple[list[int], list[int]]:
        """Encode a rendered template; return the ids and, for each of `offsets` (in characters), how many tokens end by it."""
        if not offsets:
            return self.encode(text, add_special_tokens=False), []
        encoding = self.inner.encode_batch([text], add_special_tokens=False)[0]  # half as slow again: it keeps offsets
        ends = [end for _, end in encoding.offsets]
        return encoding.ids, [bisect_right(ends, offset) for offset in offsets]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(Detokenizer(self, skip_special_tokens).feed, ids))

    def id_of(self, text: str) -> int | None:
        return self.inner.token_to_id(text)

    def token_bytes(self, token: int) -> bytes:
        return self.bytes_of[token]

    def token_text(self, token: int) -> str:
        """Return a token's bytes decoded as UTF-8; an incomplete or invalid character becomes U+FFFD."""
        return self.bytes_of[token].decode(errors="replace")


class Detokenizer:
    """Decodes token ids one by one, optionally skipping special tokens; holds back only bytes of an incomplete character.

    Some vocabularies put a space in front of a text; it is dropped, unless the tokens follow a text or are held to a grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        *,
        follows_text: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.unfinished = b""  # the beginning of a character
        self.skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._bytes_of = tokenizer.bytes_of
        self._drops_space = tokenizer.bytes_of.drops_first_space and not follows_text

    def feed(self, token: int) -> str:
        if token in self.skipped:
            return ""
        data = self.unfinished + self._bytes_of[token]
        piece, used = utf_8_decode(data, "replace")  # bytes of no character are U+FFFD: that is what the model wrote
        self.unfinished = data[used:]
        if self._drops_space and piece:
            piece = piece.removeprefix(" ")
            self._drops_space = False
        return piece
