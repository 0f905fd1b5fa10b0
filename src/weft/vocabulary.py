"""A model's vocabulary: its tokenizer.json, and the exact bytes of every token.

The front decodes answers by these bytes and the engine constrains answers by them, so both always read the same text.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from weft.errors import BadModel, UnsupportedModel

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level vocabularies write each byte as one visible character: itself where it is visible, else the next one from 256 on.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + index): byte for index, byte in enumerate(HIDDEN)}

PLAIN_TEXT = re.compile(r"[^\W_]+|\s+")  # a word or white space: the text of an added token that means nothing else
# Decoder steps that change a text across tokens show here only: the tokenizers library must decode these as weft does.
SAMPLES = ("Hello world", " two  blanks ", "line\nline\n\n\tend", "naïve – 字 🙂", '{"a": [1, 2.5]}', "<|a|> </b> ▁ <0x41>")
SHOWN_DIFFERENCES = 3


class Vocabulary:
    """The tokens of one tokenizer.json. Raises BadModel or UnsupportedModel if the file is missing or unusable."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise BadModel(f"{path} is missing; a model folder needs a tokenizer.json to turn text into tokens")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions; its words name the fault
            raise BadModel(f"{path} can not be read as a tokenizer: {error}; fetch the file again") from error
        self.inner.no_truncation()  # some files carry a limit; a prompt is never cut silently
        self.inner.no_padding()
        self.added: dict[int, tokenizers.AddedToken] = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, fact in self.added.items() if fact.special)
        self.bytes_of = TokenBytes(self.inner, frozenset(self.added), path)

    @cached_property
    def reserved_ids(self) -> frozenset[int]:
        """Ids of the added tokens that mean more than their text, such as `<think>`; constrained text never contains them."""
        return frozenset(token for token, fact in self.added.items() if fact.special or not PLAIN_TEXT.fullmatch(fact.content))

    def difference(self, size: int) -> str | None:
        """Compare `bytes_of` with the tokenizers library over the first `size` tokens; return the differences, None without any.

        Each token is decoded after a word, because decoders change the first blank of a text.
        """
        before = next((token for token in range(size) if self._is_anchor(token)), None)
        if before is None:
            return "no token is a word that can be decoded"
        start = self.bytes_of[before].decode()
        pairs = self.inner.decode_batch([[before, token] for token in range(size)], skip_special_tokens=False)
        found = [token for token, text in enumerate(pairs) if not self._agrees(token, text.removeprefix(start))]
        if found:
            return self._told(found, [pairs[token].removeprefix(start) for token in found[:SHOWN_DIFFERENCES]])
        return next((f"the text {text!r}" for text in SAMPLES if not self._agrees_on(text)), None)

    def _is_anchor(self, token: int) -> bool:
        """Whether a token is a word that the library decodes alike before and after another token."""
        data = self.bytes_of[token]
        is_word = data.isalpha() and token not in self.added and not BYTE_TOKEN.fullmatch(self.inner.id_to_token(token) or "")
        return is_word and self.inner.decode([token, token]) == 2 * data.decode()

    def _agrees(self, token: int, text: str) -> bool:
        data = self.bytes_of[token]
        return data.decode(errors="replace") == text or (token in self.added and data == self.added[token].content.encode())

    def _agrees_on(self, text: str) -> bool:
        """Whether the library decodes the tokens of a text to their bytes, apart from its first blanks."""
        ids = self.inner.encode(text, add_special_tokens=False).ids
        data = b"".join(self.bytes_of[token] for token in ids).decode(errors="replace")
        return self.inner.decode(ids, skip_special_tokens=False).lstrip(" ") == data.lstrip(" ")

    def _told(self, found: list[int], texts: list[str]) -> str:
        pairs = zip(found, texts, strict=False)
        shown = ", ".join(f"{token} ({self.bytes_of[token]!r}, {text!r})" for token, text in pairs)
        return f"{len(found)} tokens, as {shown}"


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
