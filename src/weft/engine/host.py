"""The engine process's main thread: receives messages of the front process, runs engine turns, sends events back.

One thread; when there is nothing to do it verifies cached prefixes, then waits.
"""

import logging
import math
import random
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import msgspec

from weft.engine.engine import Engine
from weft.engine.lockstep import AgreedCompiled, CompileVerdict, MessageChannel
from weft.engine.prefix import PrefixSharing
from weft.engine.prefix_reports import PrefixReports
from weft.engine.sequence import Sequence
from weft.errors import GrammarRejected, RequestError, RowFailed
from weft.grammar.compiler import Compiler
from weft.ipc.messages import (
    IMAGE_KEYS,
    AskPrefixes,
    Cancel,
    EngineEvents,
    EngineStatus,
    Shutdown,
    Submit,
    SubmitOutcome,
    TokenEvent,
)
from weft.memory.heap import HeapKeeper
from weft.memory.prefix_tree import Node, PrefixTree
from weft.model.saved_state import LayerCaches, SavedState, save_block, save_checkpoint

log = logging.getLogger("weft.engine")

IDLE_SECONDS = 0.5  # an idle engine sends its status this often
STATUS_SECONDS = 0.1
POLL_SECONDS = 0.002  # how often an idle engine checks for a compiled constraint or for data from disk
MAX_COMPILE_SECONDS = 15.0  # what the size limits admit takes a second, and four times that beside eight busy rows
TOLERANCE = 1e-3  # of a cached state's largest value; on CPU computing it again gives the same bits, elsewhere nearly


@dataclass(frozen=True)
class Compiling:
    """A request whose constraint is being compiled and replayed, with the future of its sequences and the start time."""

    submit: Submit
    future: Future[list[Sequence]]
    since: float
    is_private: bool = False  # its grammar is not shared
    broken: Sequence | None = None  # the sequence whose answer it continues

    def is_due(self, now: float) -> bool:
        """Whether it is done or takes over 15 seconds; the replay of a long answer may take more."""
        return self.future.done() or (now - self.since > MAX_COMPILE_SECONDS and not self.submit.emitted)

    @property
    def verdict(self) -> CompileVerdict:
        if not self.future.done():
            return "late"
        return "compiled" if self.future.exception() is None else "refused"

    def result(self, verdict: CompileVerdict) -> list[Sequence]:
        """Return the sequences if the verdict lets it, waiting for them; raise what compiling did, or TimeoutError."""
        if verdict == "late":
            raise TimeoutError
        if verdict == "refused" and self.future.exception() is None:  # its trial is limited by time, and another rank's failed
            raise GrammarRejected("another rank refuses it")
        return self.future.result()


