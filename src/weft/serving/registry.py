"""Models brought in and taken out while the server runs: what there is, whether it fits, load, unload.

Asks `fit` what is on this machine and the service for everything that runs. HTTP stands above it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from weft.errors import ModelConflict, ModelError, RequestCancelled, ServerStopping, UnknownModel
from weft.serving import fit as fit
from weft.serving.fit import Fit
from weft.serving.service import LOAD_IT, ServedModel, Service

if TYPE_CHECKING:
    from weft.model.resolve import LocalModel

DRAIN_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class ModelOption:
    """A model that may be loaded."""

    model: LocalModel
    fit: Fit
    is_loaded: bool


class ModelRegistry:
    """Owns who is leaving. `limit_bytes` bounds each engine; None: what is there."""

    def __init__(self, service: Service, limit_bytes: int | None, drain_seconds: float) -> None:
        self.service = service
        self.limit_bytes = limit_bytes
        self.drain_seconds = drain_seconds
        self._leaving: dict[ServedModel, asyncio.Task[None]] = {}
        self._needed = WeakKeyDictionary[ServedModel, int]()  # what those that were brought in were reckoned with
        self._known = {served.name for served in service.models}  # folders and files that were served are found again

    async def choices(self) -> list[ModelOption]:
        """Every model on this machine."""
        free, names = self.free_bytes, {served.name for served in self.service.models}
        models = await asyncio.to_thread(_found, self._known | names)
        return [ModelOption(model, Fit(needed, free), model.name in names) for model, needed in models]

    @property
    def free_bytes(self) -> int | None:
        """What one more engine could have."""
        models = self.service.models
        coming = sum(self._needed.get(served, 0) for served in models if served.is_loading)
        return fit.free_bytes(self.limit_bytes, [served.memory for served in models], coming)

    async def load(self, name: str, *, fetch: bool = False, force: bool = False) -> tuple[ServedModel, bool]:
        """The model of this name, and whether it is only now brought up, in the background.

        Raises UnknownModel where there is none, or not on this machine and not to be fetched; ModelConflict where it does
        not fit and is not forced, or is just leaving.
        """
        model, needed = (None, None) if self._there(name) else await asyncio.to_thread(_looked_at, name)
        if self.service.is_stopping:
            raise ServerStopping("the server is being stopped; come again", retry_after=5)
        if (served := self._there(name)) is not None:
            if served.is_leaving:
                raise ModelConflict(f"{name} is just being unloaded; load it again in a few seconds", "model")
            return served, False
        if model is not None and model.folder is None and not fetch:
            message = f'{name} is not on this machine: run `weft pull {name}`, or send "fetch": true to have it downloaded'
            raise UnknownModel(message, "fetch")
        fit = Fit(needed, self.free_bytes)
        if fit.verdict == "does not fit" and not force:
            raise ModelConflict(
                f"{name} needs at least {fit.needed_bytes} bytes of memory and {fit.free_bytes} are free: unload another model, "
                'give engines more with --memory, or send "force": true to try all the same', "force"
            )  # fmt: skip
        return await self._bring_in(name, needed or 0), True

    async def _bring_in(self, name: str, needed: int) -> ServedModel:
        served = self.service.make(name)
        served.is_guest = True
        self._needed[served] = needed
        self._known.add(name)
        failed = [one for one in self.service.models if one.name == name]
        self.service.add(served)
        for one in failed:
            await self.service.remove(one)
        return served

    async def unload(self, name: str) -> None:
        """Take nothing new for a model, let its answers end for a while, then end its engine. Returns when it is gone."""
        served = next((served for served in self.service.models if served.name == name), None)
        if served is None:
            raise UnknownModel(f"no model {name!r} is loaded here; {LOAD_IT}", "model")
        if served not in self._leaving:
            served.leave()
            self._leaving[served] = asyncio.create_task(self._end(served))
        await asyncio.shield(self._leaving[served])  # it goes on, whether or not somebody waits for it

    async def _end(self, served: ServedModel) -> None:
        try:
            deadline = time.monotonic() + self.drain_seconds
            while self.service.answers_of(served) and time.monotonic() < deadline:
                await asyncio.sleep(DRAIN_TICK_SECONDS)
            for answer in self.service.answers_of(served):
                answer.abandon(RequestCancelled(f"{served.name} was unloaded before this answer was complete"))
            await self.service.remove(served)
        finally:
            del self._leaving[served]

    def _there(self, name: str) -> ServedModel | None:
        """The model of this name that is up, on its way or leaving; not one that has failed."""
        return next((served for served in self.service.models if served.name == name and served.failed is None), None)


def _looked_at(name: str) -> tuple[LocalModel, int | None]:
    from weft.model.resolve import locate  # here and below: a server starts sooner without

    try:
        model = locate(name)
        return model, fit.needed_bytes(model)
    except (ModelError, OSError, ValueError, RuntimeError) as error:  # any text may come as a name, also ~nobody and \0
        raise UnknownModel(str(error), "model") from error


def _found(known: set[str]) -> list[tuple[LocalModel, int | None]]:
    """The models on this machine, one of each name, and those of the known ones that are elsewhere on its disk."""
    from weft.model.resolve import local_models

    found = {model.name: (model, fit.needed_bytes(model)) for model in local_models()}
    for name in sorted(known - found.keys()):
        try:
            found[name] = _looked_at(name)
        except UnknownModel:  # it was there; it is gone, or was never a model
            continue
    return list(found.values())
