"""The engines of one model as one: replicas that are started, watched and drained; their common condition and status."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from weft.config import EngineSettings
from weft.errors import EngineDied, InvalidRequest
from weft.ipc.messages import DraftCounts, EngineEvents, EngineStatus, Leaving, Prefixes, Ready, ToFront
from weft.serving.dispatcher import Dispatcher
from weft.serving.lifeline import DraftTotals, EngineCondition, Lifeline
from weft.serving.starters import EnginePlacement, Starter

log = logging.getLogger("weft.serving")

DRAIN_TICK_SECONDS = 0.05


class Replica(Lifeline):
    """One of a model's engines, as the dispatcher sees it."""

    def __init__(self, starter: Starter, hang_seconds: float) -> None:
        super().__init__(starter, hang_seconds)
        self.answer_seconds = 0.0
        self.num_prompt_tokens = 0  # of answers that have ended here
        self.num_cached_tokens = 0
        self.is_leaving = False  # takes nothing new
        self.has_left = False  # what has not ended by now goes on elsewhere

    @property
    def max_rows(self) -> int:
        return self.condition.ready.max_rows if self.condition.ready is not None else 0

    @property
    def kind(self) -> str:
        ready = self.condition.ready
        return "" if ready is None else f"{ready.device} {ready.versions}"

    @property
    def is_open(self) -> bool:
        return self.client.send is not None and not self.condition.is_sick and not self.is_leaving

    @property
    def is_gone(self) -> bool:
        return self.client.send is None or self.condition.is_lost

    @property
    def is_given_up(self) -> bool:
        return self.condition.failed is not None or self.has_left or self.is_away

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached


