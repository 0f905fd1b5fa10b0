"""Stream readers for tests, by the words a test cares about."""

from __future__ import annotations

from typing import Any

from weft.text.reasoning import Markers, ReasoningSplitter
from weft.text.stream import StreamReader
from weft.text.tokenizer import Detokenizer, Tokenizer


def reader_of(tokenizer: Tokenizer, *, markers: Markers | None = None, opened: bool = False, **more: Any) -> StreamReader:
    """A reader of one choice's tokens."""
    detokenizer = Detokenizer(tokenizer, more.pop("skip_special_tokens", True), more.pop("shown", frozenset()))
    splitter = None if markers is None else ReasoningSplitter(markers, opened, tokenizer)
    return StreamReader(detokenizer, more.pop("stops", ()), splitter, **more)
