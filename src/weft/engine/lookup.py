"""Drafts from text that is already there: a sequence's own prompt and answer, and the client's prediction of the answer.

An answer that copies (an edited file, a quotation, a table) repeats what followed when its last tokens occurred before. An
index from three tokens to the places behind them finds those; the longest match is copied from, and as long as the answer
goes on as copied, so does the copy. Nothing here knows whether drafts pay: that is `draft_policy`.
"""

from array import array
from collections.abc import Sequence
from itertools import cycle, islice

GRAM = 3  # tokens that must match before anything is drafted
SURE_MATCH = 5  # from so many tokens on a draft may be as long as it is wanted; below it is shorter than its match
MAX_MATCH = 32  # longer matches are not told apart
MAX_CANDIDATES = 16  # places compared per search, the latest first: blank lines occur everywhere
INDEXED_PER_CALL = 4096  # tokens: some 3 ms, so that a very long prompt does not delay a step


class LookUp:
    """Finds drafts for one sequence in its own prompt and answer, and in the client's prediction of the answer."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] = ()) -> None:
        self._prompt = prompt
        self._prediction = _IndexedText(prediction)
        self._begin()

    def _begin(self) -> None:
        self._own = _IndexedText(self._prompt)
        # Where the draft comes from. An answer is expected to begin as its prediction does, without any match.
        self._source, self._place, self._matched = self._prediction, 0, SURE_MATCH

    @property
    def is_following(self) -> bool:
        """Whether the answer went on as text that was there before, when it was last looked at."""
        return self._matched > 0

    def draft(self, output: Sequence[int], count: int) -> tuple[list[int], bool]:
        """Return up to `count` tokens that may follow the output, and whether they come from the prediction."""
        num_known = len(self._own.tokens) - len(self._prompt)
        if len(output) < num_known:  # the sequence was restarted
            self._begin()
            num_known = 0
        new = list(output[num_known:])
        self._own.tokens += new
        if not self._follow(new):
            self._search()
        if not self._matched:
            return [], False
        return self._copy(count if self._matched >= SURE_MATCH else min(count, self._matched - 1))

    def _copy(self, count: int) -> tuple[list[int], bool]:
        tokens = self._source.tokens[self._place : self._place + count]
        if self._source is self._prediction:
            return tokens, True
        return list(islice(cycle(tokens), count)), False  # a copy that reaches the end of the text goes on with itself

    def _follow(self, new: list[int]) -> bool:
        """Whether the answer went on as copied, and there is more to copy."""
        place = self._place + len(new)
        if not self._matched or self._source.tokens[self._place : place] != new:
            return False
        self._place = place
        self._matched += len(new)
        return place < len(self._source.tokens)

    def _search(self) -> None:
        """Find the longest match of the last tokens: of equal ones the prediction's, then the latest."""
        self._matched = 0
        for source in (self._prediction, self._own):
            place, matched = source.longest_match(self._own.tokens)
            if matched > self._matched:
                self._source, self._place, self._matched = source, place, matched


class _IndexedText:
    """Tokens, and an index from each three of them to the places behind: the last one, and from each place the one before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._last: dict[tuple[int, ...], int] = {}
        self._before = array("l", [0] * GRAM)  # by place; 0: there is none before

    def _index(self) -> None:
        tokens, last, before = self.tokens, self._last, self._before
        start = len(before)
        for place in range(start, min(len(tokens), start + INDEXED_PER_CALL) + 1):
            gram = (tokens[place - 3], tokens[place - 2], tokens[place - 1])
            before.append(last.get(gram, 0))
            last[gram] = place

    def longest_match(self, suffix: list[int]) -> tuple[int, int]:
        """Return the place behind the longest occurrence of the suffix's end, and its length; a length of 0: there is none."""
        self._index()
        best, longest = 0, 0
        place = self._last.get(tuple(suffix[-GRAM:]), 0)
        for _ in range(MAX_CANDIDATES):
            if place == 0 or longest == MAX_MATCH:
                break
            if place < len(self.tokens):  # the end of the text, its own suffix perhaps, has nothing behind it
                matched = self._match(place, suffix)
                best, longest = (place, matched) if matched > longest else (best, longest)
            place = self._before[place]
        return best, longest

    def _match(self, place: int, suffix: list[int]) -> int:
        """Return how many tokens before the place are those at the suffix's end, MAX_MATCH at most."""
        matched = GRAM
        end = min(place, len(suffix), MAX_MATCH)
        while matched < end and self.tokens[place - 1 - matched] == suffix[-1 - matched]:
            matched += 1
        return matched
