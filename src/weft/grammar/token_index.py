"""A vocabulary's tokens by their bytes, to find those that hold a text or begin with one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate


class TokenIndex:
    """A vocabulary's tokens ordered by their bytes. Built once per vocabulary: a text is then looked up in microseconds."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ids = sorted((token for token, data in enumerate(tokens) if data), key=lambda token: tokens[token])
        self._texts = [tokens[token] for token in self._ids]
        self._joined = b"".join(self._texts)
        self._starts = [0, *accumulate(map(len, self._texts))]

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the tokens that begin with a text."""
        first = bisect_left(self._texts, text)
        return self._ids[first : bisect_right(self._texts, text, first, key=lambda data: data[: len(text)])]

    def containing(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that contain a text."""
        place = self._joined.find(text)
        while place >= 0:
            rank = bisect_right(self._starts, place) - 1
            is_within = place + len(text) <= self._starts[rank + 1]  # or it is spread over neighbours
            if is_within:
                yield self._ids[rank]
            place = self._joined.find(text, self._starts[rank + 1] if is_within else place + 1)
