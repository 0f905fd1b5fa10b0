"""Runs an engine for the front: receives messages, drives the loop, sends events.

One thread; it waits only when there is nothing to do.
"""

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import mlx.core as mx

from weft.engine.engine import Engine
from weft.engine.prefix import Canary
from weft.engine.sequence import Sequence
from weft.errors import GrammarRejected, RequestError
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Constraint
from weft.ipc.channel import EngineEnd
from weft.ipc.messages import (
    AskPrefixes,
    Cancel,
    EngineEvents,
    EngineStatus,
    Prefixes,
    PrefixNode,
    Shutdown,
    Submit,
    SubmitOutcome,
)

log = logging.getLogger("weft.engine")

IDLE_SECONDS = 0.5  # an idle engine sends its status this often
STATUS_SECONDS = 0.1
POLL_SECONDS = 0.002  # how often an idle engine checks for a compiled constraint or for data from disk
MAX_NODES_SENT = 2000
MAX_COMPILE_SECONDS = 15.0  # what the size limits admit takes a second, and four times that beside eight busy rows


@dataclass(frozen=True)
class Compiling:
    """A request whose constraint is being compiled."""

    submit: Submit
    future: Future[Constraint]
    since: float


class Host:
    """Connects an engine to the channel; `run` returns when the front sends Shutdown."""

    def __init__(
        self, engine: Engine, compiler: Compiler, channel: EngineEnd, clock: Callable[[], float], canary: Canary | None = None
    ) -> None:
        self.engine = engine
        self.compiler = compiler
        self.channel = channel
        self.clock = clock
        self.canary = canary
        self.compiling: list[Compiling] = []
        self.outcomes: list[SubmitOutcome] = []
        self.live: dict[int, Sequence] = {}
        self.is_running = True
        self._last_status: tuple[object, ...] = ()
        self._last_status_at = 0.0
        engine.on_events = self.send_events

    def run(self) -> None:
        """Receive, turn and send until the front sends Shutdown."""
        while self.is_running:
            self.receive()
            self.take_compiled()
            if not self.engine.idle:
                self.engine.turn()
            self.send_events()

    def receive(self) -> None:
        """Handle the front's messages; waits for one only when there is nothing else to do."""
        for message in self.channel.receive(self._patience()):
            match message:
                case Submit(constraint=None):
                    self._submit(message, None)
                case Submit(constraint=spec) if spec is not None:
                    self.compiling.append(Compiling(message, self.compiler.start(spec), self.clock()))
                case Cancel():
                    self._cancel(message)
                case AskPrefixes():
                    self.channel.send(prefixes_of(self.engine, message))
                case Shutdown():
                    self.is_running = False

    def take_compiled(self) -> None:
        """Queue the requests whose constraint is compiled; refuse those for which that failed or takes too long."""
        now = self.clock()
        for waiting in [one for one in self.compiling if one.future.done() or now - one.since > MAX_COMPILE_SECONDS]:
            self.compiling.remove(waiting)
            try:
                constraint = waiting.future.result(timeout=0)
            except TimeoutError:
                message = f"compiling the constraint takes longer than {MAX_COMPILE_SECONDS:g} seconds; make it smaller"
                self._refuse(waiting.submit, GrammarRejected(message))
            except RequestError as error:
                self._refuse(waiting.submit, error)
            except Exception as error:  # a border: whatever a foreign compiler raises ends this request alone
                log.exception("compiling a constraint failed")
                self._refuse(waiting.submit, GrammarRejected(f"the constraint could not be compiled: {error}"))
            else:
                self._submit(waiting.submit, constraint)

    def send_events(self) -> None:
        """Send the events of this turn, and the status when it changed."""
        tokens, prompts = self.engine.take_events(), self.engine.take_prompt_events()
        for event in tokens:
            if event.finish is not None:
                self.live.pop(event.sequence, None)
        outcomes, self.outcomes = self.outcomes, []
        status = self._status()
        if tokens or prompts or outcomes or status:
            self.channel.send(EngineEvents(outcomes, prompts, tokens, status))

    def _patience(self) -> float:
        """How long to wait for a message: not at all while there is work."""
        if not self.engine.idle:
            return POLL_SECONDS if self.engine.is_waiting_for_disk else 0.0
        if self.compiling:
            return POLL_SECONDS
        return 0.0 if self.canary is not None and self.canary.check() else IDLE_SECONDS

    def _cancel(self, message: Cancel) -> None:
        for one in [one for one in self.compiling if one.submit.numbers[0] in message.numbers]:
            one.future.cancel()  # one that has not begun gives its worker to the next
            self.compiling.remove(one)
        for number in message.numbers:
            if (sequence := self.live.get(number)) is not None:
                self.engine.cancel(sequence)

    def _submit(self, message: Submit, constraint: Constraint | None) -> None:
        try:
            sequences = self.engine.submit_all(message, constraint)
        except RequestError as error:  # the front checks the same; should it ever differ, this request alone is refused
            self._refuse(message, error)
            return
        self.live.update(zip(message.numbers, sequences, strict=True))
        if constraint is not None:
            self.outcomes.append(SubmitOutcome(message.numbers[0]))

    def _refuse(self, message: Submit, error: RequestError) -> None:
        self.outcomes.append(SubmitOutcome(message.numbers[0], str(error), error.param))

    def _status(self) -> EngineStatus | None:
        """The engine's status, when it changed and some time has passed, when all work is done, or now and then."""
        counts, now = self.engine.counts, self.clock()
        waited = now - self._last_status_at
        if waited < STATUS_SECONDS and counts != (0, 0):
            return None
        scheduler = self.engine.scheduler
        following = tuple(one.id for one in scheduler.following if one in scheduler.prompts)
        if (counts, following) == self._last_status and waited < IDLE_SECONDS:
            return None
        self._last_status, self._last_status_at = (counts, following), now
        prefilling = tuple(one.id for one in scheduler.prompts if one.id not in following)
        return EngineStatus(*counts, memory_in_use(self.engine), self._prefix_counters(), prefilling, following)

    def _prefix_counters(self) -> dict[str, int]:
        tree, disk, canary = self.engine.prefix.tree, self.engine.prefix.disk, self.canary
        counts = {"evicted": tree.num_evicted} if tree is not None else {}
        if canary is not None:
            counts |= {"checked": canary.num_checked, "wrong": canary.num_wrong}
        if disk is not None:
            names = ("written", "loaded", "damaged", "foreign", "evicted", "skipped")
            counts |= {f"disk_{name}": getattr(disk, f"num_{name}") for name in names}
        return counts


