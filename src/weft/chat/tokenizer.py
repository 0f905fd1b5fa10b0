"""Text ⇄ ids, by the model's tokenizer.json alone: what it says is what the model was trained with.

Knows no model and no mlx. `Detokenizer` turns one sequence's ids into text pieces, never half a character.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from weft.errors import BadModel


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadModel(f"{path} is missing; a model folder needs a tokenizer.json to turn text into tokens")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions; its words name the fault
            raise BadModel(f"{path} can not be read as a tokenizer: {error}; fetch the file again") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text → ids. Special tokens are added where a plain text begins, not where a template wrote them."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Ids → text, without special tokens."""
        text: str = self.inner.decode(ids, skip_special_tokens=True)
        return text


class Detokenizer:
    """Ids in, text pieces out; bytes of an unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.told = ""
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token: int) -> str:
        """The text that became certain with this token, often nothing or one word."""
        self.ids.append(token)
        piece: str = self._stream.step(self.tokenizer.inner, token) or ""
        self.told += piece
        return piece

    def finish(self) -> str:
        """What was held back and will not be completed any more."""
        whole = self.tokenizer.decode(self.ids)
        rest = whole[len(self.told) :] if whole.startswith(self.told) else ""
        self.told += rest
        return rest
