"""Who is next, when there is not enough for all: the client that has had the fewest tokens so far.

A virtual counter of tokens for each client. One that was away is not owed what it did not ask for: it begins at the level
of the least served one that is there. A higher priority goes before any counter. Used by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.sequence import Sequence

OUTPUT_WEIGHT = 2  # a token of an answer costs about as much as two of a prompt


class Fairness:
    """Owns the counters."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}

    def arrived(self, sequence: Sequence, present: Iterable[Sequence]) -> None:
        """A client asks for something; `present` are the sequences that wait or run."""
        clients = {one.client for one in present}
        if sequence.client not in clients:
            level = min((self.served[client] for client in clients), default=0.0)
            self.served[sequence.client] = max(self.served.get(sequence.client, 0.0), level)
            here = {*clients, sequence.client}
            self.served = {client: count for client, count in self.served.items() if client in here}

    def charge(self, sequence: Sequence, tokens: float) -> None:
        """A client has had so many tokens."""
        self.served[sequence.client] = self.served.get(sequence.client, 0.0) + tokens

    def first(self, waiting: Iterable[Sequence]) -> Sequence:
        """Who is next; of equals the first."""
        return min(waiting, key=self._rank)

    def _rank(self, sequence: Sequence) -> tuple[bool, int, float, bool]:
        served = self.served.get(sequence.client, 0.0)
        return not sequence.is_suspect, -sequence.priority, served, not sequence.is_preempted