class EnginePool:
    """Runs a model's replicas and gives requests to them; with one replica it is as if there were only that."""

    def __init__(self, starters: Sequence[Starter], hang_seconds: float, placement: EnginePlacement | None = None) -> None:
        self.placement = placement  # None: engines are started here, or by others
        self.replicas = [Replica(starter, hang_seconds) for starter in starters]
        self.dispatcher = Dispatcher(self.replicas)
        self.condition = self._condition()
        self.changed = asyncio.Event()  # set at the next change of condition, and then replaced
        for replica in self.replicas:
            replica.on_change = partial(self._update, replica)
            replica.on_message = partial(self._receive, replica)
            replica.why_not = partial(self._why_not, replica)

    def start(self) -> None:
        if self.placement is not None:
            self.placement.start()
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        if self.placement is not None:
            await self.placement.stop()
        why = self.condition.failed or "the server is being stopped"
        self._fail_all(why)

    @property
    def settings(self) -> EngineSettings:
        return self.replicas[0].starter.settings

    @property
    def pid(self) -> int | None:
        return next((replica.pid for replica in self.replicas if replica.pid is not None), None)

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas)

    @property
    def drafts(self) -> DraftTotals:
        return sum((replica.drafts for replica in self.replicas), DraftTotals())

    @property
    def max_rows(self) -> int:
        return sum(replica.max_rows for replica in self.replicas)

    @property
    def status(self) -> EngineStatus:
        """The status of the only replica, or the sum of all, with what waits for a replica among the waiting rows."""
        if len(self.replicas) == 1:
            return self.replicas[0].status
        return sum_statuses([replica.status for replica in self.replicas], self.dispatcher.num_queued)

    def replica(self, name: str) -> Replica:
        """Return the replica of this name; raise InvalidRequest if there is none."""
        found = next((replica for replica in self.replicas if replica.name == name), None)
        if found is None:
            names = ", ".join(replica.name for replica in self.replicas)
            raise InvalidRequest(f"replica {name!r} is none of this model's; there are {names}", "replica")
        return found

    async def renew(self, name: str, drain_seconds: float) -> None:
        """Replace a replica's engine: it takes nothing new, short answers end within `drain_seconds`, the others move."""
        replica = self.replica(name)
        replica.is_leaving = True
        try:
            deadline = time.monotonic() + drain_seconds
            while len(replica.client.live) and time.monotonic() < deadline:
                await asyncio.sleep(DRAIN_TICK_SECONDS)
            replica.has_left = True
            self.dispatcher.settle()
            replica.renew()
        finally:
            replica.is_leaving = replica.has_left = False

    async def prefixes(self, *, clear: bool = False, scope: str | None = None) -> list[tuple[str, Prefixes]]:
        """Return what each ready replica has cached (of one scope), by its name; raise EngineError if one does not answer."""
        asked = [replica for replica in self.replicas if replica.client.send is not None] or self.replicas[:1]
        answers = await asyncio.gather(*(replica.client.prefixes(clear=clear, scope=scope) for replica in asked))
        return [(replica.name, answer) for replica, answer in zip(asked, answers, strict=True)]

    def _receive(self, replica: Replica, message: ToFront) -> None:
        match message:
            case EngineEvents():
                self.dispatcher.receive(replica, message)
            case Leaving():
                replica.is_leaving, replica.has_left = True, message.is_over
                self.dispatcher.settle()
            case Ready():
                replica.is_leaving = replica.has_left = False
                self.dispatcher.settle()

    def _update(self, replica: Replica) -> None:
        condition = self._condition()
        if condition.failed is not None:
            self._fail_all(condition.failed)
        elif replica.condition.failed is not None:
            log.error("replica %s is given up, the others go on: %s", replica.name, replica.condition.failed)
        self.dispatcher.settle()
        if condition != self.condition:
            self.condition = condition
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    def _fail_all(self, why: str) -> None:
        self.dispatcher.fail_all(lambda: EngineDied(f"the engine ended and no other goes on with this request: {why}"))

    def _why_not(self, replica: Replica, ready: Ready) -> str | None:
        """Return why an engine may not join the others: it serves another model, or other weights under the same name."""
        others = (one.condition.ready for one in self.replicas if one is not replica)
        other = next((one for one in others if one is not None), None)
        if other is None:
            return None
        if ready.weights and other.weights and ready.weights != other.weights:
            return f"{replica.name} has other weights or another config under the name {ready.model} than the other engines"
        if (ready.model, ready.weights or ready.folder) == (other.model, other.weights or other.folder):
            return None
        return f"replica {replica.name} serves {ready.model} of {ready.folder}, the others {other.model} of {other.folder}"

    def _condition(self) -> EngineCondition:
        """The best of the replicas' conditions: ready before silent, that before loading; failed only if all have failed."""
        conditions = [replica.condition for replica in self.replicas]

        def rank(condition: EngineCondition) -> int:
            if condition.ready is not None:
                return 1 if condition.is_sick else 0
            return 2 if condition.failed is None else 3

        return min(conditions, key=rank)


def sum_statuses(statuses: Sequence[EngineStatus], num_queued: int = 0) -> EngineStatus:
    """Return the sum of several engines' statuses; `num_queued` sequences wait for any of them."""

    def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
        total: Counter[str] = Counter()
        for one in counts:
            total.update(one)
        return dict(total)

    places = max((len(one.accepted_at) for one in statuses), default=0)
    images = [one.images for one in statuses]
    return EngineStatus(
        running=sum(one.running for one in statuses),
        waiting=sum(one.waiting for one in statuses) + num_queued,
        memory=added(one.memory for one in statuses),
        prefixes=added(one.prefixes for one in statuses),
        prefilling=tuple(number for one in statuses for number in one.prefilling),
        following=tuple(number for one in statuses for number in one.following),
        alone=added(one.alone for one in statuses),
        drafts=sum((one.drafts for one in statuses), DraftCounts()),
        num_drafts=sum(one.num_drafts for one in statuses),
        accepted_at=tuple(sum(one.accepted_at[at] for one in statuses if at < len(one.accepted_at)) for at in range(places)),
        images={kind: sum(one.get(kind, 0.0) for one in images) for kind in {kind for one in images for kind in one}},
        queued_tokens=sum(one.queued_tokens for one in statuses),
    )
