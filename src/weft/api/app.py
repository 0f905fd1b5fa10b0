"""The route table, and the one handler behind every generating endpoint: read this first.

A wire gives `translate` (JSON → Asked); everything between that and the bytes on the socket is the same for all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import problems
from weft.api.admin import Status, json_response
from weft.api.anthropic import messages
from weft.api.body import read_json
from weft.api.cache_routes import Cache
from weft.api.deadline import Deadline
from weft.api.dialect import ParsedRequest, Reply, ReplyHeader
from weft.api.guards import Guard
from weft.api.live import LiveEvents
from weft.api.ollama import chat as ollama
from weft.api.ollama.models import OllamaEndpoints
from weft.api.openai import chat, completions, responses
from weft.api.openai.response_routes import Responses
from weft.api.openai.responses import Past
from weft.api.page import Page
from weft.api.sse import EventStream, whole
from weft.config import ServerConfig
from weft.errors import ContextTooLong
from weft.ipc.limits import Sampling
from weft.log import RequestRecord, log_request
from weft.serving.active_request import ActiveRequest
from weft.serving.service import Service
from weft.text.types import GenerationRequest

LARGE_BODY = 1 << 16  # bytes
SILENCE_SECONDS = 60.0  # between two wake-ups of a reply that is not streamed
# Their clients come again with more of the same.
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session_id", "session-id", "x-claude-code-session-id")

Translate = Callable[..., ParsedRequest]  # takes a body, and where there is a Recall the past
Recall = Callable[[dict[str, Any], bytes], Awaitable[Past]]  # takes a body, and the key that sends it


def make_app(service: Service, config: ServerConfig) -> Starlette:
    """The server as an ASGI application, guards around it."""
    status, cache, models = Status(service, config), Cache(service, config), OllamaEndpoints(service, config)
    kept, page, events = Responses(service, config, status), Page(), LiveEvents(service)
    routes = [
        *(Route(path, page.file) for path in page.files),  # Claude Code asks by HEAD / whether somebody is there
        _generating("/v1/chat/completions", "chat", chat.translate, service, config),
        _generating("/v1/completions", "completions", completions.translate, service, config),
        _generating("/v1/responses", "responses", responses.translate, service, config, kept.recall),
        Route("/v1/responses/input_tokens", kept.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", kept.get),
        Route("/v1/responses/{id}", kept.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", kept.items),
        Route("/v1/responses/{id}/cancel", kept.cancel, methods=["POST"]),
        _generating("/v1/messages", "messages", messages.translate, service, config),
        _counting("/v1/messages/count_tokens", messages.translate_count, service, config),
        _generating("/api/chat", "ollama", ollama.translate_chat, service, config),
        _generating("/api/generate", "ollama", ollama.translate_generate, service, config),
        Route("/api/version", models.version),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/embed", models.embed, methods=["POST"]),
        Route("/api/embeddings", models.embed, methods=["POST"]),
        Route("/v1/models", status.models),
        Route("/v1/models/available", status.available),
        Route("/v1/models/load", status.load, methods=["POST"]),
        Route("/v1/models/unload", status.unload, methods=["POST"]),
        Route("/v1/models/{id:path}", status.model),
        Route("/v1/requests/{id}/cancel", status.cancel, methods=["POST"]),
        Route("/v1/cache", cache.list),
        Route("/v1/cache/clear", cache.clear, methods=["POST"]),
        Route("/v1/cache/requests/{id}", cache.report),
        Route("/v1/status", status.status),
        Route("/v1/events", events.stream),
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/openapi.json", status.openapi),
        Route("/tokenize", status.tokenize, methods=["POST"]),
        Route("/detokenize", status.detokenize, methods=["POST"]),
    ]
    guard = Middleware(
        Guard,
        api_keys=config.api_keys,
        open_paths=("/health", *page.files),
        allowed_hosts=(*config.allowed_hosts, config.host),
        allowed_origins=config.allowed_origins,
        on_response=service.metrics.http,
    )
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: problems.handle})


def _generating(
    path: str, dialect: str, translate: Translate, service: Service, config: ServerConfig, recall: Recall | None = None
) -> Route:
    async def endpoint(request: Request) -> Any:
        """Parse the body, start the request, and reply: streamed, whole, or with what is wrong."""
        account = RequestAccount(request, dialect, service)
        try:
            deadline = Deadline.of(request.headers, config.request_timeout)
            body = await read_json(request, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
            # A large schema takes its time; streams are not to wait for it.
            is_large = int(request.headers.get("content-length") or 0) > LARGE_BODY or recall is not None
            past = {} if recall is None else {"past": await recall(body, request.state.api_key)}
            parsed = await asyncio.to_thread(translate, body, **past) if is_large else translate(body)
            generation = _identified(request, replace(parsed.generation, dialect=dialect))
            model = service.find(generation.model)
            headers = {"x-ignored-params": quote(", ".join(parsed.ignored), safe=", ")[:1000]} if parsed.ignored else {}

            def reply(sampling: Sampling | None = None) -> Reply:
                return parsed.reply(
                    ReplyHeader(account.request_id, int(time.time()), model.name, _fingerprint(service), sampling)
                )

            account.model = model.name
            if not generation.prompts:  # the client wants the model loaded and nothing else
                await deadline.hold(model.until_settled())
                model.require()
                account.close(None)
                return json_response(reply().whole(), headers=headers)
            active = account.active = ActiveRequest(account.request_id, generation, may_wait=parsed.stream)
            parts = service.generate(active, config.heartbeat_seconds if parsed.stream else SILENCE_SECONDS)
            try:
                await deadline.hold(anext(parts))
            except ContextTooLong as error:
                if not (parsed.stream and parsed.streams_overflow):
                    raise
                account.close(error)
                told = reply()
                return Response(told.opening() + told.failure(error), headers=headers, media_type=parsed.media_type)
            told = reply(active.sampling)
            if parsed.stream:
                return EventStream(told, active, parts, account.close, deadline, headers | {"content-type": parsed.media_type})
            response = json_response(await whole(told, active, parts, request.receive, deadline), headers=headers)
            account.close(None)
            return response
        except Exception as error:  # the guard replies to it; here it is only counted
            account.close(error)
            raise

    return Route(path, endpoint, methods=["POST"])


def _counting(
    path: str, translate: Callable[[dict[str, Any]], GenerationRequest], service: Service, config: ServerConfig
) -> Route:
    async def endpoint(request: Request) -> Any:
        """How many tokens a request's prompt has."""
        body = await read_json(request, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
        generation = await asyncio.to_thread(translate, body)
        return json_response({"input_tokens": await service.count_tokens(generation)})

    return Route(path, endpoint, methods=["POST"])


def _identified(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """The request with its client for fairness: a session where the client names one, else its key, hashed."""
    session = generation.session or next(filter(None, map(request.headers.get, SESSION_HEADERS)), "")
    who = request.state.api_key + b"\0" + session.encode()
    client = hashlib.blake2b(who, digest_size=8).hexdigest() if who != b"\0" else ""
    return replace(generation, session=session, client=client)


class RequestAccount:
    """One HTTP request from its arrival to the record it leaves in log and metrics."""

    def __init__(self, request: Request, dialect: str, service: Service) -> None:
        self.request_id: str = request.state.request_id
        self.client = f"{request.client.host}:{request.client.port}" if request.client else "-"
        self.dialect = dialect
        self.path = request.scope["path"]
        self.service = service
        self.model = "-"
        self.active: ActiveRequest | None = None
        self.arrived = time.monotonic()

    def close(self, error: BaseException | None) -> None:
        """Log the request, and count it if the engine had it."""
        status = 200 if error is None else problems.status_of(error, self.path) if isinstance(error, Exception) else 499
        active = self.active if self.active is not None and self.active.is_submitted else None
        finish = "cancelled" if status == 499 else "error" if error is not None else active.finish if active else None
        record = RequestRecord(
            request_id=self.request_id,
            client=self.client,
            dialect=self.dialect,
            model=self.model,
            status=status,
            finish=finish,
            total_seconds=time.monotonic() - self.arrived,
            **({} if active is None else _numbers(active)),
        )
        log_request(record)
        if active is not None and finish is not None:
            self.service.metrics.finished(record)


def _numbers(active: ActiveRequest) -> dict[str, Any]:
    usage = active.usage
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_seconds", "prefill_seconds", "decode_seconds")
    cause = None if usage.reuse is None else usage.reuse.cause
    return {name: getattr(usage, name) for name in names} | {
        "miss_cause": cause,
        "first_token_seconds": active.first_token_seconds,
    }


def _fingerprint(service: Service) -> str:
    ready = next((model.ready for model in service.models), None)
    return ready.versions if ready is not None else "weft"
