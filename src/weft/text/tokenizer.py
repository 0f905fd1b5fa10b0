"""Conversion of text to token ids and back, using only the model's tokenizer.json.

Decoding works on each token's exact bytes: the library's own DecodeStream waits as long as the text ends in U+FFFD and raises
on broken runs of byte tokens, while `Detokenizer` never holds back more than one character.
"""

import json
import re
from bisect import bisect_right
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from weft.errors import BadModel, UnsupportedModel

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level vocabularies write each byte as one visible character: itself where it is visible, else the next one from 256 on.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + index): byte for index, byte in enumerate(HIDDEN)}


class Tokenizer:
    """A model's tokenizer, loaded from tokenizer.json. Raises BadModel or UnsupportedModel if it is missing or unusable."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadModel(f"{path} is missing; a model folder needs a tokenizer.json to turn text into tokens")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions; its words name the fault
            raise BadModel(f"{path} can not be read as a tokenizer: {error}; fetch the file again") from error
        self.inner.no_truncation()  # some files carry a limit; a prompt is never cut silently
        self.inner.no_padding()
        added = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, fact in added.items() if fact.special)
        self.swallows_space = any(fact.lstrip or fact.rstrip for fact in added.values())  # some token takes any amount of it
        self.bytes_of = TokenBytes(self.inner, frozenset(added), path)

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


class TokenBytes(dict[int, bytes]):
    """Mapping from token id to the token's exact bytes, computed on first use by the steps of the tokenizer's decoder."""

    def __init__(self, inner: tokenizers.Tokenizer, added: frozenset[int], path: Path) -> None:
        super().__init__()
        self.drops_first_space = False  # of a whole text, not of each token
        self._inner = inner
        self._added = added
        self._replaced: list[tuple[str, str]] = []
        self._is_byte_level = self._has_byte_tokens = False
        self._add_step(json.loads(inner.decoder.__getstate__()) if inner.decoder else None, path)

    def _add_step(self, step: Any, path: Path) -> None:
        match step:
            case {"type": "Sequence", "decoders": [*steps]}:
                for inner in steps:
                    self._add_step(inner, path)
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replaced.append((old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as count, "stop": 0}:
                self.drops_first_space = count == 1
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                self._replaced.append((mark, " "))
                self.drops_first_space = scheme != "never"
            case _:
                advice = "weft knows those of byte-level and sentencepiece vocabularies, so serve another build of this model"
                raise UnsupportedModel(f"{path} turns tokens into text by the decoder {step}; {advice}")

    @property
    def is_byte_complete(self) -> bool:
        """Whether every byte of a text is in some token: the vocabulary has bytes, so nothing is unknown to it."""
        return self._is_byte_level or self._has_byte_tokens

    def __missing__(self, token: int) -> bytes:
        text = self._inner.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""  # not stored: clients may send any number of unknown ids
        for old, new in self._replaced:
            text = text.replace(old, new)
        data = text.encode()
        if self._is_byte_level and token not in self._added and BYTE_OF.keys() >= set(text):
            data = bytes(BYTE_OF[letter] for letter in text)
        elif self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(text)):
            data = bytes.fromhex(byte[1])
        self[token] = data
        return data


class Detokenizer:
    """Decodes token ids one by one, optionally skipping special tokens; holds back only bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        self.unfinished = b""  # the beginning of a character
        self.skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._bytes_of = tokenizer.bytes_of
        self._drops_space = tokenizer.bytes_of.drops_first_space

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