class Host:
    """Connects an engine to the channel of the front process; `run` serves until the front sends Shutdown."""

    def __init__(
        self, engine: Engine, compiler: Compiler, channel: MessageChannel, *, has_canary: bool, has_reports: bool = False
    ) -> None:
        self.engine = engine
        self.compiler = compiler
        self.channel = channel
        self.clock = engine.clock
        tree = engine.prefix.tree
        self.canary = Canary(engine.prefix, tree) if has_canary and tree is not None else None
        self.reports = PrefixReports(tree) if has_reports and tree is not None else None
        self.heap = HeapKeeper()
        self.compiling: list[Compiling] = []
        self.outcomes: list[SubmitOutcome] = []
        self.failures: list[TokenEvent] = []  # the ends of sequences that the engine has not got
        self.live: dict[int, Sequence] = {}
        self.is_running = True
        self._last_status: tuple[object, ...] = ()
        self._last_status_at = 0.0
        engine.on_events = self.send_events

    def run(self) -> None:
        while self.is_running:
            self.receive()
            self.take_compiled()
            if not self.engine.idle:
                self.engine.turn()
            self.send_events()

    def receive(self) -> None:
        """Handle the front's messages; waits up to 0.5 s if idle, 2 ms if only grammars or disk loads are awaited, else not."""
        for message in self.channel.receive(self._patience()):
            match message:
                case Submit(constraint=None):
                    self._submit(message)
                case Submit():
                    self._compile(message)
                case Cancel():
                    self._cancel(message)
                case AskPrefixes():
                    self.channel.send(self.engine.prefix.answer(message, self.engine.config.cache_bytes))
                case Shutdown():
                    self.is_running = False

    def take_compiled(self) -> None:
        """Queue requests whose constraint is ready; refuse or end those whose compilation or replay failed or takes too long."""
        for waiting, verdict in self._due():
            self.compiling.remove(waiting)
            try:
                sequences = waiting.result(verdict)
            except TimeoutError:
                message = f"compiling the constraint takes longer than {MAX_COMPILE_SECONDS:g} seconds; make it smaller"
                self._refuse(waiting.submit, GrammarRejected(message))
            except RequestError as error:
                self._refuse(waiting.submit, error)
            except RowFailed as error:
                self._fail_replay(waiting, error)
            except Exception as error:  # a border: whatever a foreign compiler raises ends this request alone
                log.exception("compiling a constraint failed")
                self._refuse(waiting.submit, GrammarRejected(f"the constraint could not be compiled: {error}"))
            else:
                if waiting.broken is not None:
                    sequences[0].take_timings(waiting.broken)
                self._queue(waiting.submit, sequences)
                self.outcomes.append(SubmitOutcome(waiting.submit.numbers[0]))

    def _due(self) -> list[tuple[Compiling, CompileVerdict]]:
        """Return the requests to be taken now, and what became of their constraints; in a sharded engine at rank 0."""
        now = self.clock()
        due = [(place, one.verdict) for place, one in enumerate(self.compiling) if one.is_due(now)]
        if self.engine.lockstep is not None and self.compiling:
            due = self.engine.lockstep.agree(AgreedCompiled(due)).due
        return [(self.compiling[place], verdict) for place, verdict in due]

    def send_events(self) -> None:
        """Send new tokens, prompt progress and submit outcomes to the front, with the status if it is due; nothing if empty."""
        tokens, prompts = self.engine.take_events(), self.engine.take_prompt_events()
        for event in [event for event in tokens if event.finish is not None]:
            ended = self.live.pop(event.sequence, None)
            if ended is not None and event.finish == "error" and ended.request.constraint is not None:
                self.compiler.forget(ended.request.constraint, ended.request.owner)
                if ended.constraint is not None and ended.constraint.may_be_broken_by_others:
                    self._restart(ended)
                    tokens.remove(event)
        tokens, self.failures = self.failures + tokens, []
        outcomes, self.outcomes = self.outcomes, []
        status = self._status()
        kept, gone = ([], []) if self.reports is None else self.reports.take()
        if tokens or prompts or outcomes or status or kept or gone:
            self.channel.send(EngineEvents(outcomes, prompts, tokens, status, kept, gone))

    def _patience(self) -> float:
        """Return the seconds `receive` may wait: 0 with work to do, a poll interval while disk or grammars are awaited."""
        if not self.engine.idle:
            return POLL_SECONDS if self.engine.is_waiting_for_disk else 0.0
        if self.compiling:
            return POLL_SECONDS
        if self.canary is not None and self.canary.check():
            return 0.0
        self.compiler.cache.drop_stale()  # now nobody waits for it
        self.heap.look()
        return IDLE_SECONDS

    def _cancel(self, message: Cancel) -> None:
        for one in [one for one in self.compiling if one.submit.numbers[0] in message.numbers]:
            one.future.cancel()  # one that has not begun gives its worker to the next
            self.compiling.remove(one)
        for number in message.numbers:
            if (sequence := self.live.get(number)) is not None:
                self.engine.cancel(sequence)

    def _submit(self, message: Submit) -> None:
        try:
            self._queue(message, self.engine.prepare(message))
        except RequestError as error:  # the front checks the same; should it ever differ, this request alone is refused
            self._refuse(message, error)

    def _compile(self, message: Submit, *, is_private: bool = False, broken: Sequence | None = None) -> None:
        assert message.constraint is not None, "there is something to compile"
        prepare, is_replay = partial(self.engine.prepare, message), bool(message.emitted)
        future = self.compiler.start(message.constraint, prepare, message.owner, is_replay=is_replay, is_private=is_private)
        self.compiling.append(Compiling(message, future, self.clock(), is_private, broken))

    def _restart(self, broken: Sequence) -> None:
        """Start a sequence again, after the tokens it has emitted, with a grammar of its own instead of the one that broke.

        Rows under the same grammar share a lexer, and when one of them exhausts it, it is broken for all of them.
        """
        log.warning("sequence %d goes on with a grammar of its own: %s", broken.id, broken.error)
        samplings = (msgspec.structs.replace(broken.sampling, prompt_logprobs=None),)  # they were sent
        emitted = (tuple(broken.output),)
        message = msgspec.structs.replace(broken.request, numbers=(broken.id,), samplings=samplings, emitted=emitted)
        message = msgspec.structs.replace(message, speculate=False)  # the answer may never go where a draft exhausted the lexer
        self._compile(message, is_private=True, broken=broken)

    def _fail_replay(self, failed: Compiling, error: RowFailed) -> None:
        """Replay a request's emitted tokens again, through a grammar of its own; if this has failed, end its sequences."""
        assert failed.submit.constraint is not None, "only constraints are replayed"
        self.compiler.forget(failed.submit.constraint, failed.submit.owner)
        if failed.is_private:
            end = TokenEvent(0, None, finish="error", error=str(error), is_refused=True)
            self.failures += [msgspec.structs.replace(end, sequence=number) for number in failed.submit.numbers]
        else:
            self._compile(failed.submit, is_private=True, broken=failed.broken)

    def _queue(self, message: Submit, sequences: list[Sequence]) -> None:
        self.engine.queue(sequences)
        self.live.update(zip(message.numbers, sequences, strict=True))

    def _refuse(self, message: Submit, error: RequestError) -> None:
        self.outcomes.append(SubmitOutcome(message.numbers[0], str(error), error.param))

    def _status(self) -> EngineStatus | None:
        """Return the engine's status if it changed (at most every 0.1 s while busy) or 0.5 s have passed; otherwise None."""
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
        caches = memory_in_use(self.engine), self._prefix_counters()
        alone, drafts = self.engine.runner.num_alone, self.engine.speculation
        accepted_at = tuple(drafts.accepted_at)
        images = {} if (kept := self.engine.runner.images) is None else kept.counters
        return EngineStatus(
            *counts, *caches, prefilling, following, alone, drafts.counts, drafts.num_drafts, accepted_at, images,
            seconds_per_token=self.engine.runner.prefill_rate.seconds_per_token, queued_tokens=scheduler.num_queued_tokens,
        )  # fmt: skip

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
    """Return bytes in use by kind (weights, rows, prefixes, MLX allocator) and, if there is a budget, its reservations."""
    budget = engine.budget
    promised = {"reserve": budget.reserve_bytes, "promised": budget.reserved(engine.scheduler.running)}
    return ({} if budget.budget_bytes is None else {"budget": budget.budget_bytes, **promised}) | {
        "weights": engine.adapter.weights_bytes,
        "rows": engine.runner.pool.bytes_held,
        "prefixes": engine.prefix.held_bytes,
        **({} if engine.runner.images is None else {"images": engine.runner.images.held_bytes}),
        "active": mx.get_active_memory(),
        "reusable": mx.get_cache_memory(),
        "peak": mx.get_peak_memory(),
    }


