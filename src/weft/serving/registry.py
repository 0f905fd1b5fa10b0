"""Lists local and built-in models, and loads and unloads models while the server runs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from weft.errors import ModelConflict, ModelError, RequestCancelled, ServerStopping, UnknownModel
from weft.serving.fit import Fit, free_bytes, needed_bytes
from weft.serving.model import LOAD_HINT, ServedModel
from weft.serving.service import Service

if TYPE_CHECKING:
    from weft.model.resolve import LocalModel

DRAIN_TICK_SECONDS = 0.05


class ModelRegistry:
    """Loads and unloads models in a running server; each engine gets at most `limit_bytes` of memory, None for no limit."""

    def __init__(self, service: Service, limit_bytes: int | None, drain_seconds: float) -> None:
        self.service = service
        self.limit_bytes = limit_bytes
        self.drain_seconds = drain_seconds
        self._unloading: dict[ServedModel, asyncio.Task[None]] = {}
        self._names = {model.name for model in service.models}  # folders and files that were served are found again
        self._identities: dict[str, str] = {}  # by the name of a served model; one model may have many names

    async def options(self) -> list[tuple[LocalModel, Fit, bool]]:
        """List local, built-in and once-served models: each with whether it fits into free memory and whether it is loaded."""
        free, names = self.free_bytes, {model.name for model in self.service.models}
        found = await asyncio.to_thread(_find_models, self._names | names)
        return [(model, Fit(needed, free), model.name in names) for model, needed in found]

    @property
    def free_bytes(self) -> int | None:
        models = self.service.models
        upcoming = sum(model.needed_bytes for model in models if model.is_loading)
        return free_bytes(self.limit_bytes, [model.memory for model in models], upcoming)

    async def load(self, name: str, *, fetch: bool = False, force: bool = False) -> tuple[ServedModel, bool]:
        """Start to load a model in the background; returns the served model, and False if it was served or loading already.

        Raises UnknownModel where there is none, or not on this machine and not to be fetched; ModelConflict where it does
        not fit and is not forced, or is being unloaded.
        """
        found, needed = (None, None) if self._find_served(name) else await asyncio.to_thread(_look_up, name)
        identity = await self._identify(name)
        if self.service.is_stopping:
            raise ServerStopping("the server is being stopped; come again", retry_after=5)
        if (served := self._find_served(name) or self._find_alias(identity)) is not None:
            if served.is_leaving:
                raise ModelConflict(f"{name} is just being unloaded; load it again in a few seconds", "model")
            return served, False
        if found is not None and found.folder is None and not fetch:
            message = f'{name} is not on this machine: run `weft pull {name}`, or send "fetch": true to have it downloaded'
            raise UnknownModel(message, "fetch")
        fit = Fit(needed, self.free_bytes)
        if fit.verdict == "does not fit" and not force:
            raise ModelConflict(
                f"{name} needs at least {fit.needed_bytes} bytes of memory and {fit.free_bytes} are free: unload another model, "
                'give engines more with --memory, or send "force": true to try all the same', "force"
            )  # fmt: skip
        self._identities[name] = identity  # from here on nobody else loads it under another name
        return await self._add(name, needed or 0), True

    async def _identify(self, name: str) -> str:
        """Return what all names of this model have in common; that of the served models is then known too."""
        unknown = {model.name for model in self.service.models} - self._identities.keys()
        found = await asyncio.to_thread(_identities, {*unknown, name})
        self._identities |= {one: found[one] for one in unknown}
        return found[name]

    def _find_alias(self, identity: str) -> ServedModel | None:
        """Return the served model with this identity, whatever its name; None if there is none."""
        same = (model.name for model in self.service.models if self._identities.get(model.name) == identity)
        return next(filter(None, map(self._find_served, same)), None)

    async def _add(self, name: str, needed: int) -> ServedModel:
        model = self.service.make(name)
        model.is_guest, model.needed_bytes = True, needed
        self._names.add(name)
        failed = [one for one in self.service.models if one.name == name]
        self.service.add(model)
        for one in failed:
            await self.service.remove(one)
        return model

    async def unload(self, name: str) -> None:
        """Refuse new requests, let running ones finish for a while, cancel the rest; returns when the engine has ended."""
        model = next((model for model in self.service.models if model.name == name), None)
        if model is None:
            raise UnknownModel(f"no model {name!r} is loaded here; {LOAD_HINT}", "model")
        if model not in self._unloading:
            model.leave()
            self._unloading[model] = asyncio.create_task(self._end(model))
        await asyncio.shield(self._unloading[model])  # it goes on, whether or not the client waits for it

    async def _end(self, model: ServedModel) -> None:
        try:
            deadline = time.monotonic() + self.drain_seconds
            while self.service.submitted(model) and time.monotonic() < deadline:
                await asyncio.sleep(DRAIN_TICK_SECONDS)
            for request in self.service.submitted(model):
                request.abandon(RequestCancelled(f"{model.name} was unloaded before this answer was complete"))
            await self.service.remove(model)
        finally:
            del self._unloading[model]

    def _find_served(self, name: str) -> ServedModel | None:
        """Return the model of this name that is loaded, loading or unloading; None if there is none or it has failed."""
        return next((model for model in self.service.models if model.name == name and model.failed is None), None)


def _look_up(name: str) -> tuple[LocalModel, int | None]:
    from weft.model.resolve import locate

    try:
        model = locate(name)
        return model, needed_bytes(model)
    except (ModelError, OSError, ValueError, RuntimeError) as error:  # any text may come as a name, also ~nobody and \0
        raise UnknownModel(str(error), "model") from error


def _identities(names: set[str]) -> dict[str, str]:
    from weft.model.resolve import identity

    return {name: identity(name) for name in names}


def _find_models(names: set[str]) -> list[tuple[LocalModel, int | None]]:
    """List local and built-in models, and others of `names` that can be located, with the bytes that each needs."""
    from weft.model.resolve import local_models

    found = {model.name: (model, needed_bytes(model)) for model in local_models()}
    for name in sorted(names - found.keys()):
        try:
            found[name] = _look_up(name)
        except UnknownModel:  # it was there; it is gone, or was never a model
            continue
    return list(found.values())
