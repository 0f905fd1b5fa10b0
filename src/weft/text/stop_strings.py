"""Incremental search for stop strings and markers in streamed text: a suffix that could begin a match is held back."""

from functools import lru_cache

Edges = list[dict[str, int]]  # by state: the state after one more character of a stop string


class StopFinder:
    """Finds the stop string that is complete first in streamed text, the longest on a tie, however the text is cut.

    The search goes on from its state: a character costs the same whether there is one stop string or the most allowed.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._machine = _machine_of(tuple(stop for stop in stops if stop))  # an empty one stops nothing
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take text; return the part before any possible stop, and the stop found or None. Not to be called after a stop."""
        machine, state = self._machine, self._state
        if machine is None:
            return text, None
        for place, letter in enumerate(text, 1):
            state = machine.step(state, letter)
            if (found := machine.complete[state]) is not None:
                before = self._held + text[:place]
                self._held, self._state = "", 0
                return before[: len(before) - len(found)], found
        text = self._held + text
        certain = len(text) - machine.depths[state]
        self._held, self._state = text[certain:], state
        return text[:certain], None

    def finish(self) -> str:
        rest, self._held, self._state = self._held, "", 0
        return rest


class StopMachine:
    """The automaton of Aho and Corasick: a state stands for the longest suffix of the text that begins a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.edges: Edges = [{}]
        self.depths = [0]  # by state: the length of its suffix
        self.complete: list[str | None] = [None]  # by state: the longest stop string that ends here
        self._shorter = [0]  # by state: that of the next shorter suffix which begins a stop string
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, letter: str) -> int:
        """Return the state after one more character of the text."""
        edges = self.edges
        while letter not in edges[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return edges[state][letter]

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            if letter not in self.edges[state]:
                self.edges[state][letter] = len(self.edges)
                self.edges.append({})
                self.depths.append(self.depths[state] + 1)
                self.complete.append(None)
                self._shorter.append(0)
            state = self.edges[state][letter]
        self.complete[state] = stop

    def _link(self) -> None:
        level = list(self.edges[0].values())
        while level:  # by depth: a shorter suffix is linked before a longer one
            deeper = []
            for state in level:
                for letter, after in self.edges[state].items():
                    shorter = self._shorter[after] = self.step(self._shorter[state], letter)
                    self.complete[after] = self.complete[after] or self.complete[shorter]
                    deeper.append(after)
            level = deeper


@lru_cache(maxsize=1)  # the choices of a request come together; of no other request anything is kept for long
def _machine_of(stops: tuple[str, ...]) -> StopMachine | None:
    """Return the automaton of these stop strings, shared by the choices of a request; None without any."""
    return StopMachine(stops) if stops else None


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
