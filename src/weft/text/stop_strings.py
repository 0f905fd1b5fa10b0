"""Incremental search for stop strings and markers in streamed text: a suffix that could begin a match is held back."""


class StopFinder:
    """Finds the stop string that is complete first in streamed text, the longest on a tie, however the text is cut."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = sorted((stop for stop in stops if stop), key=len, reverse=True)  # an empty one stops nothing
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take text; return the part before any possible stop, and the stop found or None. Not to be called after a stop."""
        if not self._stops:
            return text, None
        text = self._held + text
        end, found = len(text) + 1, None
        for stop in self._stops:  # longest first, so that it wins a tie
            start = text.find(stop, 0, end - 1)
            if start >= 0:
                end, found = start + len(stop), stop
        certain = end - len(found) if found else len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = "" if found else text[certain:]
        return text[:certain], found

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


def split_at(text: str, sought: str) -> tuple[str, str, str]:
    """`str.partition` for streamed text: if `sought` is absent, the last item is a suffix of `text` that could begin it."""
    before, found, after = text.partition(sought)
    certain = len(before) - (0 if found else overlap(before, sought))
    return before[:certain], found, before[certain:] + after


def overlap(text: str, sought: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `sought`; 0 if there is none."""
    start = text.find(sought[0], max(0, len(text) - len(sought) + 1))
    while start >= 0:
        if sought.startswith(text[start:]):
            return len(text) - start
        start = text.find(sought[0], start + 1)
    return 0
