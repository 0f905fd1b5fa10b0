"""Stream readers for tests, by the words a test cares about."""

from __future__ import annotations

from typing import Any

from weft.ipc.messages import ReasoningSpec
from weft.text.marker_stops import Stops
from weft.text.reasoning import Markers, ReasoningSplitter
from weft.text.stream import StreamReader
from weft.text.tokenizer import Detokenizer, Tokenizer


def reader_of(tokenizer: Tokenizer, *, markers: Markers | None = None, opened: bool = False, **more: Any) -> StreamReader:
    """A reader of one choice's tokens."""
    marks = frozenset(token for mark in markers or () for token in tokenizer.encode(mark, add_special_tokens=False))
    detokenizer = Detokenizer(tokenizer, more.pop("skip_special_tokens", True), marks | more.pop("shown", frozenset()))
    ways = {name: more.pop(name) for name in ("before_grammar", "reopening") if name in more}
    splitter = None if markers is None else splitter_of(markers, opened=opened, **ways, **more.pop("spec", {}))
    stops = Stops(more.pop("stops", ()), more.pop("marker_stops", None), more.pop("min_tokens", 0))
    return StreamReader(detokenizer, stops, splitter, **more)


def splitter_of(markers: Markers, *, opened: bool = False, **more: Any) -> ReasoningSplitter:
    ways = {name: more.pop(name) for name in ("before_grammar", "reopening") if name in more}
    spec = ReasoningSpec(markers.open, markers.close, opened, **{"may_open": not opened, **more})
    return ReasoningSplitter(spec, **ways)