def memory_in_use(engine: Engine) -> dict[str, int]:
    """Bytes by kind, as the device's allocator and the slabs count them, and how much of the budget is promised."""
    budget = engine.budget
    promised = {"reserve": budget.reserve_bytes, "promised": budget.reserved(engine.scheduler.running)}
    return ({} if budget.budget_bytes is None else {"budget": budget.budget_bytes, **promised}) | {
        "weights": engine.adapter.weights_bytes,
        "rows": engine.runner.pool.bytes_held,
        "prefixes": engine.prefix.held_bytes,
        "active": mx.get_active_memory(),
        "reusable": mx.get_cache_memory(),
        "peak": mx.get_peak_memory(),
    }


def prefixes_of(engine: Engine, request: AskPrefixes) -> Prefixes:
    """The cached prefixes as a message, after clearing them where the request says so."""
    tree, disk = engine.prefix.tree, engine.prefix.disk
    if tree is None:
        return Prefixes(request.number, (), 0, 0, 0)
    num_cleared = engine.prefix.clear() if request.clear else 0
    now, salted = tree.clock(), {id(root) for salt, root in tree.roots() if salt}
    nodes = tuple(
        PrefixNode(
            number=node.number,
            parent=(node.parent.number or None) if node.parent is not None else None,
            length=node.length,
            tokens=node.tokens,
            nbytes=node.nbytes,
            has_checkpoint=node.checkpoint is not None,
            pins=node.pins,
            hits=node.hits,
            idle_seconds=now - node.used_at,
            is_salted=id(node.path()[0].parent) in salted,
            is_on_disk=disk is not None and disk.has(node.key),
        )
        for node in itertools.islice(tree.nodes(), MAX_NODES_SENT)
    )
    sizes = (len(tree), engine.prefix.held_bytes, engine.config.cache_bytes, disk.held_bytes if disk is not None else 0)
    return Prefixes(request.number, nodes, *sizes, num_cleared)
