"""Fair queueing in two levels: tenants take turns by what was computed for them, and within a tenant's turn its clients do.

Cost is counted in prompt tokens. Imports no mlx; the scheduler asks it who is next and tells it what was computed.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from weft.engine.sequence import Sequence

OUTPUT_WEIGHT = 2  # an output token costs about as much as two prompt tokens
HEAD_START = 1.0  # a tenant that arrives goes before those it is level with, whose rows may take long to step once more
FORGIVEN = 128.0  # of what a tenant that arrives was served more than others: chats one after the other do not wait for that
CONTEXT_TOKENS = 8192  # behind so many tokens a prompt token costs about twice as much: attention reads all of them

Who = TypeVar("Who", bound=Hashable)


class Shares(Generic[Who]):
    """What was computed for each of several parties that take turns; the one with the least is next.

    A party that returns is owed nothing for its absence: it starts at the level of the least served party present.
    """

    def __init__(self) -> None:
        self.served: dict[Who, float] = {}  # cost, for those present and the last to arrive

    def arrive(
        self,
        who: Who,
        present: set[Who],
        others: set[Who] | None = None,
        elsewhere: float = 0.0,
        head_start: float = 0.0,
        forgiven: float = 0.0,
    ) -> None:
        """Raise an absent party's level to that of the least served of `others` (None: of all present); drop absent ones.

        `elsewhere` is what it has had from other engines too: it is not behind that either. It begins by `head_start` below
        that level, and if it is above it, by `forgiven` lower.
        """
        if who not in present:
            level = min((self.level(one) for one in (present if others is None else others)), default=0.0) - head_start
            self.served[who] = max(self.served.get(who, 0.0) - forgiven, level, elsewhere)
            self.served = {one: cost for one, cost in self.served.items() if one in present or one == who}

    def charge(self, who: Who, cost: float) -> None:
        self.served[who] = self.served.get(who, 0.0) + cost

    def level(self, who: Who) -> float:
        return self.served.get(who, 0.0)


class Fairness:
    """Orders sequences: by rank, then the least served tenant, then priority within it, then its least served client."""

    def __init__(self) -> None:
        self.tenants: Shares[str] = Shares()
        self.clients: Shares[tuple[str, str]] = Shares()  # by tenant and client

    def arrive(self, sequence: Sequence, present: Iterable[Sequence]) -> None:
        """Note a new sequence beside those that wait or run already."""
        clients, (by_tenant, by_client) = {one.turn for one in present}, sequence.request.served
        tenants = {tenant for tenant, _ in clients}
        self.tenants.arrive(sequence.tenant, tenants, elsewhere=by_tenant, head_start=HEAD_START, forgiven=FORGIVEN)
        own = {turn for turn in clients if turn[0] == sequence.tenant}
        self.clients.arrive(sequence.turn, clients, own, elsewhere=by_client)

    def charge_chunk(self, sequence: Sequence, start: int, count: int) -> None:
        self._charge(sequence, count * (1 + start / CONTEXT_TOKENS))

    def charge_token(self, sequence: Sequence) -> None:
        self._charge(sequence, OUTPUT_WEIGHT)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        self.tenants.charge(sequence.tenant, cost)
        self.clients.charge(sequence.turn, cost)

    def first(self, waiting: Iterable[Sequence]) -> Sequence:
        """Return the next sequence; of equals preempted ones go first, then the first given."""
        return min(waiting, key=self._place)

    def _place(self, one: Sequence) -> tuple[int, float, int, float, bool]:
        tenant, client = self.tenants.level(one.tenant), self.clients.level(one.turn)
        return -one.request.rank, tenant, -one.request.priority, client, not one.is_preempted
