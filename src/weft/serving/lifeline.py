"""One replica's engine: watched over its channel, and replaced when it dies or hangs; its current condition is published.

How an engine comes to be is its starter's affair (`serving/starters/`). There is a pause before each new engine, and restarts
are limited: an engine was of no use if it was never ready, or if it died soon after and no request ended or made progress in
it. After `MAX_FAILURES` such engines in a row the replica is given up; what its requests do then is decided by the pool.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import zmq

from weft.errors import EngineDied, EngineRefused
from weft.ipc.messages import Beat, DraftCounts, EngineEvents, EngineStatus, Failed, Loading, Prefixes, Ready, ToFront
from weft.serving.in_flight import EngineClient
from weft.serving.starters import EngineChannel, EngineExit, StartedEngine, Starter

log = logging.getLogger("weft.serving")

FIRST_PAUSE_SECONDS = 0.5  # before a dead engine is started again; doubled each time
LONGEST_PAUSE_SECONDS = 30.0
LONGEST_AWAY_PAUSE_SECONDS = 2.0  # before an engine that others start is tried to reach again
AWAY_SECONDS = 10.0  # after so long nobody waits for the next engine of a machine that may be switched off
MAX_FAILURES = 5  # engines in a row that are of no use, before the replica is given up
SOON_SECONDS = 60.0  # an engine that lives longer was of use, even if it had no request
DRAIN_SECONDS = 0.2  # of silence after an engine's end: then all its messages have come
TICK_SECONDS = 0.25
MAX_HOLD_SECONDS = 3.0  # for which an engine that others can do without is not started while they resume its answers
HOLD_TICK_SECONDS = 0.02
SICK_SECONDS = 1.5  # of silence, where a beat is due every quarter of a second
LOST_SECONDS = 2.5  # and then the other replicas, where there are some, continue its requests
SILENCE_SECONDS = 10.0  # after so long an engine that was ready is taken for dead
LOADING_SECONDS = 120.0  # and one that was not: loading a model may hold the interpreter
HELD_BACK = Loading("waiting until answers go on elsewhere")


@dataclass(frozen=True)
class EngineCondition:
    """State of an engine: `ready`, `loading` or permanently `failed`; `is_sick`, then `is_lost`: it was ready and is silent."""

    ready: Ready | None = None
    loading: Loading | None = None
    failed: str | None = None
    is_sick: bool = False
    is_lost: bool = False


@dataclass(frozen=True)
class DraftTotals:
    """Drafts verified so far, by one engine or by all of a model's: token counts, drafts, and tokens accepted by place."""

    counts: DraftCounts = field(default_factory=DraftCounts)
    num_drafts: int = 0
    accepted_at: tuple[int, ...] = ()

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        places = itertools.zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        return DraftTotals(self.counts + other.counts, self.num_drafts + other.num_drafts, tuple(map(sum, places)))

    def __sub__(self, other: "DraftTotals") -> "DraftTotals":
        places = itertools.zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        counts, num_drafts = self.counts - other.counts, self.num_drafts - other.num_drafts
        return DraftTotals(counts, num_drafts, tuple(one - before for one, before in places))


class Watchdog:
    """Decides whether an engine must be killed, by how long it has been silent and how long its loop has been in one turn.

    Time is counted in ticks of the front's event loop, so that a pause of the front is not taken for silence of the engine.
    """

    def __init__(self, hang_seconds: float) -> None:
        self.hang_seconds = hang_seconds
        self.num_received = 0
        self._silence_seconds = 0.0
        self._beat = Beat(0, 0.0)

    def receive(self, message: ToFront) -> None:
        """Reset the silence timer, as any message is a sign of life, and remember the last heartbeat."""
        self.num_received += 1
        self._silence_seconds = 0.0
        if isinstance(message, Beat):
            self._beat = message

    def tick(self) -> None:
        self._silence_seconds += TICK_SECONDS

    @property
    def is_sick(self) -> bool:
        return self._silence_seconds >= SICK_SECONDS

    @property
    def is_lost(self) -> bool:
        return self._silence_seconds >= LOST_SECONDS

    def reason_to_kill(self, *, is_ready: bool) -> str | None:
        patience = min(SILENCE_SECONDS, self.hang_seconds) if is_ready else LOADING_SECONDS
        if self._silence_seconds >= patience:
            return f"gave no sign of life for {self._silence_seconds:g} s"
        if self._beat.turn_seconds >= self.hang_seconds:
            return f"is in turn {self._beat.turns} since {self._beat.turn_seconds:.0f} s"
        return None


