"""An engine at the end of a channel: hears what the front asks, turns, tells what happened.

The only place of the engine that knows there is a front. One thread; waits only when there is nothing to do.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import mlx.core as mx

from weft.engine.canary import Canary
from weft.engine.engine import Engine
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
from weft.memory.disk import DiskTier
from weft.memory.prefix_tree import Node

log = logging.getLogger("weft.engine")

IDLE_SECONDS = 0.5  # an idle engine shows itself this often
STATUS_SECONDS = 0.1
COMPILING_SECONDS = 0.002  # an idle engine looks this often whether a constraint is compiled, or something has come from disk
MAX_NODES_TOLD = 2000
MAX_COMPILE_SECONDS = 15.0  # what the size limits let through takes a second, and four times that beside eight busy rows


@dataclass(frozen=True)
class Compiling:
    """A request that waits for its constraint."""

    submit: Submit
    future: Future[Constraint]
    since: float


class Host:
    """Runs an engine for the front."""

    def __init__(self, engine: Engine, compiler: Compiler, channel: EngineEnd, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.compiler = compiler
        self.channel = channel
        self.clock = clock
        self.compiling: list[Compiling] = []
        self.verdicts: list[SubmitOutcome] = []
        self.live: dict[int, Sequence] = {}
        engine.on_settled = self.tell
        self.canary: Canary | None = None
        self.running = True
        self._told: tuple[tuple[int, int], tuple[int, ...]] | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Until the front says Shutdown."""
        while self.running:
            self.hear()
            self.take_compiled()
            if not self.engine.idle:
                self.engine.turn()
            self.tell()

    def hear(self) -> None:
        """Take what the front sent; waits only when there is nothing else to do."""
        for message in self.channel.receive(self._patience()):
            match message:
                case Submit():
                    self._hear_submit(message)
                case Cancel():
                    self._hear_cancel(message)
                case AskPrefixes():
                    self.channel.send(prefixes_of(self.engine, message))
                case Shutdown():
                    self.running = False

    def _patience(self) -> float:
        """How long it may wait for a message: not at all while there is anything to do."""
        if not self.engine.idle:
            return COMPILING_SECONDS if self.engine.prefix.is_loading else 0.0
        if self.compiling:
            return COMPILING_SECONDS
        return 0.0 if self.canary is not None and self.canary.check() else IDLE_SECONDS

    def take_compiled(self) -> None:
        """Queue the requests whose constraint is ready; refuse those that can not have one, or not in time."""
        for waiting in list(self.compiling):
            if waiting.future.done():
                self.compiling.remove(waiting)
                self._settle_compiled(waiting)
            elif self.clock() - waiting.since > MAX_COMPILE_SECONDS:
                self.compiling.remove(waiting)
                message = f"compiling the constraint takes longer than {MAX_COMPILE_SECONDS:g} seconds; make it smaller"
                self._refuse(waiting.submit, GrammarRejected(message))

    def tell(self) -> None:
        """Send what happened, and how many rows there are when that changed."""
        tokens, prompts = self.engine.take_events(), self.engine.take_prompt_events()
        for event in tokens:
            if event.finish is not None:
                self.live.pop(event.sequence, None)
        verdicts, self.verdicts = self.verdicts, []
        status = self._status()
        if tokens or prompts or verdicts or status:
            self.channel.send(EngineEvents(verdicts, prompts, tokens, status))

    def _hear_submit(self, message: Submit) -> None:
        if message.constraint is None:
            self._submit(message, None)
        else:
            self.compiling.append(Compiling(message, self.compiler.start(message.constraint), self.clock()))

    def _hear_cancel(self, message: Cancel) -> None:
        for one in [one for one in self.compiling if one.submit.numbers[0] in message.numbers]:
            one.future.cancel()  # if it has not begun: those behind it need not wait for nobody's compile
            self.compiling.remove(one)
        for number in message.numbers:
            if (sequence := self.live.get(number)) is not None:
                self.engine.cancel(sequence)

    def _settle_compiled(self, waiting: Compiling) -> None:
        try:
            constraint = waiting.future.result()
        except RequestError as error:
            self._refuse(waiting.submit, error)
        except Exception as error:  # a border: whatever a foreign compiler raises ends this request alone
            log.exception("compiling a constraint failed")
            self._refuse(waiting.submit, GrammarRejected(f"the constraint could not be compiled: {error}"))
        else:
            self._submit(waiting.submit, constraint)

    def _submit(self, message: Submit, constraint: Constraint | None) -> None:
        try:
            sequences = self.engine.take(message, constraint)
        except RequestError as error:  # the front checks the same; should it ever differ, this request alone is told
            self._refuse(message, error)
            return
        self.live.update(zip(message.numbers, sequences, strict=True))
        if constraint is not None:
            self.verdicts.append(SubmitOutcome(message.numbers[0]))

    def _refuse(self, message: Submit, error: RequestError) -> None:
        self.verdicts.append(SubmitOutcome(message.numbers[0], str(error), error.param))

    def _status(self) -> EngineStatus | None:
        """The counts, when they changed and some time has passed, or when all work is done, or now and then."""
        counts, now = self.engine.counts, self.clock()
        waited = now - self._told_at
        if waited < STATUS_SECONDS and counts != (0, 0):
            return None
        prompts = self.engine.scheduler.prompts
        following = tuple(one.id for one in prompts if one.is_following)
        news = (counts, following)
        if news == self._told and waited < IDLE_SECONDS:
            return None
        self._told, self._told_at = news, now
        prefilling = tuple(one.id for one in prompts if not one.is_following)
        return EngineStatus(*counts, memory_in_use(self.engine), self._prefixes(), prefilling, following)

    def _prefixes(self) -> dict[str, int]:
        """What happened to computed prompts so far."""
        tree, disk, canary = self.engine.prefix.tree, self.engine.prefix.disk, self.canary
        counts = {"evicted": tree.num_evicted} if tree is not None else {}
        if canary is not None:
            counts |= {"checked": canary.num_checked, "wrong": canary.num_wrong}
        if disk is not None:
            names = ("written", "loaded", "damaged", "foreign", "evicted", "skipped")
            counts |= {f"disk_{name}": getattr(disk, f"num_{name}") for name in names}
        return counts


