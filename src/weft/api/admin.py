"""How the server is: health, models, status, metrics, and text ⇄ ids for those who count tokens themselves."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.api.body import read_json
from weft.api.dialect import request_ids
from weft.api.openai.chat import messages_of
from weft.api.openai.schema import DetokenizeRequest, LoadRequest, TokenizeRequest, UnloadRequest, converted
from weft.api.openapi import document
from weft.api.problems import BorderError
from weft.config import ServerConfig
from weft.errors import InvalidRequest
from weft.metrics import CONTENT_TYPE
from weft.serving.model import ServedModel
from weft.serving.registry import ModelOption, ModelRegistry
from weft.serving.service import Service
from weft.text.types import Conversation


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as a JSON body."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


class Status:
    """The endpoints around the generating ones."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.started = time.time()
        self.registry = ModelRegistry(service, config.memory and config.memory * 2**20, config.drain_seconds)

    async def health(self, request: Request) -> Response:  # noqa: ARG002 - the endpoints' signature
        """200 when every model the server was started with answers, else 503 and how far each is."""
        models = {served.name: condition_of(served) for served in self.service.models}
        states = {condition_of(served)["status"] for served in self.service.models if not served.is_guest}
        states |= {"stopping"} if self.service.is_stopping else set()
        status = next((state for state in ("failed", "stopping", "sick", "loading") if state in states), "ready")
        code, headers = (200, {}) if status == "ready" else (503, {"retry-after": "2"})
        return json_response({"status": status, "models": models}, code, headers)

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        """Everything served, those that answer first; one list for OpenAI's and Anthropic's clients."""
        rows = [self._model(served) for served in sorted(self.service.models, key=lambda served: not served.is_ready)]
        ids = [row["id"] for row in rows]
        return json_response(
            {
                "object": "list",
                "data": rows,
                "has_more": False,
                "first_id": next(iter(ids), None),
                "last_id": next(reversed(ids), None),
            },
        )

    async def model(self, request: Request) -> Response:
        """One of them."""
        return json_response(self._model(self.service.find(request.path_params["id"])))

    async def available(self, request: Request) -> Response:  # noqa: ARG002
        """The models on this machine, and whether each would fit beside those that are loaded."""
        options = await self.registry.options()
        return json_response(
            {"object": "list", "data": [_option(option) for option in options], "free_bytes": self.registry.free_bytes}
        )

    async def load(self, request: Request) -> Response:
        """Bring a model up: 202 when that has begun, 200 when it is there already."""
        asked = converted(await self._body(request), LoadRequest)
        served, is_new = await self.registry.load(asked.model, fetch=bool(asked.fetch), force=bool(asked.force))
        return json_response(self._model_status(served), 202 if is_new else 200)

    async def unload(self, request: Request) -> Response:
        """Take a model out. Its answers may end first; the reply comes when its memory is free."""
        asked = converted(await self._body(request), UnloadRequest)
        await self.registry.unload(asked.model)
        return json_response({"id": asked.model, "object": "model", "status": {"value": "unloaded"}})

    async def status(self, request: Request) -> Response:  # noqa: ARG002
        """The state of the house, for tools and for the curious."""
        engines = [served.supervisor for served in self.service.models]
        return json_response(
            {
                "version": __version__,
                "uptime_seconds": round(time.time() - self.started, 1),
                "pid": os.getpid(),
                "engine_pid": engines[0].pid if engines else None,
                "engine_restarts": sum(engine.restarts for engine in engines),
                "rows_running": sum(engine.status.running for engine in engines),
                "rows_waiting": sum(engine.status.waiting for engine in engines),
                "requests": len(self.service.submitted()),
                "memory": _sum([served.memory for served in self.service.models]),
                "models": [self._model_status(served) for served in self.service.models],
            }
        )

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Prometheus' text format."""
        metrics = self.service.metrics
        for served in self.service.models:
            metrics.engine(served.name, served.is_ready, served.supervisor.restarts)
            metrics.rows(served.name, served.supervisor.status.running, served.supervisor.status.waiting)
            metrics.memory(served.name, served.memory)
            metrics.prefixes(served.name, served.supervisor.status.prefixes)
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        """The document of all this."""
        return json_response(document(__version__))

    async def cancel(self, request: Request) -> Response:
        """End a request by its id (x-request-id, or the id of its reply)."""
        given = request.path_params["id"]
        if any(self.service.cancel(request_id) for request_id in request_ids(given)):
            return json_response({"id": given, "cancelled": True})
        raise BorderError(404, "request_not_found", f"No request {given!r} is running; it may have ended already.")

    async def tokenize(self, request: Request) -> Response:
        """Text or messages → ids."""
        asked = converted(await self._body(request), TokenizeRequest)
        codec, ready = self.service.find(asked.model).require()
        if asked.messages is not None:
            conversation = Conversation(messages_of(asked.messages))
            ids = (await asyncio.to_thread(codec.encode, conversation)).ids
        elif (text := asked.prompt if asked.prompt is not None else asked.content) is not None:
            special = asked.add_special_tokens is not False
            ids = await asyncio.to_thread(codec.tokenizer.encode, text, add_special_tokens=special)
        else:
            raise InvalidRequest("give a prompt, a content or messages to tokenize", "prompt")
        return json_response({"count": len(ids), "max_model_len": ready.limits.context_length, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """Ids → text."""
        asked = converted(await self._body(request), DetokenizeRequest)
        codec, ready = self.service.find(asked.model).require()
        if asked.tokens and max(asked.tokens) >= ready.limits.vocab_size:
            raise InvalidRequest(f"tokens must be below the vocabulary's size of {ready.limits.vocab_size}", "tokens")
        text = await asyncio.to_thread(codec.tokenizer.decode, asked.tokens)
        return json_response({"prompt": text, "content": text})

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, max_bytes=self.config.max_body_bytes, seconds=self.config.body_seconds)

    def _model(self, served: ServedModel) -> dict[str, Any]:
        """A model as OpenAI's and Anthropic's clients, and those who look for a context length, read it."""
        row: dict[str, Any] = {"id": served.name, "object": "model", "created": int(self.started), "owned_by": "weft"}
        row |= {"type": "model", "display_name": served.name, "created_at": _iso(self.started), "root": served.name}
        condition = condition_of(served)
        value = (
            condition["status"] if condition["status"] in ("failed", "unloading") else "loaded" if served.is_ready else "loading"
        )
        row["status"] = {"value": value} | ({"message": served.failed} if served.failed else {})
        if served.supervisor.condition.ready is not None:
            context = served.supervisor.condition.ready.limits.context_length
            row |= dict.fromkeys(("max_model_len", "context_length", "max_input_tokens", "max_tokens"), context)
            row["meta"] = {"context_length": context, "size_bytes": served.memory.get("weights", 0)}
            codec = served.codec
            found = {} if codec is None else {"tools": codec.calls, "thinking": codec.markers}
            row["capabilities"] = [name for name, way in found.items() if way is not None]
        if served.notice is not None:
            row["notice"] = served.notice
        return row

    def _model_status(self, served: ServedModel) -> dict[str, Any]:
        engine = served.supervisor
        return self._model(served) | {
            "condition": condition_of(served),
            "engine_pid": engine.pid,
            "engine_restarts": engine.restarts,
            "rows_running": engine.status.running,
            "rows_waiting": engine.status.waiting,
            "memory": served.memory,
        }


def condition_of(served: ServedModel) -> dict[str, Any]:
    """How a model is: ready, loading and how far, or what is wrong."""
    condition = served.supervisor.condition
    if served.is_leaving:
        return {"status": "unloading"}
    if served.failed is not None:
        return {"status": "failed", "message": served.failed}
    if served.is_stopping:
        return {"status": "stopping"}
    if served.is_ready:
        return {"status": "ready"}
    if condition.is_sick:
        return {"status": "sick", "message": "its engine is silent; it is replaced if that goes on"}
    loading = condition.loading
    progress = (
        {"what": loading.what, "done": loading.done, "total": loading.total} if loading else {"what": "reading the tokenizer"}
    )
    return {"status": "loading", "progress": progress}


def _option(option: ModelOption) -> dict[str, Any]:
    model, fit = option.model, option.fit
    return {
        "id": model.name,
        "object": "model",
        "kind": model.kind,
        "size_bytes": model.size_bytes,
        "is_here": model.folder is not None,
        "is_loaded": option.is_loaded,
        "needed_bytes": fit.needed_bytes,
        "verdict": fit.verdict,
    }


def _sum(ledgers: list[dict[str, int]]) -> dict[str, int]:
    kinds = {kind for budget in ledgers for kind in budget}
    return {kind: sum(budget.get(kind, 0) for budget in ledgers) for kind in sorted(kinds)}


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