class Lifeline:
    """Keeps one replica's engine running: starts, watches and restarts it, and holds its requests, condition and status."""

    def __init__(self, starter: Starter, hang_seconds: float) -> None:
        self.starter = starter
        self.hang_seconds = hang_seconds
        self.client = EngineClient()
        self.condition = EngineCondition(loading=Loading("starting"))
        self.status = EngineStatus()
        self.restarts = 0
        self.pid: int | None = None
        self.last_exit = EngineExit("was not started")  # of the last engine
        self.on_change: Callable[[], None] = lambda: None  # called after every change of condition
        self.on_message: Callable[[ToFront], None] = lambda _: None  # called with every message, after it was handled
        self.why_not: Callable[[Ready], str | None] = lambda _: None  # why an engine that is ready may not serve this model
        self.are_others_resuming: Callable[[], bool] = lambda: False  # whether answers have moved and are not continued yet
        self._task: asyncio.Task[None] | None = None
        self._ready_at: float | None = None  # in the event loop's time
        self._folder: str | None = None  # of the model that was served last
        self._gone_at: float | None = None  # when the last engine was gone; None: there is one, or there was none yet
        self._earlier_drafts = DraftTotals()  # of the engines before this one
        self._is_renewed = asyncio.Event()  # its engine is to be replaced by a new one

    @property
    def name(self) -> str:
        return self.starter.name

    @property
    def drafts(self) -> DraftTotals:
        status = self.status
        return self._earlier_drafts + DraftTotals(status.drafts, status.num_drafts, status.accepted_at)

    @property
    def is_away(self) -> bool:
        """Whether an engine that others start is gone for so long that its requests must not wait for it."""
        if not self.starter.may_be_away or self._gone_at is None:
            return False
        return asyncio.get_running_loop().time() - self._gone_at >= AWAY_SECONDS

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive())

    def renew(self) -> None:
        """End the current engine in good order and start another."""
        self._is_renewed.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_alive(self) -> None:
        failures = 0  # engines in a row that were of no use
        while True:
            why = await self._run_once()
            was_of_use = self.client.detach(is_crash=self.last_exit.is_crash)
            self._gone_at = self._gone_at or asyncio.get_running_loop().time()
            failures = failures + 1 if why and not was_of_use else 0
            if failures >= MAX_FAILURES and not self.starter.may_be_away:
                self._change(EngineCondition(failed=f"{why}; tried {failures} times"))
            if self.condition.failed is not None:
                return
            longest = LONGEST_AWAY_PAUSE_SECONDS if self.starter.may_be_away else LONGEST_PAUSE_SECONDS
            pause = min(FIRST_PAUSE_SECONDS * 2 ** min(failures, 10), longest)
            self.restarts += self._ready_at is not None or not self.starter.may_be_away
            if failures <= 1 or not self.starter.may_be_away:
                log.warning("the engine of replica %s is gone; trying again in %.1f s", self.name, pause)
            self._change(
                EngineCondition(loading=Loading(f"trying again: {why}" if self.starter.may_be_away else "starting again"))
            )
            await asyncio.sleep(pause)
            if not self.starter.may_be_away:
                await self._hold_back()

    async def _hold_back(self) -> None:
        """Wait until answers that have moved are continued elsewhere: a new engine would take the processor's time from them."""
        deadline = asyncio.get_running_loop().time() + MAX_HOLD_SECONDS
        while self.are_others_resuming() and asyncio.get_running_loop().time() < deadline:
            if self.condition.loading != HELD_BACK:
                self._change(EngineCondition(loading=HELD_BACK))
            await asyncio.sleep(HOLD_TICK_SECONDS)

    async def _run_once(self) -> str | None:
        """Run one engine to its end; return why it was of no use if it ended before or soon after `ready`, else None."""
        self._ready_at, self.last_exit = None, EngineExit("was given up")
        self._is_renewed.clear()
        try:
            await self._run_engine()
        except EngineRefused as error:
            self._change(EngineCondition(failed=str(error)))
            return str(error)
        except (OSError, zmq.ZMQError) as error:  # no file descriptor, no memory, no room for a socket's name …
            if self.starter.may_be_away:
                return str(error)
            log.exception("an engine could not be started")
            return f"its process could not be started ({error})"
        if self._is_renewed.is_set():
            return None
        if self._ready_at is None:
            return "its process ended before it was ready; the log above has its words"
        is_short = asyncio.get_running_loop().time() - self._ready_at < SOON_SECONDS
        return "its process ended soon after it was ready; the log above has its words" if is_short else None

    async def _run_engine(self) -> None:
        async with self.starter.start() as engine:
            self.pid, watchdog = engine.pid, Watchdog(self.hang_seconds)
            receiving = asyncio.create_task(self._receive(engine.channel, watchdog))
            watching = asyncio.create_task(self._watch(watchdog))
            ended, renewed = asyncio.create_task(engine.wait()), asyncio.create_task(self._is_renewed.wait())
            try:
                await asyncio.wait({ended, receiving, watching, renewed}, return_when=asyncio.FIRST_COMPLETED)
                self.client.send = None  # new requests wait for the next engine
                if renewed.done():
                    engine.retire()
                    self.last_exit = EngineExit("was renewed", is_crash=False)
                    return
                if receiving.done():  # a message of this engine could not be decoded, or it may not serve this model
                    log.error("engine %s is given up", self._called(engine.pid), exc_info=receiving.exception())
                    return
                self.last_exit = await self._end_of(engine, ended, watching)
                await _drain(receiving, watchdog)
                log.warning("engine %s %s", self._called(engine.pid), self.last_exit.words)
            finally:
                for task in (receiving, watching, ended, renewed):
                    task.cancel()
                self._earlier_drafts = self.drafts
                self.pid, self.status = None, EngineStatus()

    async def _end_of(self, engine: StartedEngine, ended: asyncio.Task[EngineExit], watching: asyncio.Task[str]) -> EngineExit:
        """Return how an engine ended; one that hangs is killed, and that is a crash."""
        if not watching.done():
            return await ended
        log.error("engine %s %s: it is killed", self._called(engine.pid), watching.result())
        await engine.kill()
        return replace(await ended, is_crash=True)

    async def _receive(self, channel: EngineChannel, watchdog: Watchdog) -> None:
        """Handle the engine's messages; returns only if the engine is refused."""
        while True:
            message = await channel.receive()
            watchdog.receive(message)
            match message:
                case EngineEvents():
                    self.status = message.status or self.status
                    self.client.receive(message)
                case Prefixes():
                    self.client.receive_prefixes(message)
                case Ready() if (why := self.why_not(message)) is not None:
                    self._change(EngineCondition(failed=why))
                    return
                case Ready():
                    self._attach(message, channel)
                case Loading():
                    self._change(EngineCondition(loading=message))
                case Failed():
                    self._change(EngineCondition(failed=message.message))
            self.on_message(message)

    async def _watch(self, watchdog: Watchdog) -> str:
        """Wait until the engine must be killed and return the reason; meanwhile update whether it is sick or lost (silent)."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            watchdog.tick()
            is_ready = self.condition.ready is not None
            if (why := watchdog.reason_to_kill(is_ready=is_ready)) is not None:
                return why
            if is_ready and (watchdog.is_sick, watchdog.is_lost) != (self.condition.is_sick, self.condition.is_lost):
                log.warning("engine %s %s", self._called(self.pid), "is silent" if watchdog.is_sick else "is heard again")
                self._change(replace(self.condition, is_sick=watchdog.is_sick, is_lost=watchdog.is_lost))

    def _called(self, pid: int | None) -> str:
        """Return what the log calls an engine: by its process, or, where that is elsewhere, by its replica."""
        return self.name if pid is None else str(pid)

    def _attach(self, ready: Ready, channel: EngineChannel) -> None:
        if self._folder not in (None, ready.folder):  # this time the fallback is served, or no longer
            self.client.fail_all(lambda: EngineDied(f"the engine ended, and {ready.model} is served now: ask again"))
        self._folder, self._ready_at, self._gone_at = ready.folder, asyncio.get_running_loop().time(), None
        self.client.attach(channel.send, ready.max_rows)
        self._change(EngineCondition(ready=ready))

    def _change(self, condition: EngineCondition) -> None:
        self.condition = condition
        self.on_change()


async def _drain(receiving: asyncio.Task[None], watchdog: Watchdog) -> None:
    """Receive the last messages of an engine that has ended, until none has come for DRAIN_SECONDS."""
    num_received = -1
    while num_received != watchdog.num_received and not receiving.done():
        num_received = watchdog.num_received
        await asyncio.wait({receiving}, timeout=DRAIN_SECONDS)