def memory_in_use(engine: Engine) -> dict[str, int]:
    """Bytes by kind, as the device's allocator and our slabs count them; and where there is a budget, what of it is promised."""
    budget = engine.budget
    promised = {
        "budget": budget.budget_bytes or 0,
        "reserve": budget.reserve_bytes,
        "promised": budget.reserved(engine.scheduler.running),
    }
    return ({} if budget.budget_bytes is None else promised) | {
        "weights": engine.adapter.weights_bytes,
        "rows": engine.runner.pool.bytes_held,
        "prefixes": engine.prefix.held_bytes,
        "active": mx.get_active_memory(),
        "reusable": mx.get_cache_memory(),
        "peak": mx.get_peak_memory(),
    }


def prefixes_of(engine: Engine, asked: AskPrefixes) -> Prefixes:
    """What is kept, told; forgotten first where that is asked."""
    tree, disk = engine.prefix.tree, engine.prefix.disk
    if tree is None:
        return Prefixes(asked.number, (), 0, 0, 0)
    num_cleared = engine.prefix.clear() if asked.clear else 0
    if disk is not None and asked.clear:
        disk.clear()
    now, salted = tree.clock(), {id(root) for salt, root in tree.roots() if salt}
    return Prefixes(
        asked.number,
        tuple(_told(node, now, salted, disk) for node in itertools.islice(tree.nodes(), MAX_NODES_TOLD)),
        len(tree),
        engine.prefix.held_bytes,
        engine.config.cache_bytes,
        disk.held_bytes if disk is not None else 0,
        num_cleared,
    )


def _told(node: Node, now: float, salted: set[int], disk: DiskTier | None) -> PrefixNode:
    assert node.parent is not None
    root = node.path()[0].parent
    return PrefixNode(
        number=node.number,
        parent=node.parent.number or None,
        length=node.length,
        tokens=node.tokens,
        nbytes=node.nbytes,
        has_checkpoint=node.checkpoint is not None,
        pins=node.pins,
        hits=node.hits,
        idle_seconds=now - node.used_at,
        is_salted=id(root) in salted,
        is_on_disk=disk is not None and disk.has(node.key),
    )
