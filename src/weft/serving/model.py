"""A model as the front serves it: its pool of engines, its text codec once one of them is up, and its queue."""

import asyncio
import logging
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from weft.config import DRAFT_SOURCES
from weft.errors import EngineDied, EngineStarting, ServerStopping, UnknownModel, WeftError
from weft.ipc.messages import Ready
from weft.metrics import Metrics
from weft.serving.lifeline import DraftTotals
from weft.serving.pool import EnginePool
from weft.serving.queue import RequestQueue
from weft.serving.text_processes import TextProcesses
from weft.text.codec import Codec
from weft.text.image_writer import ImageWriter
from weft.text.types import LateSystem

log = logging.getLogger("weft.serving")

LOAD_HINT = "what `weft ls` lists can be loaded with `weft load NAME` or POST /v1/models/load"
NOT_CHOSEN = "--speculate leaves it out"  # why a source of draft tokens is not in use


class ServerScreen(Protocol):
    """Interface of what shows the user the server's address and how loading its models goes."""

    def serving(self, url: str) -> None: ...

    def loading(self, model: str, what: str, done: int, total: int) -> None: ...

    def ready(self, model: str, context: int, device: str, memory: dict[str, int], notice: str | None = None) -> None: ...

    def failed(self, model: str, message: str) -> None: ...