class Canary:
    """Verifies cached prefixes while the engine is idle: recomputes cached prompts chunk by chunk and compares the states.

    A chunk that differs is invalidated with all its descendants, counted and logged. Each call checks one chunk, so that a
    request which arrives meanwhile waits for no more than that.
    """

    def __init__(self, prefix: PrefixSharing, tree: PrefixTree, chance: random.Random | None = None) -> None:
        self.prefix = prefix
        self.tree = tree
        self.chance = chance or random.Random()
        self.num_checked = 0  # chunks
        self.num_wrong = 0
        self._path: list[Node] = []  # nodes of the path that are still to be checked
        self._caches: LayerCaches = []
        self._checked: set[int] = set()  # numbers of the nodes that were right: they do not change

    def check(self) -> bool:
        """Recompute one cached chunk and invalidate its subtree if it differs; returns False if nothing is left to check."""
        if not self._path and not self._choose_path():
            return False
        node, self._path = self._path[0], self._path[1:]
        if node.is_detached or node.parent is None or node.parent.children.get(node.tokens) is not node:
            self._path = []  # it was evicted meanwhile
            return True
        self.prefix.runner.adapter.prefill(list(node.tokens), self._caches)[0].finish()
        block, checkpoint = save_block(self._caches, node.parent.length, node.length), save_checkpoint(self._caches)
        self.num_checked += 1
        worst = max(_worst_difference(node.block, block), _worst_difference(node.checkpoint, checkpoint))
        if worst <= TOLERANCE:
            self._checked.add(node.number)
            return True
        self._path = []
        self.num_wrong += 1
        log.error(
            "a cached prefix differs when it is computed again: tokens %d to %d by %.3g of their size; "
            "it and what stands on it (%d chunks) are invalidated",
            node.parent.length, node.length, worst, self.prefix.invalidate_subtree(node),
        )  # fmt: skip
        return True

    def _choose_path(self) -> bool:
        nodes = [node for node in self.tree.nodes() if node.checkpoint is not None and node.number not in self._checked]
        nodes = [node for node in nodes if all(max(one.tokens) < IMAGE_KEYS for one in node.path())]  # pixels are not kept
        if not nodes:
            return False
        self._path = self.chance.choice(nodes).path()
        self._caches = self.prefix.runner.adapter.new_caches(self._path[-1].length + 1)
        self._checked &= {node.number for node in self.tree.nodes()}
        return True


def _worst_difference(cached: object, again: SavedState) -> float:
    """Return the largest relative difference of two states; 0 if `cached` was dropped, infinity if shapes or dtypes differ."""
    if not isinstance(cached, SavedState):
        return 0.0  # it was dropped
    mine, right = cached.arrays, again.arrays
    if [(one.shape, one.dtype) for one in mine] != [(one.shape, one.dtype) for one in right]:
        return math.inf
    return max((_difference(one, other) for one, other in zip(mine, right, strict=True)), default=0.0)


def _difference(mine: mx.array, right: mx.array) -> float:
    if not mine.size or mx.array_equal(mine, right):  # sync: nobody waits for this
        return 0.0
    largest = mx.maximum(mx.abs(right).max().astype(mx.float32), 1e-9)
    found = float(mx.abs(mine.astype(mx.float32) - right.astype(mx.float32)).max() / largest)
    return math.inf if math.isnan(found) else found
