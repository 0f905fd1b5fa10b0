"""A model's tokens for its constraints, and llguidance's tokenizer, which is made from weft's own bytes."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from weft.errors import GrammarRejected
from weft.grammar.spelling import Spelling
from weft.grammar.token_index import TokenIndex
from weft.vocabulary import Vocabulary

UTF_8_BYTES = {bytes([byte]) for byte in range(0xF5) if byte not in (0xC0, 0xC1)}  # all that a text can have


class OwnTokens(TokenizerWrapper):
    """The object from which llguidance makes its tokenizer, and which it calls to encode text that a grammar forces."""

    def __init__(self, tokens: Sequence[bytes], reserved: Sequence[int], eos_token_id: int | None, spell: Spelling) -> None:
        self.tokens, self.special_token_ids = tokens, reserved
        self.eos_token_id = eos_token_id  # type: ignore[assignment]  # None: llguidance appends an end token
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self.spell = spell

    def __call__(self, text: str) -> tuple[int, ...]:  # type: ignore[override]  # llguidance takes any sequence of ids
        return self.spell(text)


class GrammarTokens:
    """The `vocab_size` tokens of one model; its tokenizer.json may have fewer or more. Raises BadModel or UnsupportedModel."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_tokens = [token for token in eos_token_ids if token < vocab_size]
        self._vocabulary = vocabulary = Vocabulary(path)
        self._bytes = [vocabulary.bytes_of[token] for token in range(vocab_size)]
        self.reserved = {*vocabulary.reserved_ids, *self.eos_tokens}
        ordinary = [b"" if token in self.reserved else data for token, data in enumerate(self._bytes)]
        self._spell = Spelling(vocabulary, ordinary)
        self.has_every_byte = {*ordinary} >= UTF_8_BYTES
        self.problem = self._problem()

    @property
    def inner(self) -> LLTokenizer:
        """Return llguidance's tokenizer. Raises GrammarRejected if it can not be trusted with this vocabulary."""
        if self.problem is not None:
            raise GrammarRejected(f"answers of this model can not be constrained: {self.problem}")
        return self._inner

    @cached_property
    def index(self) -> TokenIndex:
        return TokenIndex(self._bytes)

    def unwritable(self, text: str) -> str | None:
        """Return the first character of `text` that no ordinary token has; None if they have all."""
        return next((letter for letter in text if not self._spell.can_write(letter)), None)

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words in a mask; llguidance may have appended an end token to the model's tokens."""
        return -(-self._inner.vocab_size // 32)

    def _problem(self) -> str | None:
        """Make llguidance's tokenizer; return the reason if it can not be trusted, else None."""
        difference = self._vocabulary.difference(self.vocab_size)
        if difference is not None:
            return f"its tokenizer.json is not read as the tokenizers library decodes it: {difference}"
        first = self.eos_tokens[0] if self.eos_tokens else None
        reserved = sorted(token for token in self.reserved if token < self.vocab_size)
        own = OwnTokens(self._bytes, reserved, first, self._spell)
        try:
            self._inner = LLTokenizer(own, eos_token=self.eos_tokens or None)
        except BaseException as error:  # a panic in llguidance is none of Exception; it must not end the engine
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return f"its vocabulary can not be used: {error}"
        return None

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join([self._bytes[token] for token in tokens])

    def tokenize_str(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Encode a text that stands in an answer; `parse_special`: reserved tokens are used for their texts."""
        if not parse_special:
            return list(self._spell(text))
        added = self._vocabulary.added
        texts = {added[token].content: token for token in self._vocabulary.reserved_ids if token < self.vocab_size}
        longest_first = sorted((one for one in texts if one in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
        return [token for part in parts if part for token in ([texts[part]] if part in texts else self._spell(part))]