class ServedModel:
    """A served model: its name and state, its pool of engines, its text codec and its queue."""

    def __init__(
        self,
        name: str,
        pool: EnginePool,
        late_system: LateSystem = "fold",
        *,
        parse_special: bool = False,
        describes_tools: bool = True,
    ) -> None:
        self.name = name  # the fallback's, where that is served
        self.pool = pool
        self.codec: Codec | None = None
        self.failed: str | None = None
        self.is_stopping = False
        self.is_guest = False  # loaded on request: its failure is not the server's
        self.is_leaving = False  # being unloaded
        self.needed_bytes = 0  # to load it, where that was computed
        self.queue = RequestQueue()
        self.processes = TextProcesses()  # for the chat template, and for answers that are checked by schemas
        self._make_text_codec = partial(
            Codec,
            late_system=late_system,
            runner=self.processes,
            parse_special=parse_special,
            describes_tools=describes_tools,
        )
        self._counted_drafts = DraftTotals()  # those that are in the metrics
        self._folder: str | None = None  # of which the codec was made
        self.settled = asyncio.Event()  # it answers, or never will

    async def run(self, screen: ServerScreen) -> None:
        """Start the engine and follow its state, showing it on the screen, until the engine has failed for good."""
        self.pool.start()
        while self.failed is None:
            changed, condition = self.pool.changed, self.pool.condition
            if condition.ready is not None:
                await self._make_codec(condition.ready)
            else:
                self.failed = condition.failed
            self._show(screen)
            if self.failed is None:
                await changed.wait()

    async def _make_codec(self, ready: Ready) -> None:
        if ready.folder == self._folder:  # the same model in another process
            return
        try:
            self.codec = await asyncio.to_thread(self._make_text_codec, Path(ready.folder))
            self.name, self._folder = ready.model, ready.folder
        except Exception as error:  # a border: whatever is wrong with a model's files, nobody may wait for it
            is_known = isinstance(error, WeftError)
            log.error("the files of %s can not be read: %s", self.name, error, exc_info=None if is_known else error)
            self.failed = str(error)

    def _show(self, screen: ServerScreen) -> None:
        ready, loading = self.ready, self.pool.condition.loading
        if self.failed is not None:
            screen.failed(self.name, self.failed)
        elif ready is not None and self.is_ready:
            screen.ready(self.name, ready.limits.context_length, ready.device, ready.memory, self.notice)
        elif loading is not None:
            screen.loading(self.name, loading.what, loading.done, loading.total)
        if self.is_ready or self.failed is not None or self.is_leaving:
            self.settled.set()
        else:
            self.settled.clear()

    @property
    def ready(self) -> Ready | None:
        return self.pool.condition.ready

    @property
    def is_ready(self) -> bool:
        is_up = self.codec is not None and self.ready is not None and not self.pool.condition.is_sick
        return is_up and self.failed is None and not self.is_leaving

    @property
    def is_loading(self) -> bool:
        """Whether the model is not ready now but will be: it is being loaded or its engine is being replaced."""
        return not self.is_ready and self.failed is None and not self.is_stopping and not self.is_leaving

    @property
    def notice(self) -> str | None:
        """What the operator should know, as of the engine, of an MTP head that is not used, and of tool calls; else None."""
        ready, calls = self.ready, self.codec.calls if self.codec is not None else None
        refused_head = ready.no_speculation.get("mtp") if ready is not None else None
        notices = (
            ready.notice if ready is not None else None,
            f"its MTP head is not used: {refused_head}" if refused_head else None,
            f"it takes no images: {ready.no_vision}" if ready is not None and ready.no_vision else None,
            calls.notice if calls is not None else None,
        )
        return "; ".join(filter(None, notices)) or None

    @property
    def image_writer(self) -> ImageWriter | None:
        """How prompts hold images; None while that is unknown, and where the model reads text only."""
        return self.codec.images if self.codec is not None and self.ready is not None and self.ready.has_vision else None

    @property
    def unused_sources(self) -> dict[str, str]:
        """Why drafts come from no other sources than `ready.speculation`, by source; empty while no engine is ready."""
        if self.ready is None:
            return {}
        chosen, told = self.pool.settings.speculate, self.ready.no_speculation
        unused = [source for source in DRAFT_SOURCES if source not in self.ready.speculation]
        absent = {"mtp": "the model has no MTP head"}  # an engine says more only of one that it refused
        why = {source: absent.get(source, "this engine has none") if source in chosen else NOT_CHOSEN for source in unused}
        return {source: told.get(source, why[source]) for source in unused}

    @property
    def memory(self) -> dict[str, int]:
        return self.pool.status.memory or (self.ready.memory if self.ready is not None else {})

    def count_drafts(self, metrics: Metrics) -> None:
        """Add what was drafted since the last call to the metrics."""
        new, self._counted_drafts = self.pool.drafts - self._counted_drafts, self.pool.drafts
        metrics.drafts(self.name, new.num_drafts, new.accepted_at)
        metrics.draft_tokens(self.name, new.counts.drafted, new.counts.accepted)

    def leave(self) -> None:
        """Refuse new requests from now on, because the model is being unloaded; wakes requests that wait for it to be ready."""
        self.is_leaving = True
        self.settled.set()

    def require(self) -> tuple[Codec, Ready]:
        """Return the codec and the engine's Ready message. Raises EngineStarting, or why no answer can come."""
        condition = self.pool.condition
        if self.is_leaving:
            raise UnknownModel(f"{self.name} is not loaded any more; {LOAD_HINT}", "model")
        if self.failed is not None:
            raise EngineDied(f"{self.name} can not be served: {self.failed}")
        if self.is_stopping:
            raise ServerStopping("the server is being stopped; come again", retry_after=5)
        if self.codec is None or condition.ready is None or condition.is_sick:
            what = "its engine is silent" if condition.is_sick else condition.loading.what if condition.loading else "starting"
            raise EngineStarting(f"{self.name} is not ready yet ({what}); try again in a moment", retry_after=2)
        return self.codec, condition.ready

    def place(self, tenant: str, count: int, max_queue: int) -> AbstractContextManager[None]:
        """Reserve `count` of a tenant's places in the queue while prompts are encoded. Raises QueueFull, or as `require` does."""
        self.require()
        num_submitted, num_places = self.pool.dispatcher.num_of(tenant), self.pool.max_rows + max_queue
        return self.queue.place(self.name, tenant, count, num_submitted, num_places)
